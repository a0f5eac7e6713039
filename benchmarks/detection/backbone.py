"""Begins a detector with the weights of a ResNet: which ResNets fit, and where their arrays go."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from benchmarks.detection import images
from benchmarks.detection.settings import Backbone
from errors import CheckpointError, ConfigError
from models import DEPTHS, BasicBlock, BottleneckBlock
from ops.images import input_spec
from ops.trees import by_name

if TYPE_CHECKING:
    from benchmarks.detection.detector import Detector

# What a detector's ResNet is. Other values compute something else with arrays of the same shapes.
_BACKBONE = {
    **{"resnet_version": "1.5", "deep_stem": False, "squeeze_excite": 0.0, "blur_pool": False},
    "stage1_projection": False,
}


def check(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Checks a ResNet with whose weights a detector begins; see `benchmarks.settling.settle`.

    Args:
      config: the detector's; `config.max_pool` follows the ResNet.
      values: the ResNet's config.

    Returns:
      Remarks on what differs without harm.

    Raises:
      ConfigError: the ResNet computes something else than the backbone with these arrays, or was
        trained on other pixels.
    """
    name = f"config.init_from={config.init_from}"
    for key, needed in _BACKBONE.items():
        if (value := values.get(key, needed)) != needed:
            raise ConfigError(
                f"{name} is a ResNet with {key}={value!r}, which is no backbone of a detector: "
                f"give one that was trained with --config.{key}={needed}"
            )
    depth, stages = values.get("resnet_depth"), tuple(config.resnet_stages)
    block = BottleneckBlock if config.get("resnet_bottleneck", False) else BasicBlock
    fitting = [
        d for d, (sizes, kind) in DEPTHS.items() if (sizes[: len(stages)], kind) == (stages, block)
    ]
    if depth in DEPTHS and depth not in fitting:
        sizes, kind = DEPTHS[depth]
        wanted = "-" + " or -".join(map(str, fitting)) if fitting else " of these blocks"
        raise ConfigError(
            f"{name} is a ResNet-{depth}, whose stages have {sizes} blocks ({kind.__name__}), not "
            f"those of config.resnet_stages={stages} ({block.__name__}): give a ResNet{wanted}"
        )
    spec = input_spec.parse(values.get("input_spec", "tensorflow"))
    # Size and resizing are the detector's own.
    for field, own in (("mean", images.MEAN), ("std", images.STD), ("channels", "RGB")):
        if (value := getattr(spec, field)) != own:
            raise ConfigError(
                f"{name} is a ResNet whose input_spec has {field}={value}, but a detector gives "
                f"its backbone {own}: give one that was trained with "
                "--config.input_spec=tensorflow, or another with these values"
            )
    return []


def adopt(
    detector: Detector,
    merge: Callable[[Any, Any, Any], tuple[Any, Any]],
    params: Any,
    model_state: Any,
    loaded: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Takes the arrays of another such detector, or those of a ResNet for the backbone.

    With `config.new_classes`, the room's module `heads` says what stays of the heads.

    Args:
      detector: the one that begins with them.
      merge: takes the arrays whose path and shape are the same.
      params, model_state, loaded: see `Benchmark.adopt`.

    Raises:
      CheckpointError: an array of the backbone is missing or of another shape.
    """
    initial, loaded = params, placed(loaded)
    params, model_state = merge(params, model_state, loaded)
    check_complete(loaded, params, model_state, sources(detector.settings.backbone))
    is_abstract = isinstance(jax.tree.leaves(initial)[0], jax.ShapeDtypeStruct)
    if detector.settings.tuning.new_classes:
        heads = importlib.import_module(f"{type(detector).__module__}.heads")
        own = by_name(initial)
        if is_abstract:  # so that these arrays count as taken in part here, too
            own = {name: np.zeros(x.shape, x.dtype) for name, x in own.items()}
        mine = heads.renewed(detector, own, by_name(loaded["params"]))
        params = unflatten_dict(by_name(params) | mine, sep="/")
    return params, model_state


def placed(loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Puts the arrays of a ResNet below "backbone"; those of a detector stay as they are."""
    if "backbone" in loaded["params"]:
        return loaded
    state = {kind: {"backbone": arrays} for kind, arrays in loaded["model_state"].items()}
    return {"params": {"backbone": loaded["params"]}, "model_state": state}


def sources(backbone: Backbone) -> str:
    """The models whose arrays a backbone can take, in words."""
    stages, filters = backbone.resnet_stages, backbone.num_filters
    described = f"config.resnet_stages={stages} and config.num_filters={filters} describe"
    if getattr(backbone, "resnet_bottleneck", False):
        source = f"--config=configs/resnet50.py (or the ResNet that {described})"
    else:
        source = (
            "--config=configs/resnet50.py --config.resnet_depth=34 (or the ResNet of basic blocks "
            f"that {described})"
        )
    return f"{source}, or of such a detector"


def check_complete(loaded: Mapping[str, Any], params: Any, model_state: Any, source: str) -> None:
    """Checks that the loaded model has every array of the detector's backbone.

    Args:
      loaded: from `placed`.
      params, model_state: the detector's.
      source: the models that fit, in words.

    Raises:
      CheckpointError: an array of the backbone is missing or of another shape.
    """
    theirs, ours = _arrays(loaded), _arrays({"params": params, "model_state": model_state})
    for name, mine in ours.items():
        if (other := theirs.get(name)) is None or other.shape != mine.shape:
            has = "is missing" if other is None else f"has the shape {other.shape}"
            raise CheckpointError(
                f"{name} {has}, the backbone needs {mine.shape}: give a workdir of {source}"
            )


def _arrays(model: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the backbone by name, "params/backbone/conv_stem/kernel" and so on first."""
    named = by_name(model)
    names = sorted(named, key=lambda name: name.startswith("model_state"))
    return {name: named[name] for name in names if "/backbone/" in name}
