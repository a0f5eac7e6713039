"""Other SSDs' weights: MLPerf's reference in PyTorch, and what the heads keep for other classes.

The reference is `ssd300` of mlcommons/training, single_stage_detector/ssd, `ssd300.py` and
`base_model.py`. The network is that of configs/ssd.py. Its max-pool pads as PyTorch does, its boxes
may reach beyond the image, and a map has one convolution for the codes and one for the classes.
Class k is the k-th category in the order of COCO's ids, as here.

For other classes, the heads keep the boxes and the background.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from common.errors import DataError
from common.foreign import files
from common.foreign.files import Foreign
from common.foreign.resnets import PLAIN

MODEL = "MLPerf's reference SSD"
# The keys that decide the shapes of arrays, besides the number of classes
SHAPES = ("resnet_stages", "num_filters", "extra_squeezed", "extra_filters", "box_ratios")
_SWAPPED = [1, 0, 3, 2]  # (x, y, width, height) as (y, x, height, width)
_LEAVES = {"kernel": "weight", "bias": "bias"}
# What the reference makes of torchvision's children of a ResNet-34
_STEM = {"conv1": "layer1.0", "bn1": "layer1.1"}
_STAGES = {"layer1": "layer1.4", "layer2": "layer1.5", "layer3": "layer2.0"}
_KEPT_FEATURES = 5  # features of a box: its codes and the logit of the background come first


def matches(source: Foreign) -> bool:
    """Whether a file has such a detector."""
    return any(name.startswith("additional_blocks.") for name in source.arrays)


def read_settings(source: Foreign) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values of the config's keys that describe the model in a file, and no remarks.

    Raises:
      DataError: an array is missing, or the file has no class but the background.
    """
    try:
        return _values(source.arrays), []
    except (KeyError, ValueError) as error:
        raise DataError(f"{source.path} is {MODEL}, but incomplete: it lacks {error}") from error


def _values(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The keys that names and shapes decide, and the reference's constants.

    KeyError or ValueError name what is missing.
    """
    stages = ("layer1.4", "layer1.5", "layer2.0")
    blocks = [sum(f"model.{s}.{i}.conv1.weight" in arrays for i in range(100)) for s in stages]
    squeezed, filters = (
        tuple(arrays[f"additional_blocks.{i}.{k}.bias"].size for i in range(5)) for k in (0, 2)
    )
    count = arrays["loc.0.bias"].size // 4  # of default boxes in a cell
    if not all(blocks):
        raise ValueError("a stage of the ResNet")
    if (classes := arrays["conf.0.bias"].size // max(count, 1) - 1) < 1:
        raise ValueError("classes besides the background")
    return {
        **{"image_size": 300, "resnet_stages": tuple(blocks), "max_pool": "torch"},
        "num_filters": len(arrays["model.layer1.0.weight"]),
        **{"num_classes": classes, "clip_boxes": False, "antialias": True},
        **{"extra_squeezed": squeezed, "extra_filters": filters},
        **{"extra_strides": (2, 2, 2, 1, 1), "extra_paddings": (1, 1, 1, 0, 0)},
        **{"box_steps": (8, 16, 32, 64, 100, 300), "box_ratios": (2, 3, 3, 3, 2, 2)},
        "box_sides": (21, 45, 99, 153, 207, 261, 315),
    }


def names(path: str) -> tuple[str, ...]:
    """The reference's names of our array, such as "params/extra1_conv1/kernel".

    The array of a head comes from two: of the codes and of the classes.

    Raises:
      KeyError: the reference has no such array.
    """
    module, _, kind = re.sub("^(params|model_state/batch_stats)/", "", path).rpartition("/")
    if module.startswith("backbone/"):
        first, _, rest = PLAIN.name(f"params/{module.removeprefix('backbone/')}/{kind}").partition(
            "."
        )
        return (f"model.{(_STEM | _STAGES)[first]}.{rest}",)
    if extra := re.fullmatch(r"extra(\d)_conv(\d)", module):
        return (f"additional_blocks.{int(extra[1]) - 1}.{2 * int(extra[2]) - 2}.{_LEAVES[kind]}",)
    number = int(module.removeprefix("head")) - 1
    return tuple(f"{part}.{number}.{_LEAVES[kind]}" for part in ("loc", "conf"))


def theirs(shapes: Mapping[str, tuple[int, ...]], classes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the reference's arrays by name, from those of our arrays by path."""
    wanted: dict[str, tuple[int, ...]] = {}
    for path, shape in shapes.items():
        if len(shape) == 4:
            shape = tuple(shape[i] for i in (3, 2, 0, 1))
        boxes = shape[0] // (5 + classes)
        lengths = (4 * boxes, shape[0] - 4 * boxes) if len(names(path)) == 2 else shape[:1]
        parts = zip(names(path), lengths, strict=True)
        wanted |= {name: (length, *shape[1:]) for name, length in parts}
    return wanted


def translate(source: Foreign, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays of a file by our paths, float32.

    Args:
      source: the file.
      shapes: of our arrays by path, with the settings that `read_settings` returns.

    Raises:
      DataError: an array is missing, is unknown, has another shape, or is not finite.
    """
    arrays = {k: v for k, v in source.arrays.items() if not k.endswith("num_batches_tracked")}
    wanted = theirs(shapes, read_settings(source)[0]["num_classes"])
    files.check_arrays(source.path, arrays, wanted)
    values = {name: files.finite_floats(source.path, name, arrays[name]) for name in wanted}
    return {path: _ours([values[name] for name in names(path)]) for path in shapes}


def _ours(parts: list[np.ndarray]) -> np.ndarray:
    """Our array, from the reference's one, or from those of a head."""
    array = parts[0]
    if len(parts) == 2:  # the reference has the shapes of the boxes last, we have them first
        codes, logits = (part.reshape(-1, len(array) // 4, *part.shape[1:]) for part in parts)
        both = np.concatenate([codes[_SWAPPED], logits])
        array = np.moveaxis(both, 0, 1).reshape(-1, *array.shape[1:])
    return np.ascontiguousarray(array.transpose(2, 3, 1, 0) if array.ndim == 4 else array)


def renew_heads(
    detector: Any, initial: Mapping[str, np.ndarray], loaded: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The arrays of the heads of an SSD that begins with those of other classes, by path.

    Args:
      detector: the SSD.
      initial: its own initial parameters by path.
      loaded: the other SSD's; heads with other maps or boxes are not used.
    """
    counts = detector.settings.maps.layout.boxes_per_cell
    heads = {}
    for i, count in enumerate(counts, 1):
        for path in (f"head{i}/kernel", f"head{i}/bias"):
            heads[path] = _mixed_features(initial[path], loaded.get(path), count)
    return heads


def _mixed_features(own: np.ndarray, other: np.ndarray | None, boxes: int) -> np.ndarray:
    """The features of `own` [..., boxes * n], of which each box's first come from `other`."""
    if other is None or other.shape[:-1] != own.shape[:-1] or other.shape[-1] % boxes:
        return own
    new, old = (x.reshape(*x.shape[:-1], boxes, -1) for x in (own, other))
    columns = [old[..., :_KEPT_FEATURES], new[..., _KEPT_FEATURES:]]
    return np.concatenate(columns, -1).reshape(own.shape)
