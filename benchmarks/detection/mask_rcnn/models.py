"""Mask R-CNN's network: a ResNet, a feature pyramid, and the heads for proposals, boxes and masks.

Sources: He et al. 2017 (arXiv:1703.06870) for the detector and its heads; Lin et al. 2017
(arXiv:1612.03144) for the pyramid; Ren et al. 2015 (arXiv:1506.01497) for the proposals. The
initialisation is that of MLPerf's reference.

Parameters are float32. Convolutions and activations are in the compute dtype. The last layers of
the heads for proposals and boxes are float32, because many scores would be equal in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import ResNet

Maps = dict[int, jax.Array]  # level -> [b, h, w, c], a cell for 2**level pixels

_HE_FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "uniform")  # Caffe2's "XavierFill"
_HE_FAN_OUT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")  # "MSRAFill"
PADDING = ((1, 1), (1, 1))
_conv3x3 = partial(nn.Conv, kernel_size=(3, 3), padding=PADDING)


class Pyramid(nn.Module):
    """Feature pyramid: maps of `filters` channels for `levels`, from the stages of a ResNet.

    Levels beyond the last stage take every second cell of the level before.
    """

    levels: tuple[int, ...]
    filters: int
    dtype: Any

    @nn.compact
    def __call__(self, stages: Maps) -> Maps:
        """From the outputs of the stages by level to the maps of `levels`."""
        conv = partial(nn.Conv, self.filters, dtype=self.dtype, kernel_init=_HE_FAN_IN)
        inner = [level for level in self.levels if level in stages]
        maps: Maps = {}
        above: jax.Array | None = None
        for level in reversed(inner):
            x = conv((1, 1), name=f"lateral{level}")(stages[level])
            if above is not None:
                x += _doubled(above)[:, : x.shape[1], : x.shape[2]]
            above = x
            maps[level] = conv((3, 3), padding=PADDING, name=f"output{level}")(x)
        for level in self.levels[len(inner) :]:
            maps[level] = maps[level - 1][:, ::2, ::2]
        return {level: maps[level] for level in self.levels}


def _doubled(x: jax.Array) -> jax.Array:
    """Each cell of [b, h, w, c] four times: [b, 2h, 2w, c], in one operation and not in two."""
    b, h, w, c = x.shape
    return jnp.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c)).reshape(b, 2 * h, 2 * w, c)


class ProposalHead(nn.Module):
    """Predicts from each map, with the same weights, which anchors hold an object and where."""

    anchors: int  # of a cell
    filters: int
    dtype: Any

    @nn.compact
    def __call__(self, maps: Maps) -> tuple[list[jax.Array], list[jax.Array]]:
        """For each level (logits f32[b, n], codes f32[b, n, 4]), by row, column and anchor."""
        normal = nn.initializers.normal(0.01)
        layer = _conv3x3(self.filters, dtype=self.dtype, kernel_init=normal, name="conv")
        # One product makes both outputs: each alone fills few columns of a TPU's matrix unit.
        score = _Pointwise(self.anchors, normal, name="score")(self.filters)
        code = _Pointwise(4 * self.anchors, normal, name="code")(self.filters)
        kernel, bias = (jnp.concatenate(both, -1) for both in zip(score, code, strict=True))
        logits, codes = [], []
        for x in maps.values():
            y = nn.relu(layer(x)).astype(jnp.float32) @ kernel + bias
            logits.append(y[..., : self.anchors].reshape(len(x), -1))
            codes.append(y[..., self.anchors :].reshape(len(x), -1, 4))
        return logits, codes


class _Pointwise(nn.Module):
    """The variables of a 1x1 `nn.Conv` of `channels`: kernel f32[channels, features] and bias."""

    features: int
    kernel_init: Any

    @nn.compact
    def __call__(self, channels: int) -> tuple[jax.Array, jax.Array]:
        shape = (1, 1, channels, self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return kernel[0, 0], bias


class BoxHead(nn.Module):
    """Two dense layers, then the classes of a region and a box for each class."""

    features: tuple[int, ...]
    num_logits: int  # with the background
    dtype: Any

    @nn.compact
    def __call__(self, regions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(logits f32[b, R, C], codes f32[b, R, C, 4]) of regions [b, R, s, s, c]."""
        x = regions.reshape(*regions.shape[:2], -1)
        for i, features in enumerate(self.features, 1):
            dense = nn.Dense(features, dtype=self.dtype, kernel_init=_HE_FAN_IN, name=f"dense{i}")
            x = nn.relu(dense(x))
        normal, count = nn.initializers.normal, self.num_logits
        exact = partial(nn.Dense, dtype=jnp.float32)
        logits = exact(count, kernel_init=normal(0.01), name="class")(x)
        codes = exact(4 * count, kernel_init=normal(0.001), name="code")(x)
        return logits, codes.reshape(*x.shape[:2], count, 4)


class MaskHead(nn.Module):
    """Convolutions, then a mask of twice the region's side for each class."""

    features: tuple[int, ...]
    num_logits: int
    dtype: Any

    @nn.compact
    def __call__(self, regions: jax.Array) -> jax.Array:
        """Logits f32[b, R, 2s, 2s, C] of regions [b, R, s, s, c]."""
        x = regions.reshape(-1, *regions.shape[2:])
        how: Any = {"dtype": self.dtype, "kernel_init": _HE_FAN_OUT}
        for i, features in enumerate(self.features, 1):
            x = nn.relu(_conv3x3(features, **how, name=f"conv{i}")(x))
        x = nn.relu(nn.ConvTranspose(x.shape[-1], (2, 2), (2, 2), **how, name="upsampled")(x))
        y = nn.Conv(self.num_logits, (1, 1), **how, name="mask")(x).astype(jnp.float32)
        return y.reshape(*regions.shape[:2], *y.shape[1:])


class MaskRCNN(nn.Module):
    """The network; `bind` it to variables and call its parts in turn.

    Variables are `params` and `batch_stats`, float32.
    """

    backbone: ResNet
    levels: tuple[int, ...]
    anchors: int  # of a cell
    filters: int  # of the pyramid
    box_features: tuple[int, ...]
    mask_features: tuple[int, ...]
    num_classes: int  # without the background

    def setup(self):
        dtype, num_logits = self.backbone.dtype, 1 + self.num_classes
        self.pyramid = Pyramid(self.levels, self.filters, dtype)
        self.proposal_head = ProposalHead(self.anchors, self.filters, dtype)
        self.box_head = BoxHead(self.box_features, num_logits, dtype)
        self.mask_head = MaskHead(self.mask_features, num_logits, dtype)

    def maps(self, images: jax.Array, train: bool) -> Maps:
        """The pyramid's maps of normalised images float[b, H/2, W/2, 12], see `ResNet.__call__`.

        `train`: whether BatchNorm takes the statistics of the batch.
        """
        stages = self.backbone.endpoints(images, train)
        return self.pyramid({int(name[1:]): x for name, x in stages.items()})

    def __call__(self, images: jax.Array, sizes: Sequence[int]) -> None:
        """Calls every part once, so that `init` makes all parameters.

        `sizes` are the sides of the regions of boxes and of masks.
        """
        maps = self.maps(images, train=False)
        self.proposal_head(maps)
        box, mask = (jnp.zeros((1, 1, size, size, self.filters)) for size in sizes)
        self.box_head(box)
        self.mask_head(mask)
