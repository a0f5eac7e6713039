"""SSD: boxes and classes from the maps of a ResNet and of a few more convolutions.

Sources: Liu et al. 2015 (arXiv:1512.02325) for the detector; MLPerf's `ssd` for the ResNet-34
without its last stage, with stride 1 in the third, and for the extra layers.

Parameters are float32. Convolutions and activations are in the compute dtype; predictions are
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import ResNet

# PyTorch's padding; "SAME" pads unevenly where an even side is halved. The centres of the default
# boxes fit the even one.
PADDING = ((1, 1), (1, 1))


class Extra(NamedTuple):
    """An extra layer: a 1x1 convolution and a 3x3 one, each with bias and ReLU."""

    squeezed: int  # channels of the 1x1 convolution
    filters: int
    stride: int
    padding: int

    def side(self, side: int) -> int:
        """The side of its map, from the side of the map before."""
        return (side + 2 * self.padding - 3) // self.stride + 1


def backbone(stage_sizes: Sequence[int], **kwargs: Any) -> ResNet:
    """A ResNet's first three stages of basic blocks, with an eighth of the image's side at the end.

    `kwargs` are attributes of `models.ResNet`.
    """
    return ResNet(
        stage_sizes=tuple(stage_sizes[:3]),
        bottleneck=False,
        strides=(1, 2, 1),
        max_pool_padding=PADDING,
        **kwargs,
    )


def sides(image_size: int, extras: Sequence[Extra]) -> list[int]:
    """The side of each map that boxes are predicted from, for square images."""
    found = [-(-image_size // 8)]
    for extra in extras:
        found.append(extra.side(found[-1]))
    return found


class SSD(nn.Module):
    """The network; variables are `params` and `batch_stats`, float32."""

    backbone: ResNet
    extras: tuple[Extra, ...]
    boxes_per_cell: tuple[int, ...]  # of each map, one more than there are extra layers
    num_classes: int  # without the background

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
        """Predicts from images float[b, H, W, 3], already normalised.

        Returns:
            (codes float32[b, N, 4], logits float32[b, N, 1 + num_classes]) for the N default
            boxes, in the order map, row, column, shape. Logit 0 is the background.
        """
        dtype = self.backbone.dtype
        conv = partial(nn.Conv, dtype=dtype, kernel_init=nn.initializers.xavier_uniform())
        *_, x = self.backbone.endpoints(images, train).values()
        maps = [x]
        for i, extra in enumerate(self.extras):
            x = nn.relu(conv(extra.squeezed, (1, 1), name=f"extra{i + 1}_conv1")(x))
            layer = conv(
                extra.filters, (3, 3), extra.stride, extra.padding, name=f"extra{i + 1}_conv2"
            )
            x = nn.relu(layer(x))
            maps.append(x)
        width = 4 + 1 + self.num_classes
        outputs = []
        for i, (x, count) in enumerate(zip(maps, self.boxes_per_cell, strict=True)):
            # One convolution for the boxes and the classes of a map: it is wider, so faster.
            y = conv(count * width, (3, 3), padding=1, name=f"head{i + 1}")(x)
            outputs.append(y.reshape(len(y), -1, width))
        joined = jnp.concatenate(outputs, axis=1)
        joined = joined.astype(jnp.promote_types(dtype, jnp.float32))
        return joined[..., :4], joined[..., 4:]
