"""Finds out which ResNet a file of another library holds, and brings its arrays into our form.

The variants are those of `benchmarks.resnet.variants`. A model of another function, or of another
number of arrays, is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
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
# The keys without which the arrays are another model's
ARCHITECTURE = (
    *("resnet_depth", "num_filters", "resnet_version", "deep_stem", "squeeze_excite"),
    "stage1_projection",
)
_STEM, _HEAD, _HEAD_BIAS = (
    f"params/{name}" for name in ("conv_stem/kernel", "head/kernel", "head/bias")
)
# The first digits of SHA-256 are in the names of torchvision's files; these are its second weights.
_TORCHVISION_V2 = ("11ad3fa6", "cd907fc2", "f82ba261")
# timm's models that are the same function as one of ours, by the names of its architectures
_TIMM = r"(tv_|gluon_)?(se)?resnet(v2_|rs)?\d+d?"
_COLOURS = 3
_STRIDES = (
    "{path} does not say which convolution of a bottleneck has the stride: the second is assumed, "
    "as in the TPU tutorial; for the first, as in the original ResNet, give "
    "--config.resnet_version=1"
)
_KERNELS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers, as Hugging Face writes them


def read_settings(source: Foreign) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values of the config's keys that describe the model in a file, and (remark, key) pairs.

    Without `num_label_classes` where the file has no classifier.

    Raises:
      DataError: the file holds no ResNet that we have.
    """
    if source.format == "TensorFlow":
        return _of_tensorflow(source)
    arrays, family = _arrays(source)
    _check_architecture(source)
    is_deep = family is resnets.DEEP
    v1 = _hugging_face(source).get("downsample_in_bottleneck", False)
    version = "2" if family is resnets.PRE_ACTIVATION else "1" if v1 else "1.5"
    stem = arrays.get(family.name("params/conv_stem3/kernel" if is_deep else _STEM))
    if stem is None or stem.ndim != 4:
        raise DataError(f"{source.path}: its first layer is no convolution of images")
    has_conv = is_deep and family.name("params/conv_pool/kernel") in arrays
    spec, remarks = _input_spec(source, family)
    values: dict[str, Any] = {
        "resnet_depth": _depth(source.path, arrays, family),
        "num_filters": stem.shape[0],
        "resnet_version": version,
        "deep_stem": is_deep,
        "squeeze_excite": _squeeze_excite(arrays, family),
        "stage1_projection": False,
        "max_pool": "conv" if has_conv else "torch",
        "image_size": spec.size,
        "input_spec": _name(spec),
    }
    if is_deep:
        values["space_to_depth"] = False
    if (bias := arrays.get(family.name(_HEAD_BIAS))) is not None:
        values["num_label_classes"] = bias.size
    return values, remarks


def _of_tensorflow(source: Foreign) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """`read_settings` for a checkpoint of TensorFlow."""
    arrays, family, depth, version, projects = tensorflow_weights.match(source.path, source.arrays)
    stem = arrays[family.name(_STEM)]
    spec = "vgg" if version == "2" else "tensorflow"
    values: dict[str, Any] = {
        **{"resnet_depth": depth, "num_filters": stem.shape[3], "resnet_version": version},
        **{"deep_stem": False, "squeeze_excite": 0.0, "stage1_projection": projects},
        **{"max_pool": "same", "image_size": NAMED[spec].size, "input_spec": spec},
    }
    if stem.shape[2] != _COLOURS:
        values["space_to_depth"] = True
    if (bias := arrays.get(family.name(_HEAD_BIAS))) is not None:
        values["num_label_classes"] = bias.size
    remarks = [(source.remark, "")] if source.remark else []
    remarks.append(_assumed(source, spec))
    if version == "1.5" and models.DEPTHS[depth][1] is models.BottleneckBlock:
        remarks.append((_STRIDES.format(path=source.path), "resnet_version"))
    return values, remarks


def translate(source: Foreign, params: Any, model_state: Any) -> tuple[Any, Any]:
    """The arrays of a file as (params, model_state), float32; without `head` where it has none.

    Args:
      source: the file.
      params, model_state: arrays or ShapeDtypeStructs of our model with the settings that
        `read_settings` gives; only the classes may be others.

    Raises:
      DataError: an array is missing, is unknown or has another shape.
    """
    arrays, family = _arrays(source)
    shapes = _shapes(arrays, family, {"params": params, "model_state": model_state})
    is_folded = shapes[_STEM][:2] == (4, 4) and np.shape(arrays[family.name(_STEM)])[:2] != (4, 4)
    if is_folded:
        shapes[_STEM] = (7, 7, shapes[_STEM][2] // 4, shapes[_STEM][3])
    names = {path: family.name(path) for path in shapes}
    zero = np.float32(0)
    wanted = {
        name: family.theirs(name, np.broadcast_to(zero, shapes[path])).shape
        for path, name in names.items()
    }
    files.check_arrays(source.path, arrays, wanted)
    ours = {}
    for path, shape in shapes.items():
        array = files.finite_floats(source.path, names[path], arrays[names[path]])
        ours[path] = np.ascontiguousarray(family.ours(array, shape))
    if is_folded:
        ours[_STEM] = np.asarray(space_to_depth.convert_kernel(jnp.asarray(ours[_STEM])))
    tree = unflatten_dict(ours, sep="/")
    return tree["params"], tree["model_state"]


def describe(source: Foreign, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(what a manifest says about a file's model, a line for people), from `read_settings`."""
    arrays, _ = _arrays(source)
    classes = values.get("num_label_classes", 0)
    labels = list(source.labels) if len(source.labels) == classes else []
    imported = {"path": source.path, "format": source.format, "sha256": source.sha256}
    spec = input_spec.parse_spec(values["input_spec"])
    metadata = {"class_names": labels, "input_spec": spec.as_dict(), "imported": imported}
    count = sum(array.size for name, array in arrays.items() if not _is_statistic(name))
    named = "with their names" if labels else "without names"
    network = f"ResNet-{values['resnet_depth']} version {values['resnet_version']}"
    network += " with a space-to-depth stem" if values.get("space_to_depth") else ""
    summary = (
        f"{source.path} ({source.format}): {len(arrays)} arrays, {count:,} parameters, {network}, "
        f"{classes:,} classes {named}, input {values['input_spec']}, SHA-256 {source.sha256[:12]}"
    )
    return metadata, summary


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2].startswith("running_") or "/moving_" in name


def _arrays(source: Foreign) -> tuple[dict[str, np.ndarray], Family]:
    """The arrays that matter, by the full names of their family, and the family."""
    if source.format == "TensorFlow":
        return tensorflow_weights.match(source.path, source.arrays)[:2]
    arrays = {k: v for k, v in source.arrays.items() if not k.endswith("num_batches_tracked")}
    if any(name.startswith("embedder.") for name in arrays):  # a model without its classifier
        arrays = {f"resnet.{name}": array for name, array in arrays.items()}
    for family in _FAMILIES:
        if family.name(_STEM) in arrays:
            return arrays, family
    raise DataError(
        f"{source.path} holds no ResNet of torchvision, timm or Hugging Face: its arrays are "
        f"{some(arrays)}"
    )


def _check_architecture(source: Foreign) -> None:
    """Refuses models of other functions whose arrays have the same names and shapes."""
    timm = source.beside.get("config.json", {}).get("architecture")
    if timm is not None and not re.fullmatch(_TIMM, str(timm)):
        raise DataError(f"{source.path}: timm's architecture {str(timm)[:80]!r} is not supported")
    config = _hugging_face(source)
    for key, expected in (("hidden_act", "relu"), ("downsample_in_first_stage", False)):
        if (value := config.get(key, expected)) != expected:
            raise DataError(f"{source.path}: {key}={value!r:.80} in config.json is not supported")


def _hugging_face(source: Foreign) -> Mapping[str, Any]:
    """Hugging Face's config.json; {} if the model is not described by one."""
    config = source.beside.get("config.json", {})
    return config if config.get("model_type") == "resnet" else {}


def _depth(path: str, arrays: Iterable[str], family: Family) -> int:
    """The depth with as many blocks in each stage as there are names of blocks."""
    pattern = re.escape(family.block).replace(r"\{stage\}", r"(\d+)").replace(r"\{block\}", r"\d+")
    blocks = {match[0]: int(match[1]) for name in arrays if (match := re.match(pattern, name))}
    stages = sorted(set(blocks.values()))
    sizes = tuple(list(blocks.values()).count(stage) for stage in stages)
    is_bottleneck = any(family.name("params/stage1_block1/conv3/kernel") == name for name in arrays)
    for depth, known in models.DEPTHS.items():
        if known == (sizes, models.BottleneckBlock if is_bottleneck else models.BasicBlock):
            return depth
    raise DataError(
        f"{path} has stages of {sizes} {'bottleneck' if is_bottleneck else 'basic'} blocks: no "
        f"ResNet of a depth that is known here ({', '.join(map(str, models.DEPTHS))})"
    )


def _squeeze_excite(arrays: Mapping[str, np.ndarray], family: Family) -> float:
    """The ratio of squeeze-and-excite's channels in the last stage; 0 where there is none."""
    if "se_reduce" not in family.inside:
        return 0.0
    reduce = arrays.get(family.name("params/stage4_block1/se_reduce/kernel"))
    return 0.0 if reduce is None or reduce.ndim < 2 else reduce.shape[0] / reduce.shape[1]


def _shapes(
    arrays: Mapping[str, np.ndarray], family: Family, tree: Any
) -> dict[str, tuple[int, ...]]:
    """The shapes of our arrays by path, with the file's number of classes."""
    shapes = {path: tuple(leaf.shape) for path, leaf in by_name(tree).items()}
    if (bias := arrays.get(family.name(_HEAD_BIAS))) is not None:
        return shapes | {_HEAD_BIAS: bias.shape, _HEAD: (shapes[_HEAD][0], bias.size)}
    if family.name(_HEAD) in arrays:
        return shapes
    return {path: shape for path, shape in shapes.items() if "/head/" not in path}


def _input_spec(source: Foreign, family: Family) -> tuple[InputSpec, list[tuple[str, str]]]:
    """How the model wants its pixels, and a remark where the file does not say it."""
    beside = source.beside
    config = beside.get("config.json", {})
    try:
        if ours := beside.get("input_spec.json"):
            return input_spec.from_dict(ours), []
        if isinstance(timm := config.get("pretrained_cfg"), dict):
            return _of_timm(timm), []
        if processor := beside.get("preprocessor_config.json"):
            return _of_hugging_face(processor), []
    except Exception as error:  # the files may hold anything
        raise DataError(
            f"{source.path}: the pixels that the JSON files beside it describe are not supported "
            f"({type(error).__name__}: {one_line(error)[:200]}); remove these files and give "
            "--config.input_spec"
        ) from error
    if source.sha256.startswith(_TORCHVISION_V2):
        return NAMED["torchvision_v2"], []
    return NAMED["torchvision_v1"], [_assumed(source, "torchvision_v1")]


def _assumed(source: Foreign, spec: str) -> tuple[str, str]:
    """A remark on pixels that the file does not describe."""
    remark = (
        f"{source.path} does not say how its pixels are prepared: {spec!r} is assumed; "
        f"--config.input_spec takes one of {', '.join(NAMED)}, or a JSON object"
    )
    return remark, "input_spec"


def _of_timm(config: Mapping[str, Any]) -> InputSpec:
    """timm's pretrained_cfg; ValueError and others if it is not supported."""
    if (mode := config.get("crop_mode", "center")) != "center":
        raise ValueError(f"crop_mode={mode!r}")
    size = int(config["input_size"][-1])
    resize = math.floor(size / config.get("crop_pct", 0.875))
    return _spec(size, resize, config["interpolation"], (config["mean"], config["std"]))


def _of_hugging_face(processor: Mapping[str, Any]) -> InputSpec:
    """A preprocessor_config.json for images; ValueError and others if it is not supported."""
    short = _side(processor["size"], "shortest_edge")
    crop = processor.get("crop_size")
    if crop:  # of CLIP: the shorter side, then a crop
        size, resize = _side(crop, "height"), short
    elif short >= 384:
        raise ValueError(f"an image of {short} pixels is squeezed instead of cropped")
    else:  # of ConvNeXt, which microsoft/resnet-50 has
        size, resize = short, int(short / processor.get("crop_pct", 0.875))
    scale = (processor["image_mean"], processor["image_std"])
    return _spec(size, resize, _KERNELS[processor.get("resample", 3)], scale)


def _side(size: Any, key: str) -> int:
    """A side in pixels; files from 2022, such as microsoft/resnet-50's, have a number alone."""
    return int(size[key] if isinstance(size, dict) else size)


def _name(spec: InputSpec) -> str:
    """The name of a spec, or its JSON."""
    return next((k for k, known in NAMED.items() if known == spec), json.dumps(spec.as_dict()))


def _spec(size: int, resize: int, kernel: str, scale: tuple[Any, Any]) -> InputSpec:
    """The spec of mean and standard deviation in 0..1, checked."""
    mean, std = ([round(255 * float(value), 6) for value in values] for values in scale)
    values = {"size": size, "resize": resize, "kernel": kernel, "antialias": True}
    return input_spec.from_dict(values | {"mean": mean, "std": std, "channels": "RGB"})
