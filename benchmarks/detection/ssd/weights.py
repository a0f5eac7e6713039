"""Weights of other SSDs: MLPerf's reference in PyTorch, and heads for other classes.

The reference is `ssd300` of mlcommons/training, single_stage_detector/ssd, `ssd300.py` and
`base_model.py`. The network is that of configs/ssd.py. Its max-pool pads as PyTorch does, its boxes
may reach beyond the image, and a map has one convolution for the deltas and one for the classes.
Class k is the k-th category in the order of COCO's ids, as here.

For other classes, the heads keep the boxes and the background.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.detection.ssd.settings import Settings
from common.foreign.files import Foreign
from common.foreign.resnets import LEAVES, PLAIN, split, torch_layout

TITLE = "MLPerf's reference SSD"
_SWAPPED = [1, 0, 3, 2]  # (x, y, width, height) as (y, x, height, width), and back
# What the reference makes of torchvision's children of a ResNet-34
_STAGES = {"layer1": "layer1.4", "layer2": "layer1.5", "layer3": "layer2.0"}
_CHILDREN = {"conv1": "layer1.0", "bn1": "layer1.1", **_STAGES}
_EXTRAS = {
    f"extra{i + 1}_conv{k + 1}": f"additional_blocks.{i}.{2 * k}" for i in range(5) for k in (0, 1)
}
FORMER: Mapping[str, str] = {}  # older names of layers, which the reference does not have
_KEPT_FEATURES = 5  # features of a box: its deltas and the logit of the background come first


def matches(source: Foreign) -> bool:
    """Whether a file has the reference's detector."""
    return any(name.startswith("additional_blocks.") for name in source.arrays)


def read_settings(source: Foreign) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The config's keys that describe the model in a file, and no notes."""
    arrays = source.arrays
    blocks = [
        sum(f"model.{stage}.{i}.conv1.weight" in arrays for i in range(100))
        for stage in _STAGES.values()
    ]
    squeezed, filters = (
        tuple(arrays[f"additional_blocks.{i}.{k}.bias"].size for i in range(5)) for k in (0, 2)
    )
    count = arrays["loc.0.bias"].size // 4  # default boxes in a cell
    if not all(blocks):
        raise ValueError("a stage of the ResNet")
    if (classes := arrays["conf.0.bias"].size // max(count, 1) - 1) < 1:
        raise ValueError("classes besides the background")
    return {
        "image_size": 300,
        "antialias": True,
        "resnet_stages": tuple(blocks),
        "max_pool": "torch",
        "num_filters": len(arrays["model.layer1.0.weight"]),
        "extra_squeezed": squeezed,
        "extra_filters": filters,
        "extra_strides": (2, 2, 2, 1, 1),
        "extra_paddings": (1, 1, 1, 0, 0),
        "box_steps": (8, 16, 32, 64, 100, 300),
        "box_sides": (21, 45, 99, 153, 207, 261, 315),
        "box_ratios": (2, 3, 3, 3, 2, 2),
        "clip_boxes": False,
        "num_classes": classes,
    }, []


def theirs(path: str, array: np.ndarray, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """An array, such as "params/extra1_conv1/kernel", by the reference's names and layout.

    An array of a head becomes two: of the deltas and of the classes, both with the shapes of the
    boxes last, while here they come first.
    """
    module, leaf = split(path)
    if module.startswith("backbone/"):
        ((name, array),) = PLAIN.theirs(path.replace("backbone/", "", 1), array).items()
        child, _, leaf = name.partition(".")
        return {f"model.{_CHILDREN[child]}.{leaf}": array}
    array = torch_layout(array)
    if not module.startswith("head"):
        return {f"{_EXTRAS[module]}.{LEAVES[leaf]}": array}
    end = f"{int(module.removeprefix('head')) - 1}.{LEAVES[leaf]}"
    features = array.reshape(-1, 5 + values["num_classes"], *array.shape[1:]).swapaxes(0, 1)
    parts = {"loc": features[:4][_SWAPPED], "conf": features[4:]}
    return {f"{name}.{end}": x.reshape(-1, *array.shape[1:]) for name, x in parts.items()}


def renew_heads(
    settings: Settings, initial: Mapping[str, np.ndarray], loaded: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The heads' arrays of an SSD that begins with the heads for other classes, by path.

    Loaded heads with other maps or boxes are not used.
    """
    heads = {}
    for i, boxes in enumerate(settings.maps.default_boxes.boxes_per_cell, 1):
        for path in (f"head{i}/kernel", f"head{i}/bias"):
            heads[path] = own = initial[path]
            other = loaded.get(path)
            if other is None or other.shape[:-1] != own.shape[:-1] or other.shape[-1] % boxes:
                continue
            new, old = (x.reshape(*x.shape[:-1], boxes, -1) for x in (own, other))
            columns = [old[..., :_KEPT_FEATURES], new[..., _KEPT_FEATURES:]]
            heads[path] = np.concatenate(columns, -1).reshape(own.shape)
    return heads
