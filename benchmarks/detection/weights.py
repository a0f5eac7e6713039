"""The weights that a detector begins with: a ResNet's for its backbone, or a detector's.

They may come from a run or from another library. The module `library` of each detector's `MODEL`
has the names and layouts of the other library's weights: `TITLE`, `matches(source)`, `FORMER`,
`read_settings(source)`, whose KeyError and ValueError say what is missing, and `theirs(path, array,
values)` with the `values` that it returns. Its `renew_heads(settings, initial, loaded)` adapts the
heads to new classes: of the initial parameters and the other model's, both by path.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

import benchmarks
from benchmarks.detection.settings import Settings
from benchmarks.uses import Imported
from common.errors import CheckpointError, ConfigError, DataError
from common.foreign import files
from common.foreign.files import Foreign
from common.images import input_spec
from common.trees import by_name
from models import DEPTHS, BasicBlock, BottleneckBlock

Described = tuple[dict[str, Any], list[tuple[str, str]]]  # keys' values, (note, key) pairs
# Other benchmarks whose models config.init_from may name
FOLLOWS = ("resnet",)
# The ResNet that is a backbone. Other values compute something else with arrays of the same shapes.
_RESNET_KEYS = {
    "resnet_version": "1.5",
    "deep_stem": False,
    "squeeze_excite": 0.0,
    "blur_pool": False,
    "stage1_projection": False,
}


def follow(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a ResNet that a detector begins with, and gives its sizes to the backbone.

    A recipe with `config.init_env` is a published one: its sizes stay, and ResNets of other sizes
    are refused. ConfigError: the ResNet computes something else than the backbone with these
    arrays, or was trained on other pixels. `values` are the ResNet's config; the result is the
    values of the detector's keys for the sizes of the backbone.
    """
    name = f"config.init_from={config.init_from}"
    for key, needed in _RESNET_KEYS.items():
        if (value := values.get(key, needed)) != needed:
            raise ConfigError(
                f"{name} is a ResNet with {key}={value!r}, which is not a backbone of a detector: "
                f"give one that was trained with --config.{key}={needed}"
            )
    spec = input_spec.parse_spec(values.get("input_spec", "tensorflow"))
    # Size and resizing are the detector's, not the ResNet's.
    if (spec.mean, spec.std, spec.channels) != (*input_spec.IMAGENET, "RGB"):
        raise ConfigError(
            f"{name} is a ResNet whose input_spec has mean={spec.mean}, std={spec.std} and "
            f"{spec.channels}, but a detector gives its backbone RGB of ImageNet's: give one that "
            "was trained with --config.input_spec=tensorflow"
        )
    depth, stages = values.get("resnet_depth"), tuple(config.resnet_stages)
    block = BottleneckBlock if config.get("resnet_bottleneck", False) else BasicBlock
    takes_any = not config.init_env and "resnet_bottleneck" in config

    def fits(sizes: tuple[int, ...], own_block: Any) -> bool:
        has_stages = not config.init_env or sizes[: len(stages)] == stages
        return has_stages and (own_block == block or takes_any)

    if depth not in DEPTHS:
        return {}
    sizes, own_block = DEPTHS[depth]
    if not fits(sizes, own_block):
        fitting = [str(number) for number, row in DEPTHS.items() if fits(*row)]
        fix = f": give a ResNet-{' or -'.join(fitting)}" if fitting else ""
        raise ConfigError(
            f"{name} is a ResNet-{depth}, whose stages have {sizes} blocks ({own_block.__name__}), "
            f"not those of config.resnet_stages={stages} ({block.__name__}){fix}"
        )
    if config.init_env:
        return {}
    followed: dict[str, Any] = {"resnet_stages": sizes[: len(stages)]}
    followed["num_filters"] = values["num_filters"]
    if "resnet_bottleneck" in config:
        followed["resnet_bottleneck"] = own_block == BottleneckBlock
    return followed


def adopt(
    settings: Settings,
    library: ModuleType,
    merge: Callable[[Any, Any, Any], tuple[Any, Any]],
    params: Any,
    model_state: Any,
    loaded: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Takes the arrays of a detector of the same kind, or of a ResNet for the backbone.

    With `config.new_classes`, the library's `renew_heads` adapts the heads. CheckpointError says
    that an array of the backbone is missing or of another shape.

    `settings`, `library`, `params` and `model_state` are of the detector that begins with the
    arrays; `loaded` is as in `Benchmark.adopt`, and `merge` takes what has the same path and shape.
    """
    initial = by_name(params)
    if "backbone" not in loaded["params"]:  # a ResNet's arrays
        state = {name: {"backbone": arrays} for name, arrays in loaded["model_state"].items()}
        loaded = {"params": {"backbone": loaded["params"]}, "model_state": state}
    params, model_state = merge(params, model_state, loaded)
    theirs, keys = by_name(loaded), settings.backbone
    for name, own in by_name({"params": params, "model_state": model_state}).items():
        other = theirs.get(name)
        if "/backbone/" in name and (other is None or other.shape != own.shape):
            has = "is missing" if other is None else f"has the shape {other.shape}"
            raise CheckpointError(
                f"{name} {has}, the backbone needs {own.shape}: give a ResNet with the "
                f"config.resnet_stages={keys.resnet_stages} and "
                f"config.num_filters={keys.num_filters} of the detector, or such a detector"
            )
    if settings.tuning.new_classes:
        if isinstance(next(iter(initial.values())), jax.ShapeDtypeStruct):
            # So that these arrays count as taken in part here, too
            initial = {name: np.zeros(x.shape, x.dtype) for name, x in initial.items()}
        heads = library.renew_heads(settings, initial, by_name(loaded["params"]))
        params = unflatten_dict(by_name(params) | heads, sep="/")
    return params, model_state


def read_foreign_settings(library: ModuleType, file: str) -> Described | None:
    """The keys of another library's detector and notes on it; None if `file` has no such detector.

    `library` is that of the benchmark.
    """
    source = files.peek(file)
    if library.matches(source):
        return described(library, source)[1:]
    for name in benchmarks.names():
        theirs = benchmarks.model(name).library
        if theirs and theirs.matches(source):
            raise DataError(f"{file} is {theirs.TITLE}, which --config=configs/{name}.py takes")
    return None


def described(library: ModuleType, source: Foreign) -> tuple[Mapping[str, np.ndarray], *Described]:
    """A file's arrays by their newest names, and the settings that they imply."""
    arrays = {}
    for name, array in source.arrays.items():
        layer, dot, leaf = name.rpartition(".")
        arrays[f"{library.FORMER.get(layer, layer)}{dot}{leaf}"] = array
    try:
        return arrays, *library.read_settings(dataclasses.replace(source, arrays=arrays))
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{source.path} is {library.TITLE}, but incomplete: it lacks {error}"
        ) from error


def read_foreign(detector: Any, file: str) -> Imported:
    """Reads weights that a detector can begin with: a detector's of the same kind, or a ResNet's.

    `detector` is a `Detector`. DataError: the file holds neither, or a detector of other sizes.
    """
    source, library = files.read(file), detector.library
    if not library.matches(source):
        folded = getattr(detector.settings.backbone, "space_to_depth", False)
        read = benchmarks.model("resnet").foreign_weights
        assert read is not None
        try:
            return read(source, folded)
        except DataError as error:
            raise DataError(f"{error}; nor is it {library.TITLE}") from error
    arrays, values, _ = described(library, source)
    keys = detector.settings
    data = dataclasses.replace(keys.data, num_classes=values["num_classes"])
    same = type(detector)(dataclasses.replace(keys, data=data), "")
    params, state = jax.eval_shape(same.init, jax.random.key(0))
    named = by_name({"params": params, "model_state": state})
    shapes = {path: tuple(leaf.shape) for path, leaf in named.items()}
    layout = functools.partial(library.theirs, values=values)
    tree = unflatten_dict(files.adapt(file, arrays, shapes, layout), sep="/")
    imported = {"path": file, "format": source.format, "sha256": source.sha256}
    # The files do not say it: torchvision and the reference train on these pixels.
    imported |= dict(zip(("mean", "std"), input_spec.IMAGENET, strict=True)) | {"channels": "RGB"}
    count = sum(array.size for array in jax.tree.leaves(tree["params"]))
    summary = (
        f"{file} ({source.format}): {library.TITLE}, {count:,} parameters, {values['num_classes']} "
        f"classes, SHA-256 {source.sha256[:12]}"
    )
    return Imported(file, tree["params"], tree["model_state"], {"imported": imported}, summary)
