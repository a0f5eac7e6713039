"""The names and layouts of ResNet's arrays in torchvision, timm, Hugging Face and TensorFlow.

One table serves both directions: an export renames our arrays with it, and an import asks it where
each of our arrays is in the file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from common.errors import CheckpointError
from common.trees import by_name

_TORCH = {
    **{"kernel": "weight", "scale": "weight", "bias": "bias"},
    **{"mean": "running_mean", "var": "running_var"},
}
_TF = {"kernel": "kernel", "bias": "bias"}
_TF_NORM = {"scale": "gamma", "bias": "beta", "mean": "moving_mean", "var": "moving_variance"}


@dataclasses.dataclass(frozen=True)
class Family:
    """How one library names the arrays of a ResNet, and lays them out.

    Attributes:
      outside: {our module: theirs} outside the blocks; in TensorFlow's checkpoints, where names do
        not follow a rule, of all modules.
      block: what comes before the names inside a block; a format of `stage` and `block`.
      first: their number of the first stage, and of the first block in a stage.
      inside: {our module: theirs} inside a block.
      is_torch: leaves and layouts are PyTorch's (OIHW), else TensorFlow's (as ours).
    """

    outside: Mapping[str, str]
    block: str
    first: tuple[int, int]
    inside: Mapping[str, str]
    is_torch: bool = True

    def name(self, path: str) -> str:
        """Their name of our array, such as "params/stage1_block1/conv1/kernel".

        Raises:
          KeyError: the family has no such array.
        """
        module, _, leaf = re.sub("^(params|model_state/batch_stats)/", "", path).rpartition("/")
        if module in self.outside:
            theirs = self.outside[module]
        elif inner := re.fullmatch(r"stage(\d+)_block(\d+)/(\w+)", module):
            stage, block = (int(inner[i + 1]) - 1 + self.first[i] for i in (0, 1))
            theirs = self.block.format(stage=stage, block=block) + self.inside[inner[3]]
        else:
            raise KeyError(path)
        if self.is_torch:
            return f"{theirs}.{_TORCH[leaf]}"
        is_norm = "batch_normalization" in theirs
        return f"{theirs}/{(_TF_NORM if is_norm else _TF)[leaf]}"

    def theirs(self, name: str, array: np.ndarray) -> np.ndarray:
        """Our array, which they call `name`, in their layout."""
        if not self.is_torch or array.ndim < 2:
            return array
        if array.ndim == 4:
            return array.transpose(3, 2, 0, 1)
        is_dense = name in ("fc.weight", "classifier.1.weight")
        return array.T if is_dense else array.T[..., None, None]  # timm has 1x1 convolutions there

    def ours(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Their array in our layout and of our shape: the inverse of `theirs`."""
        if self.is_torch and array.ndim == 4:
            array = array.transpose(2, 3, 1, 0)
        elif self.is_torch and array.ndim == 2:
            array = array.T
        return array.reshape(shape)


_CONVS = {f"conv{k}": f"conv{k}" for k in (1, 2, 3)}
_NORMS = {f"bn{k}": f"bn{k}" for k in (1, 2, 3)}
_SE = {"se_reduce": "se.fc1", "se_expand": "se.fc2"}
_HF, _HF_STEM = "resnet.encoder.stages.{stage}.layers.{block}.", "resnet.embedder.embedder."

# torchvision, and timm's resnet*, seresnet*
PLAIN = Family(
    {"conv_stem": "conv1", "bn_stem": "bn1", "head": "fc"},
    "layer{stage}.{block}.",
    (1, 0),
    _CONVS | _NORMS | _SE | {"conv_proj": "downsample.0", "bn_proj": "downsample.1"},
)
# timm's resnet*d, resnetrs*: of the stem's three convolutions only the last BatchNorm has the plain
# name
DEEP = dataclasses.replace(
    PLAIN,
    outside={
        **{"conv_stem": "conv1.0", "bn_stem": "conv1.1", "conv_stem2": "conv1.3"},
        **{"bn_stem2": "conv1.4", "conv_stem3": "conv1.6", "bn_stem3": "bn1", "head": "fc"},
        **{"conv_pool": "maxpool.0", "bn_pool": "maxpool.1"},
    },
    inside={**PLAIN.inside, "conv_proj": "downsample.1", "bn_proj": "downsample.2"},
)
# timm's resnetv2_*
PRE_ACTIVATION = Family(
    {"conv_stem": "stem.conv", "bn_final": "norm", "head": "head.fc"},
    "stages.{stage}.blocks.{block}.",
    (0, 0),
    _CONVS | {f"bn{k}": f"norm{k}" for k in (1, 2, 3)} | {"conv_proj": "downsample.conv"},
)
HUGGING_FACE = Family(
    {
        "conv_stem": f"{_HF_STEM}convolution",
        "bn_stem": f"{_HF_STEM}normalization",
        "head": "classifier.1",
    },
    _HF,
    (0, 0),
    {
        **{f"conv{k}": f"layer.{k - 1}.convolution" for k in (1, 2, 3)},
        **{f"bn{k}": f"layer.{k - 1}.normalization" for k in (1, 2, 3)},
        **{"conv_proj": "shortcut.convolution", "bn_proj": "shortcut.normalization"},
    },
)


def renamed(family: Family, params: Any, model_state: Any) -> dict[str, np.ndarray]:
    """{their name: array in their layout} of a model; arrays keep their dtype and are views.

    Raises:
      KeyError: the family has no name for an array.
      CheckpointError: a space-to-depth stem was trained beyond the 7x7 pixels of the plain one.
    """
    arrays = {}
    for path, array in by_name({"params": params, "model_state": model_state}).items():
        if path == "params/conv_stem/kernel" and array.shape[:2] == (4, 4):
            array = _plain_stem(array)
        name = family.name(path)
        arrays[name] = family.theirs(name, array)
    return arrays


def names(params: Any, model_state: Any) -> dict[str, np.ndarray]:
    """{PyTorch's name: array in PyTorch's layout} of our model, for torchvision and timm.

    The variant shows in the arrays: timm's resnetv2 and resnet*d have names of their own. The
    stem's kernel is always that of the plain stem. Arrays of BatchNorm's counters are left out:
    a strict load does without them.

    Args:
      params, model_state: of the benchmark, as NumPy arrays.

    Raises:
      CheckpointError: a space-to-depth stem was trained beyond the 7x7 pixels of the plain one.
    """
    family = PLAIN
    if "bn_final" in params:
        family = PRE_ACTIVATION
    elif "conv_stem2" in params:
        family = DEEP
    return renamed(family, params, model_state)


def _plain_stem(kernel: np.ndarray) -> np.ndarray:
    """The plain stem's kernel [7, 7, 3, F] of a space-to-depth stem's [4, 4, 12, F]."""
    wide = unfold_kernel(kernel)
    if wide[0].any() or wide[:, 0].any():
        raise CheckpointError(
            "the stem was trained with config.space_to_depth=True: it sees 8x8 pixels, for which "
            "PyTorch's ResNets have no place"
        )
    return wide[1:, 1:]


def unfold_kernel(kernel: np.ndarray) -> np.ndarray:
    """Converts the space-to-depth stem's kernel to that of a plain convolution, dtype kept.

    [4, 4, 4 * C, F] to [8, 8, C, F]: stride 2 and padding (4, 2) on images then give the same
    result. The first row and column are 0, and the rest is the kernel that
    `space_to_depth.convert_kernel` got, unless this stem was trained.
    """
    c, f = kernel.shape[2] // 4, kernel.shape[3]
    return kernel.reshape(4, 4, 2, 2, c, f).transpose(0, 2, 1, 3, 4, 5).reshape(8, 8, c, f)
