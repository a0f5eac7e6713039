"""Recognises the ResNet in a file of another library, and translates its arrays to this model's.

`benchmarks.resnet.variants` has the variants that are known. A model that computes another function
or has other arrays is refused by name.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

import models
from benchmarks.resnet.use import tensorflow_weights
from common.errors import DataError, one_line, some
from common.foreign import files, resnets
from common.foreign.files import Foreign
from common.foreign.resnets import Family
from common.images import input_spec
from common.images.input_spec import NAMED, InputSpec
from common.layers import space_to_depth
from common.trees import by_name

_FAMILIES = (resnets.PLAIN, resnets.DEEP, resnets.PRE_ACTIVATION, resnets.HUGGING_FACE)
# The keys that decide which arrays a model has
ARCHITECTURE = (
    "resnet_depth",
    "num_filters",
    "resnet_version",
    "deep_stem",
    "squeeze_excite",
    "stage1_projection",
)
_STEM = "params/conv_stem/kernel"
_HEAD, _HEAD_BIAS = "params/head/kernel", "params/head/bias"
# The first digits of SHA-256 are in the names of torchvision's files; these are its second weights.
_TORCHVISION_V2 = ("11ad3fa6", "cd907fc2", "f82ba261")
# timm's architectures that are the same function as a ResNet here
_TIMM = r"(tv_|gluon_)?(se)?resnet(v2_|rs)?\d+d?"
_STRIDES = (
    "{path} does not say which convolution of a bottleneck has the stride: the second is assumed, "
    "as in the TPU tutorial; for the first, as in the original ResNet, give "
    "--config.resnet_version=1"
)
_KERNELS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers, as Hugging Face writes them


def read_settings(source: Foreign) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values of the config's keys that describe the model in a file, and (note, key) pairs.

    Without `num_label_classes` where the file has no classifier. DataError: no known ResNet.
    """
    arrays, family, values = _recognised(source)
    spec, note = _input_spec(source, values["resnet_version"])
    name = next((k for k, known in NAMED.items() if known == spec), json.dumps(spec.as_dict()))
    values |= {"image_size": spec.size, "input_spec": name}
    if (bias := arrays.get(family.name(_HEAD_BIAS))) is not None:
        values["num_label_classes"] = bias.size
    notes = [(source.note, "")] if source.note else []
    notes += [(note, "input_spec")] if note else []
    is_wide = models.DEPTHS[values["resnet_depth"]][1] is models.BottleneckBlock
    if source.format == "TensorFlow" and values["resnet_version"] == "1.5" and is_wide:
        notes.append((_STRIDES.format(path=source.path), "resnet_version"))
    return values, notes


def translate(source: Foreign, params: Any, model_state: Any) -> tuple[Any, Any]:
    """The arrays of a file as (params, model_state), float32; without `head` where it has none.

    `params` and `model_state` are arrays or ShapeDtypeStructs of the model with the settings that
    `read_settings` gives; only the number of classes may differ. DataError: an array is missing, is
    unknown or has another shape.
    """
    arrays, family, _ = _recognised(source)
    tree = {"params": params, "model_state": model_state}
    shapes = {path: tuple(leaf.shape) for path, leaf in by_name(tree).items()}
    if (bias := arrays.get(family.name(_HEAD_BIAS))) is not None:  # the file's number of classes
        shapes |= {_HEAD_BIAS: bias.shape, _HEAD: (shapes[_HEAD][0], bias.size)}
    elif family.name(_HEAD) not in arrays:
        shapes = {path: shape for path, shape in shapes.items() if "/head/" not in path}
    height, width, channels, filters = shapes[_STEM]
    is_folded = height == width == 4 and arrays[family.name(_STEM)].shape[:2] != (4, 4)
    if is_folded:
        shapes[_STEM] = (7, 7, channels // 4, filters)
    adapted = files.adapt(source.path, arrays, shapes, family.theirs)
    if is_folded:
        adapted[_STEM] = np.asarray(space_to_depth.convert_kernel(jnp.asarray(adapted[_STEM])))
    tree = unflatten_dict(adapted, sep="/")
    return tree["params"], tree["model_state"]


def describe(source: Foreign, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(what a manifest says about a file's model, a line for people), from `read_settings`."""
    arrays, _, _ = _recognised(source)
    classes = values.get("num_label_classes", 0)
    labels = list(source.labels) if len(source.labels) == classes else []
    imported = {"path": source.path, "format": source.format, "sha256": source.sha256}
    spec = input_spec.parse_spec(values["input_spec"])
    metadata = {"class_names": labels, "input_spec": spec.as_dict(), "imported": imported}
    statistics = re.compile(r".*(\.running_\w+|/moving_\w+)")
    count = sum(x.size for name, x in arrays.items() if not statistics.fullmatch(name))
    named = "with their names" if labels else "without names"
    network = f"ResNet-{values['resnet_depth']} version {values['resnet_version']}"
    network += " with a space-to-depth stem" if values.get("space_to_depth") else ""
    summary = (
        f"{source.path} ({source.format}): {len(arrays)} arrays, {count:,} parameters, {network}, "
        f"{classes:,} classes {named}, input {values['input_spec']}, SHA-256 {source.sha256[:12]}"
    )
    return metadata, summary


def _recognised(source: Foreign) -> tuple[dict[str, np.ndarray], Family, dict[str, Any]]:
    """The arrays of the model, their family, and the config's keys that they decide."""
    path, arrays = source.path, dict(source.arrays)
    if source.format == "TensorFlow":
        return tensorflow_weights.match(path, arrays)
    if any(name.startswith("embedder.") for name in arrays):  # a model without its classifier
        arrays = {f"resnet.{name}": array for name, array in arrays.items()}
    family = next((f for f in _FAMILIES if f.name(_STEM) in arrays), None)
    if family is None:
        raise DataError(
            f"{path} holds no ResNet of torchvision, timm or Hugging Face: its arrays are "
            f"{some(arrays)}"
        )
    config = source.beside.get("config.json", {})
    if not re.fullmatch(_TIMM, timm := str(config.get("architecture", "resnet50"))):
        raise DataError(f"{path}: timm's architecture {timm[:80]!r} is not supported")
    config = config if config.get("model_type") == "resnet" else {}  # Hugging Face's
    for key, supported in (("hidden_act", "relu"), ("downsample_in_first_stage", False)):
        if (value := config.get(key, supported)) != supported:
            raise DataError(f"{path}: {key}={value!r:.80} in config.json is not supported")
    is_deep = family is resnets.DEEP
    stem = arrays.get(family.name("params/conv_stem3/kernel" if is_deep else _STEM))
    if stem is None or stem.ndim != 4:
        raise DataError(f"{path}: its first layer is not a convolution of images")
    version = "1" if config.get("downsample_in_bottleneck") else "1.5"
    has_conv = is_deep and family.name("params/conv_pool/kernel") in arrays
    squeeze = None
    if "se_reduce" in family.inside:
        squeeze = arrays.get(family.name("params/stage4_block1/se_reduce/kernel"))
    values = {
        "resnet_depth": _depth(path, arrays, family),
        "num_filters": stem.shape[0],
        "resnet_version": "2" if family is resnets.PRE_ACTIVATION else version,
        "deep_stem": is_deep,
        "squeeze_excite": 0.0 if squeeze is None else squeeze.shape[0] / squeeze.shape[1],
        "stage1_projection": False,
        "max_pool": "conv" if has_conv else "torch",
    }
    return arrays, family, values | ({"space_to_depth": False} if is_deep else {})


def _depth(path: str, arrays: Mapping[str, np.ndarray], family: Family) -> int:
    """The depth with as many blocks in each stage as there are names of blocks."""
    layer = "params/stage{}_block{}/conv{}/kernel"
    names = [[family.name(layer.format(s, b, 1)) for b in range(1, 100)] for s in range(1, 5)]
    sizes = tuple(len({*stage} & {*arrays}) for stage in names)
    is_bottleneck = family.name(layer.format(1, 1, 3)) in arrays
    for depth, network in models.DEPTHS.items():
        if network == (sizes, models.BottleneckBlock if is_bottleneck else models.BasicBlock):
            return depth
    raise DataError(
        f"{path} has stages of {sizes} {'bottleneck' if is_bottleneck else 'basic'} blocks: no "
        f"ResNet of a depth that is known here ({', '.join(map(str, models.DEPTHS))})"
    )


def _input_spec(source: Foreign, version: str) -> tuple[InputSpec, str]:
    """How the model wants its pixels, and a note where the file does not say it."""
    beside = source.beside
    try:
        if spec := beside.get("input_spec.json"):
            return input_spec.from_dict(spec), ""
        if isinstance(timm := beside.get("config.json", {}).get("pretrained_cfg"), dict):
            return _of_timm(timm), ""
        if processor := beside.get("preprocessor_config.json"):
            return _of_hugging_face(processor), ""
    except Exception as error:  # the files may hold anything
        raise DataError(
            f"{source.path}: the pixels that the JSON files beside it describe are not supported "
            f"({type(error).__name__}: {one_line(error)[:200]}); remove these files and give "
            "--config.input_spec"
        ) from error
    if source.sha256.startswith(_TORCHVISION_V2):
        return NAMED["torchvision_v2"], ""
    spec = "torchvision_v1"
    if source.format == "TensorFlow":
        spec = "vgg" if version == "2" else "tensorflow"
    return NAMED[spec], (
        f"{source.path} does not say how its pixels are prepared: {spec!r} is assumed; "
        f"--config.input_spec takes one of {', '.join(NAMED)}, or a JSON object"
    )


def _of_timm(config: Mapping[str, Any]) -> InputSpec:
    """timm's pretrained_cfg; ValueError and others if it is not supported."""
    if (mode := config.get("crop_mode", "center")) != "center":
        raise ValueError(f"crop_mode={mode!r}")
    size = int(config["input_size"][-1])
    resize = math.floor(size / config.get("crop_pct", 0.875))
    return _spec(size, resize, config["interpolation"], (config["mean"], config["std"]))


def _of_hugging_face(processor: Mapping[str, Any]) -> InputSpec:
    """A preprocessor_config.json for images; ValueError and others if it is not supported."""
    short, crop = processor["size"], processor.get("crop_size")
    # Files from 2022, such as microsoft/resnet-50's, have a number of pixels alone.
    short = int(short["shortest_edge"] if isinstance(short, dict) else short)
    if crop:  # CLIP's format: the shorter side, then a crop
        size, resize = int(crop["height"] if isinstance(crop, dict) else crop), short
    elif short >= 384:
        raise ValueError(f"an image of {short} pixels is squeezed instead of cropped")
    else:  # ConvNeXt's format, which microsoft/resnet-50 has
        size, resize = short, int(short / processor.get("crop_pct", 0.875))
    scale = (processor["image_mean"], processor["image_std"])
    return _spec(size, resize, _KERNELS[processor.get("resample", 3)], scale)


def _spec(size: int, resize: int, kernel: str, scale: tuple[Any, Any]) -> InputSpec:
    """The spec of mean and standard deviation in 0..1, checked."""
    mean, std = ([round(255 * float(value), 6) for value in values] for values in scale)
    values = {"size": size, "resize": resize, "kernel": kernel, "antialias": True}
    return input_spec.from_dict(values | {"mean": mean, "std": std, "channels": "RGB"})
