"""The names and layouts of ResNet's arrays in torchvision, timm, Hugging Face and TensorFlow.

One table serves both directions: an export renames our arrays with it, and `files.adapt` asks it
where each of our arrays is in a file.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from common.errors import CheckpointError
from common.layers.space_to_depth import unfold_kernel
from common.trees import by_name

LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
_TF = {"kernel": "kernel", "bias": "bias"}
_TF_NORM = {"scale": "gamma", "bias": "beta", "mean": "moving_mean", "var": "moving_variance"}
_DENSE = ("fc.weight", "classifier.1.weight")  # timm has 1x1 convolutions for our other products


def split(path: str) -> tuple[str, str]:
    """("stage1_block1/conv1", "kernel") of "params/stage1_block1/conv1/kernel"."""
    module, _, leaf = re.sub("^(params|model_state/batch_stats)/", "", path).rpartition("/")
    return module, leaf


def torch_layout(array: np.ndarray) -> np.ndarray:
    """Our kernel in PyTorch's layout: OIHW or [outputs, inputs]; other arrays as they are."""
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T


@dataclasses.dataclass(frozen=True)
class Family:
    """How one library names the arrays of a ResNet, and lays them out.

    `outside` and `inside` map the names of our modules, outside and inside the blocks, to the
    library's names. For TensorFlow's checkpoints, where names do not follow a rule, `outside` has
    all of them. `block` comes before the names inside a block: a format of `stage`, which counts
    from 1, and of `stage0` and `block0`, which count from 0.
    """

    outside: Mapping[str, str]
    block: str = ""
    inside: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_torch: bool = True  # leaves and layouts are PyTorch's (OIHW), else TensorFlow's (as ours)

    def name(self, path: str) -> str:
        """The library's name of our array, such as "params/stage1_block1/conv1/kernel".

        KeyError if the library has no name for it.
        """
        module, leaf = split(path)
        if self.block and (inner := re.fullmatch(r"stage(\d+)_block(\d+)/(\w+)", module)):
            stage, block = int(inner[1]), int(inner[2])
            before = self.block.format(stage=stage, stage0=stage - 1, block0=block - 1)
            theirs = before + self.inside[inner[3]]
        else:
            theirs = self.outside[module]
        if self.is_torch:
            return f"{theirs}.{LEAVES[leaf]}"
        return f"{theirs}/{(_TF_NORM if 'batch_normalization' in theirs else _TF)[leaf]}"

    def theirs(self, path: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """Our array by the library's name and in its layout."""
        name = self.name(path)
        if self.is_torch:
            is_conv = array.ndim == 2 and name not in _DENSE
            array = torch_layout(array[None, None] if is_conv else array)
        return {name: array}


_CONVS = {f"conv{k}": f"conv{k}" for k in (1, 2, 3)}
_NORMS = {f"bn{k}": f"bn{k}" for k in (1, 2, 3)}
_SE = {"se_reduce": "se.fc1", "se_expand": "se.fc2"}
_HF_STEM = "resnet.embedder.embedder."

# torchvision, and timm's resnet*, seresnet*
PLAIN = Family(
    {"conv_stem": "conv1", "bn_stem": "bn1", "head": "fc"},
    "layer{stage}.{block0}.",
    _CONVS | _NORMS | _SE | {"conv_proj": "downsample.0", "bn_proj": "downsample.1"},
)
# timm's resnet*d, resnetrs*: of the stem's three BatchNorms only the last one has the plain name
DEEP = dataclasses.replace(
    PLAIN,
    outside={
        "conv_stem": "conv1.0",
        "bn_stem": "conv1.1",
        "conv_stem2": "conv1.3",
        "bn_stem2": "conv1.4",
        "conv_stem3": "conv1.6",
        "bn_stem3": "bn1",
        "head": "fc",
        "conv_pool": "maxpool.0",
        "bn_pool": "maxpool.1",
    },
    inside={**PLAIN.inside, "conv_proj": "downsample.1", "bn_proj": "downsample.2"},
)
# timm's resnetv2_*
PRE_ACTIVATION = Family(
    {"conv_stem": "stem.conv", "bn_final": "norm", "head": "head.fc"},
    "stages.{stage0}.blocks.{block0}.",
    _CONVS | {f"bn{k}": f"norm{k}" for k in (1, 2, 3)} | {"conv_proj": "downsample.conv"},
)
HUGGING_FACE = Family(
    {
        "conv_stem": f"{_HF_STEM}convolution",
        "bn_stem": f"{_HF_STEM}normalization",
        "head": "classifier.1",
    },
    "resnet.encoder.stages.{stage0}.layers.{block0}.",
    {f"conv{k}": f"layer.{k - 1}.convolution" for k in (1, 2, 3)}
    | {f"bn{k}": f"layer.{k - 1}.normalization" for k in (1, 2, 3)}
    | {"conv_proj": "shortcut.convolution", "bn_proj": "shortcut.normalization"},
)


def names(params: Any, model_state: Any, family: Family | None = None) -> dict[str, np.ndarray]:
    """{the library's name: array in its layout} of a model; arrays keep their dtype and are views.

    A space-to-depth stem gets the plain stem's kernel. There are no counters of BatchNorm, which
    PyTorch's strict load does without.

    The default `family` is torchvision's and timm's, whose variant shows in the arrays: timm's
    resnetv2 and resnet*d have other names. KeyError if the family has no name for an array.
    """
    if family is None:
        deep = DEEP if "conv_stem2" in params else PLAIN
        family = PRE_ACTIVATION if "bn_final" in params else deep
    arrays = {}
    for path, array in by_name({"params": params, "model_state": model_state}).items():
        if path == "params/conv_stem/kernel" and array.shape[:2] == (4, 4):
            wide = unfold_kernel(array)
            if wide[0].any() or wide[:, 0].any():
                raise CheckpointError(
                    "the stem was trained with config.space_to_depth=True: it sees 8x8 pixels, "
                    "and the stem of PyTorch's ResNets 7x7"
                )
            array = wide[1:, 1:]
        arrays |= family.theirs(path, array)
    return arrays
