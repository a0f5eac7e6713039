"""Weights of other Mask R-CNNs: torchvision's, and heads for other classes.

torchvision's `maskrcnn_resnet50_fpn` has the arrays of `models.MaskRCNN`, with ResNets of other
depths as well. Its anchors, the epsilon of its published weights and the numbers of COCO's classes
differ; the keys that `read_settings` returns say so.

The last layers have features for each class, the background first. For other classes, the
background's features stay. The boxes and masks of a new class begin with the mean of the old
classes' features.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from common.errors import DataError
from common.foreign.files import Foreign
from common.foreign.resnets import LEAVES, PLAIN, split, torch_layout

TITLE = "torchvision's Mask R-CNN"
# The first digits of SHA-256 of torchvision's weights of 2019, whose BatchNorm divides by the
# standard deviation alone. In its name: maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth
_WITHOUT_EPSILON = "bf2d0c1e"
_COCO_IDS = 90  # the highest id of COCO's 80 categories; unused ids are classes too
_SWAPPED = [1, 0, 3, 2]  # (x, y, width, height) as (y, x, height, width), and back
_LAYERS = {
    **{f"pyramid/lateral{k}": f"backbone.fpn.inner_blocks.{k - 2}.0" for k in range(2, 6)},
    **{f"pyramid/output{k}": f"backbone.fpn.layer_blocks.{k - 2}.0" for k in range(2, 6)},
    "proposal_head/conv": "rpn.head.conv.0.0",
    "proposal_head/score": "rpn.head.cls_logits",
    "proposal_head/code": "rpn.head.bbox_pred",
    **{f"box_head/dense{k}": f"roi_heads.box_head.fc{k + 5}" for k in (1, 2)},
    "box_head/class": "roi_heads.box_predictor.cls_score",
    "box_head/code": "roi_heads.box_predictor.bbox_pred",
    **{f"mask_head/conv{k}": f"roi_heads.mask_head.{k - 1}.0" for k in range(1, 10)},
    "mask_head/upsampled": "roi_heads.mask_predictor.conv5_mask",
    "mask_head/mask": "roi_heads.mask_predictor.mask_fcn_logits",
}
# Former names of some of these layers in torchvision
FORMER = {
    "rpn.head.conv": "rpn.head.conv.0.0",
    **{f"backbone.fpn.inner_blocks.{i}": f"backbone.fpn.inner_blocks.{i}.0" for i in range(4)},
    **{f"backbone.fpn.layer_blocks.{i}": f"backbone.fpn.layer_blocks.{i}.0" for i in range(4)},
    **{f"roi_heads.mask_head.mask_fcn{i + 1}": f"roi_heads.mask_head.{i}.0" for i in range(9)},
}
# By layer: the number of features of a class, and whether a new class begins with their mean.
_CLASS_LAYERS = {
    "box_head/class": (1, False),
    "box_head/code": (4, True),
    "mask_head/mask": (1, True),
}


def matches(source: Foreign) -> bool:
    """Whether a file has a detector of torchvision's with a feature pyramid."""
    return any(name.startswith("backbone.fpn.") for name in source.arrays)


def read_settings(source: Foreign) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The config's keys that describe the model in a file, and (note, key) pairs.

    DataError: the file has another detector of torchvision's.
    """
    arrays, notes = source.arrays, []
    if "rpn.head.conv.1.0.weight" in arrays:
        raise DataError(
            f"{source.path} is torchvision's maskrcnn_resnet50_fpn_v2, whose pyramid and heads "
            "have BatchNorm and more convolutions: only maskrcnn_resnet50_fpn fits"
        )
    if "roi_heads.mask_predictor.mask_fcn_logits.weight" not in arrays:
        raise DataError(f"{source.path} is a detector of torchvision's without masks")
    blocks = [
        sum(f"backbone.body.layer{stage}.{i}.conv1.weight" in arrays for i in range(100))
        for stage in range(1, 5)
    ]
    masks = [name for name in arrays if re.fullmatch(r"roi_heads\.mask_head\.\d\.0\.bias", name)]
    filters = arrays["backbone.fpn.inner_blocks.0.0.bias"].size
    dense = [arrays[f"roi_heads.box_head.fc{k}.weight"].shape for k in (6, 7)]
    if not all(blocks):
        raise ValueError("a stage of the ResNet")
    if (classes := arrays["roi_heads.box_predictor.cls_score.bias"].size - 1) < 1:
        raise ValueError("classes besides the background")
    is_first = source.sha256.startswith(_WITHOUT_EPSILON)
    if not is_first:
        note = (
            f"{source.path} does not say which epsilon its BatchNorm adds to the variance: 1e-5 is "
            "assumed; torchvision's weights of 2019 have --config.bn_epsilon=0"
        )
        notes.append((note, "bn_epsilon"))
    return {
        "resnet_stages": tuple(blocks),
        "resnet_bottleneck": "backbone.body.layer1.0.conv3.weight" in arrays,
        "num_filters": len(arrays["backbone.body.conv1.weight"]),
        "max_pool": "torch",
        "space_to_depth": False,
        "bn_epsilon": 0.0 if is_first else 1e-5,
        "pyramid_levels": (2, 3, 4, 5, 6),
        "pyramid_filters": filters,
        "anchor_grid": "corners",
        "anchor_scale": 8.0,
        "anchor_ratios": (0.5, 1.0, 2.0),
        "region_scale": 224.0,
        "box_pool": round((dense[0][1] / filters) ** 0.5),
        "box_features": tuple(shape[0] for shape in dense),
        "mask_pool": 14,
        "mask_features": tuple(arrays[name].size for name in sorted(masks)),
        "num_classes": classes,
        "class_numbers": "ids" if classes == _COCO_IDS else "order",
        "class_candidates": 1000,
    }, notes


def theirs(path: str, array: np.ndarray, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Our array, such as "params/box_head/dense1/kernel", by torchvision's name and layout."""
    module, leaf = split(path)
    if module.startswith("backbone/"):
        rows = PLAIN.theirs(path.replace("backbone/", "", 1), array)
        return {f"backbone.body.{name}": array for name, array in rows.items()}
    if module == "mask_head/upsampled" and leaf == "kernel":  # flax turns the kernel round
        array = array[::-1, ::-1].transpose(2, 3, 0, 1)
    else:
        array = torch_layout(array)
    if module == "box_head/dense1" and leaf == "kernel":  # our channels come last
        side, filters = values["box_pool"], values["pyramid_filters"]
        array = array.reshape(-1, side, side, filters).transpose(0, 3, 1, 2).reshape(array.shape)
    if module.endswith("_head/code"):  # the four numbers of a box are side by side
        array = array.reshape(-1, 4, *array.shape[1:])[:, _SWAPPED].reshape(array.shape)
    return {f"{_LAYERS[module]}.{LEAVES[leaf]}": array}


def renew_heads(
    settings: object, initial: Mapping[str, np.ndarray], loaded: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The last layers' arrays of a Mask R-CNN that begins with a model for other classes."""
    del settings
    heads = {}
    for layer, (size, is_mean) in _CLASS_LAYERS.items():
        for path in (f"{layer}/kernel", f"{layer}/bias"):
            initial_array, other = initial[path], loaded.get(path)
            heads[path] = initial_array
            if other is None or other.shape[:-1] != initial_array.shape[:-1]:
                continue
            own, old = (x.reshape(*x.shape[:-1], -1, size) for x in (initial_array, other))
            new = own[..., 1:, :]
            if is_mean:
                new = np.broadcast_to(old[..., 1:, :].mean(-2, keepdims=True), new.shape)
            heads[path] = np.concatenate([old[..., :1, :], new], -2).reshape(initial_array.shape)
    return heads
