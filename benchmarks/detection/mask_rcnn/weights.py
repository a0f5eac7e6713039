"""Other Mask R-CNNs' weights: torchvision's, and what the heads keep for other classes.

torchvision's `maskrcnn_resnet50_fpn` has the arrays of `models.MaskRCNN`, with ResNets of other
depths as well. Its anchors, the epsilon of its published weights and the numbers of COCO's classes
differ; the keys that `read_settings` returns say so.

The last layers have features for each class, the background first. For other classes, the
background's stay. The boxes and masks of a new class begin as the mean of those of the classes
before.
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

MODEL = "torchvision's Mask R-CNN"
# The first digits of SHA-256 of torchvision's weights of 2019, whose BatchNorm divides by the
# standard deviation alone. In its name: maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth
_WITHOUT_EPSILON = "bf2d0c1e"
# The keys that decide the shapes of arrays, besides the number of classes
SHAPES = (
    *("resnet_stages", "resnet_bottleneck", "num_filters", "space_to_depth", "pyramid_levels"),
    *("pyramid_filters", "anchor_ratios", "box_pool", "box_features", "mask_features"),
)
_COCO_IDS = 90  # of COCO's 80 categories; the numbers between them are unused classes
_SWAPPED = [1, 0, 3, 2]  # (x, y, width, height) as (y, x, height, width)
_LEAVES = {"kernel": "weight", "bias": "bias"}
# How torchvision before 0.13 named what it names otherwise now
_FORMER = (
    (
        r"backbone\.fpn\.(inner|layer)_blocks\.(\d)\.(weight|bias)",
        r"backbone.fpn.\1_blocks.\2.0.\3",
    ),
    (r"rpn\.head\.conv\.(weight|bias)", r"rpn.head.conv.0.0.\1"),
)
_FORMER_MASK = re.compile(r"roi_heads\.mask_head\.mask_fcn(\d)\.(weight|bias)")
_LAYERS = {
    "proposal_head/conv": "rpn.head.conv.0.0",
    "proposal_head/score": "rpn.head.cls_logits",
    "proposal_head/code": "rpn.head.bbox_pred",
    "box_head/class": "roi_heads.box_predictor.cls_score",
    "box_head/code": "roi_heads.box_predictor.bbox_pred",
    "mask_head/upsampled": "roi_heads.mask_predictor.conv5_mask",
    "mask_head/mask": "roi_heads.mask_predictor.mask_fcn_logits",
}
# By layer: how many features a class has, and whether those of new classes begin as a mean.
_CLASS_LAYERS = {
    "box_head/class": (1, False),
    "box_head/code": (4, True),
    "mask_head/mask": (1, True),
}


def matches(source: Foreign) -> bool:
    """Whether a file has a detector of torchvision's with a feature pyramid."""
    return any(name.startswith("backbone.fpn.") for name in source.arrays)


def arrays_of(source: Foreign) -> dict[str, np.ndarray]:
    """The arrays that matter, by torchvision's names of today."""
    arrays = {}
    for name, array in source.arrays.items():
        if name.endswith("num_batches_tracked"):
            continue
        for pattern, today in _FORMER:
            name = re.sub(f"^{pattern}$", today, name)
        if former := _FORMER_MASK.fullmatch(name):
            name = f"roi_heads.mask_head.{int(former[1]) - 1}.0.{former[2]}"
        arrays[name] = array
    return arrays


def read_settings(source: Foreign) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values of the config's keys that describe the model in a file, and (remark, key) pairs.

    Raises:
      DataError: the file has another detector of torchvision's.
    """
    arrays = arrays_of(source)
    if "rpn.head.conv.1.0.weight" in arrays:
        raise DataError(
            f"{source.path} is torchvision's maskrcnn_resnet50_fpn_v2, whose pyramid and heads "
            "have BatchNorm and more convolutions: only maskrcnn_resnet50_fpn fits"
        )
    if "roi_heads.mask_predictor.mask_fcn_logits.weight" not in arrays:
        raise DataError(f"{source.path} is a detector of torchvision's without masks")
    try:
        values = _values(arrays)
    except (KeyError, ValueError) as error:
        raise DataError(f"{source.path} is {MODEL}, but incomplete: it lacks {error}") from error
    is_first = source.sha256.startswith(_WITHOUT_EPSILON)
    values["bn_epsilon"] = 0.0 if is_first else 1e-5
    remarks = []
    if not is_first:
        remark = (
            f"{source.path} does not say which epsilon its BatchNorm adds to the variance: 1e-5 is "
            "assumed; torchvision's weights of 2019 have --config.bn_epsilon=0"
        )
        remarks.append((remark, "bn_epsilon"))
    return values, remarks


def _values(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The keys that the names and shapes of arrays decide.

    KeyError or ValueError name what is missing.
    """
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
    return {
        "resnet_stages": tuple(blocks),
        "resnet_bottleneck": "backbone.body.layer1.0.conv3.weight" in arrays,
        "num_filters": len(arrays["backbone.body.conv1.weight"]),
        **{"max_pool": "torch", "space_to_depth": False},
        **{"pyramid_levels": (2, 3, 4, 5, 6), "pyramid_filters": filters},
        **{"anchor_grid": "corners", "anchor_scale": 8.0, "anchor_ratios": (0.5, 1.0, 2.0)},
        **{"region_scale": 224.0, "box_pool": round((dense[0][1] / filters) ** 0.5)},
        "box_features": tuple(shape[0] for shape in dense),
        **{"mask_pool": 14, "mask_features": tuple(arrays[name].size for name in sorted(masks))},
        "num_classes": classes,
        "class_numbers": "ids" if classes == _COCO_IDS else "order",
        "class_candidates": 1000,
    }


def name(path: str) -> str:
    """torchvision's name of our array, such as "params/box_head/dense1/kernel".

    Raises:
      KeyError: torchvision has no such array.
    """
    module, _, kind = re.sub("^(params|model_state/batch_stats)/", "", path).rpartition("/")
    part, _, layer = module.partition("/")
    if part == "backbone":
        return f"backbone.body.{PLAIN.name(f'params/{layer}/{kind}')}"
    if numbered := re.fullmatch(r"([a-z]+)(\d+)", layer):
        kinds = {
            "lateral": f"backbone.fpn.inner_blocks.{int(numbered[2]) - 2}.0",
            "output": f"backbone.fpn.layer_blocks.{int(numbered[2]) - 2}.0",
            "dense": f"roi_heads.box_head.fc{int(numbered[2]) + 5}",
            "conv": f"roi_heads.mask_head.{int(numbered[2]) - 1}.0",
        }
        return f"{kinds[numbered[1]]}.{_LEAVES[kind]}"
    return f"{_LAYERS[module]}.{_LEAVES[kind]}"


def theirs(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of torchvision's arrays by name, from those of our arrays by path."""
    wanted = {}
    for path, shape in shapes.items():
        order = (2, 3, 0, 1) if "/upsampled/" in path else (3, 2, 0, 1)
        wanted[name(path)] = tuple(shape[i] for i in order) if len(shape) == 4 else shape[::-1]
    return wanted


def translate(source: Foreign, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays of a file by our paths, float32.

    Args:
      source: the file.
      shapes: of our arrays by path, with the settings that `read_settings` returns.

    Raises:
      DataError: an array is missing, is unknown, has another shape, or is not finite.
    """
    arrays = arrays_of(source)
    files.check_arrays(source.path, arrays, theirs(shapes))
    (filters,) = shapes["params/proposal_head/conv/bias"]
    values = {
        path: files.finite_floats(source.path, name(path), arrays[name(path)]) for path in shapes
    }
    return {path: np.ascontiguousarray(_ours(path, values[path], filters)) for path in shapes}


def _ours(path: str, array: np.ndarray, filters: int) -> np.ndarray:
    """torchvision's array in our layout; `filters` are the channels of the pyramid."""
    module = path.rpartition("/")[0]
    if module.endswith("_head/code"):  # the four numbers of a box are side by side
        array = array.reshape(-1, 4, *array.shape[1:])[:, _SWAPPED].reshape(array.shape)
    if module.endswith("/dense1") and array.ndim == 2:  # our channels come last
        side = round((array.shape[1] / filters) ** 0.5)
        array = array.reshape(-1, filters, side, side).transpose(0, 2, 3, 1).reshape(array.shape)
    if module.endswith("/upsampled") and array.ndim == 4:
        return array.transpose(2, 3, 0, 1)[::-1, ::-1]  # flax turns the kernel round
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T


def renew_heads(
    detector: Any, initial: Mapping[str, np.ndarray], loaded: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The arrays of a Mask R-CNN's last layers, by path, as SSD has them."""
    del detector
    layers = {}
    for layer, (size, is_mean) in _CLASS_LAYERS.items():
        for path in (f"{layer}/kernel", f"{layer}/bias"):
            layers[path] = _mixed_features(initial[path], loaded.get(path), size, is_mean)
    return layers


def _mixed_features(
    own: np.ndarray, other: np.ndarray | None, size: int, is_mean: bool
) -> np.ndarray:
    """The features of `own` [..., classes * size], with those of `other` that stay."""
    if other is None or other.shape[:-1] != own.shape[:-1]:
        return own
    mine, old = (x.reshape(*x.shape[:-1], -1, size) for x in (own, other))
    new = mine[..., 1:, :]
    if is_mean:
        new = np.broadcast_to(old[..., 1:, :].mean(-2, keepdims=True), new.shape)
    return np.concatenate([old[..., :1, :], new], -2).reshape(own.shape)
