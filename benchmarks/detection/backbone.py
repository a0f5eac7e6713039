"""Begins a detector with the weights of a ResNet: which ResNets fit, and where their arrays go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.detection import images
from benchmarks.detection.settings import Backbone
from errors import CheckpointError, ConfigError
from models import DEPTHS
from ops.images import input_spec
from ops.trees import by_name

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
    if depth in DEPTHS and DEPTHS[depth][0][: len(stages)] != stages:
        raise ConfigError(
            f"{name} is a ResNet-{depth}, whose stages have {DEPTHS[depth][0]} blocks, not those "
            f"of config.resnet_stages={stages}: give a ResNet of that depth"
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


def placed(loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Puts the arrays of a ResNet below "backbone"; those of a detector stay as they are."""
    if "backbone" in loaded["params"]:
        return loaded
    state = {kind: {"backbone": arrays} for kind, arrays in loaded["model_state"].items()}
    return {"params": {"backbone": loaded["params"]}, "model_state": state}


def keys(backbone: Backbone) -> str:
    """The config's keys that say which ResNet a backbone is, with their values."""
    stages, filters = backbone.resnet_stages, backbone.num_filters
    return f"config.resnet_stages={stages} and config.num_filters={filters}"


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
