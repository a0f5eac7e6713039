"""Mask R-CNN's network: ResNet, FPN, and the heads of the RPN, of boxes and of masks; its anchors.

Sources: He et al. 2017 (arXiv:1703.06870) for the detector and its heads; Lin et al. 2017
(arXiv:1612.03144) for the pyramid and its anchors, level by level; Ren et al. 2015
(arXiv:1506.01497) for the proposals. The initialisation is that of MLPerf's reference.

Parameters are float32. Convolutions and activations are in the compute dtype. The last layers of
the heads for proposals and boxes are float32, because many scores would be equal in bfloat16.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.detection import selection
from benchmarks.detection.boxes import clip, decode_boxes, nms
from common.errors import ConfigError
from common.layers import space_to_depth
from common.layers.convolutions import conv_general_dilated, device_kind
from models import ResNet

Maps = dict[int, jax.Array]  # level -> [b, h, w, c], a cell for 2**level pixels

RPN_WEIGHTS = (1.0, 1.0, 1.0, 1.0)  # the box coder's weights of the RPN's deltas
_HE_FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "uniform")  # Caffe2's "XavierFill"
_HE_FAN_OUT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")  # "MSRAFill"
PADDING = ((1, 1), (1, 1))
_Conv = partial(nn.Conv, conv_general_dilated_cls=lambda: _conv_on_cpus)
_conv3x3 = partial(_Conv, kernel_size=(3, 3), padding=PADDING)


def blocked_stem(inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner`, such as `models.stem`, of images in blocks, with the same kernel [7, 7, C, F]."""

    def blocked(images: jax.Array, features: int, conv: Any, norm: Any) -> Any:
        def conv_stem(features: int, *window: Any, name: str, **others: Any) -> BlockedConv:
            plain = conv(features, *window, **others, parent=None)
            return BlockedConv(features, plain.dtype, name=name)

        return inner(images, features, conv_stem, norm)

    return blocked


class BlockedConv(nn.Module):
    """The plain stem's convolution, kernel [7, 7, C, F], of images in blocks of 2x2 pixels.

    TPUs read 4 * C channels faster than C.
    """

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, blocks: jax.Array) -> jax.Array:
        """[b, H/2, W/2, 4 * C] to dtype[b, H/2, W/2, F]."""
        shape = (7, 7, blocks.shape[-1] // 4, self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        return lax.conv_general_dilated(
            blocks.astype(self.dtype),
            space_to_depth.convert_kernel(kernel).astype(self.dtype),
            window_strides=(1, 1),
            padding=space_to_depth.PADDING,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


class FPN(nn.Module):
    """Feature pyramid: maps of `filters` channels for `levels`, from the stages of a ResNet.

    Levels beyond the last stage take every second cell of the level before.
    """

    levels: tuple[int, ...]
    filters: int
    dtype: Any

    @nn.compact
    def __call__(self, stages: Maps) -> Maps:
        """From the outputs of the stages by level to the maps of `levels`."""
        conv = partial(_Conv, self.filters, dtype=self.dtype, kernel_init=_HE_FAN_IN)
        inner = [level for level in self.levels if level in stages]
        maps: Maps = {}
        above: jax.Array | None = None
        for level in reversed(inner):
            x = conv((1, 1), name=f"lateral{level}")(stages[level])
            if above is not None:
                x += _upsampled(above)[:, : x.shape[1], : x.shape[2]]
            above = x
            maps[level] = conv((3, 3), padding=PADDING, name=f"output{level}")(x)
        for level in self.levels[len(inner) :]:
            maps[level] = maps[level - 1][:, ::2, ::2]
        return {level: maps[level] for level in self.levels}


def _upsampled(x: jax.Array) -> jax.Array:
    """[b, 2h, 2w, c] from [b, h, w, c]: each cell is copied four times, in one operation."""
    b, h, w, c = x.shape
    return jnp.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c)).reshape(b, 2 * h, 2 * w, c)


class RPNHead(nn.Module):
    """Region proposal network: which anchors of each map hold an object, and their deltas."""

    num_anchors: int  # of a cell
    filters: int
    dtype: Any

    @nn.compact
    def __call__(self, maps: Maps) -> tuple[list[jax.Array], list[jax.Array]]:
        """For each level (logits f32[b, n], deltas f32[b, n, 4]), by row, column and anchor."""
        normal = nn.initializers.normal(0.01)
        layer = _conv3x3(self.filters, dtype=self.dtype, kernel_init=normal, name="conv")
        # One product makes both outputs: each alone fills few columns of a TPU's matrix unit.
        score = _Pointwise(self.num_anchors, normal, name="score")(self.filters)
        code = _Pointwise(4 * self.num_anchors, normal, name="code")(self.filters)
        kernel, bias = (jnp.concatenate(both, -1) for both in zip(score, code, strict=True))
        logits, deltas = [], []
        for x in maps.values():
            y = nn.relu(layer(x)).astype(jnp.float32) @ kernel + bias
            logits.append(y[..., : self.num_anchors].reshape(len(x), -1))
            deltas.append(y[..., self.num_anchors :].reshape(len(x), -1, 4))
        return logits, deltas


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
    """The RoIs' box head: dense layers, then the class of each RoI and a box for each class."""

    features: tuple[int, ...]
    num_logits: int  # with the background
    dtype: Any

    @nn.compact
    def __call__(self, regions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(logits f32[b, R, C], deltas f32[b, R, C, 4]) of regions [b, R, s, s, c]."""
        x = regions.reshape(*regions.shape[:2], -1)
        for i, features in enumerate(self.features, 1):
            dense = nn.Dense(features, dtype=self.dtype, kernel_init=_HE_FAN_IN, name=f"dense{i}")
            x = nn.relu(dense(x))
        normal, count = nn.initializers.normal, self.num_logits
        output = partial(nn.Dense, dtype=jnp.float32)
        logits = output(count, kernel_init=normal(0.01), name="class")(x)
        deltas = output(4 * count, kernel_init=normal(0.001), name="code")(x)
        return logits, deltas.reshape(*x.shape[:2], count, 4)


class MaskHead(nn.Module):
    """The RoIs' mask head: convolutions, then a mask of twice the RoI's side for each class."""

    features: tuple[int, ...]
    num_logits: int
    dtype: Any

    @nn.compact
    def __call__(self, regions: jax.Array) -> jax.Array:
        """Logits f32[b, R, 2s, 2s, C] of regions [b, R, s, s, c]."""
        x = regions.reshape(-1, *regions.shape[2:])
        options: Any = {"dtype": self.dtype, "kernel_init": _HE_FAN_OUT}
        for i, features in enumerate(self.features, 1):
            x = nn.relu(_conv3x3(features, **options, name=f"conv{i}")(x))
        x = nn.relu(ConvTranspose2x2(x.shape[-1], **options, name="upsampled")(x))
        y = _Conv(self.num_logits, (1, 1), **options, name="mask")(x).astype(jnp.float32)
        return y.reshape(*regions.shape[:2], *y.shape[1:])


class MaskRCNN(nn.Module):
    """The network; `bind` it to variables and call its parts in turn.

    Variables are `params` and `batch_stats`, float32.
    """

    backbone: ResNet
    levels: tuple[int, ...]
    num_anchors: int  # of a cell
    filters: int  # channels of the pyramid
    box_features: tuple[int, ...]
    mask_features: tuple[int, ...]
    num_classes: int  # without the background

    def setup(self):
        dtype, num_logits = self.backbone.dtype, 1 + self.num_classes
        self.pyramid = FPN(self.levels, self.filters, dtype)
        self.proposal_head = RPNHead(self.num_anchors, self.filters, dtype)
        self.box_head = BoxHead(self.box_features, num_logits, dtype)
        self.mask_head = MaskHead(self.mask_features, num_logits, dtype)

    def maps(self, images: jax.Array, train: bool) -> Maps:
        """The pyramid's maps of normalised images float[b, H/2, W/2, 12], in blocks of 2x2 pixels.

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


@dataclasses.dataclass(frozen=True)
class AnchorGenerator:
    """The RPN's anchors on the maps of the pyramid; fields are named as the config's keys."""

    # From the finest to the coarsest; level l has a cell for 2**l x 2**l pixels.
    pyramid_levels: Annotated[Sequence[Annotated[int, "[2, 12]"]], "[1, 11]"]
    # The side of a square anchor in cells, such as 8 (arXiv:1612.03144, section 4.1).
    anchor_scale: Annotated[float, "[0.01, 4096]"]
    # Height by width of the anchors of a cell, whose areas are equal.
    anchor_ratios: Annotated[Sequence[Annotated[float, "[0.01, 100]"]], "[1, 100]"]
    # Around the centres of cells, or around the first corner of each cell, with half sides in
    # integer pixels, like torchvision.
    anchor_grid: Literal["centres", "corners"] = "centres"

    def __post_init__(self):
        levels = tuple(self.pyramid_levels)
        if levels != tuple(range(levels[0], levels[-1] + 1)):
            raise ConfigError(f"config.pyramid_levels={levels}: must be consecutive numbers")

    def boxes(self, height: int, width: int) -> list[np.ndarray]:
        """The anchors float32[n, 4] of each level: (y0, x0, y1, x1) in pixels, by cell and ratio.

        The sides of the padded image are multiples of the coarsest cell; boxes reach beyond it.
        """
        anchors = []
        for (y, shapes), (x, _) in zip(self.grids(height), self.grids(width), strict=True):
            centres = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).reshape(-1, 1, 2)
            boxes = np.concatenate([centres - shapes / 2, centres + shapes / 2], axis=-1)
            anchors.append(boxes.reshape(-1, 4).astype(np.float32))
        return anchors

    def grids(self, side: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The centres of each level's anchors along `side` pixels, and the anchors' sizes.

        For each level: float64[n], and heights and widths float64[k, 2].
        """
        grids, is_centred = [], self.anchor_grid == "centres"
        for level in self.pyramid_levels:
            cell = 2**level
            points = cell * (np.arange(-(-side // cell)) + 0.5 * is_centred)
            scale, ratios = cell * self.anchor_scale, self.anchor_ratios
            shapes = np.array([(scale * math.sqrt(r), scale / math.sqrt(r)) for r in ratios])
            grids.append((points, shapes if is_centred else 2 * np.round(shapes / 2)))
        return grids


def propose(
    logits: Sequence[jax.Array],
    deltas: Sequence[jax.Array],
    anchors: Sequence[jax.typing.ArrayLike],
    sizes: jax.Array,
    *,
    before_nms: int,
    after_nms: int,
    iou_threshold: float,
) -> jax.Array:
    """The proposals of each image: the RPN's best boxes after NMS within each level.

    Equal logits are in the order of the levels and anchors. Gradients do not pass.

    Args:
        logits, deltas, anchors: of each level, f32[b, n], f32[b, n, 4] and f32[n, 4] in pixels.
        sizes: f32[b, 2], height and width of the image without padding; boxes are cut to it, and
            those without area then are left out.
        before_nms: how many boxes of a level, with the highest logits, take part in the NMS.
        after_nms: how many boxes of an image are proposed, from all levels.
        iou_threshold: where two boxes of a level have a larger IoU, the better one stays.

    Returns:
        f32[b, P, 4], the best first, within the image; zeros are padding. P is `after_nms`, or the
        number of boxes that took part if they are fewer.
    """
    candidates = [
        _best_of_level(*level, sizes, before_nms)
        for level in zip(map(lax.stop_gradient, logits), deltas, anchors, strict=True)
    ]
    # The levels become rows of one problem, and the shorter ones are padded with empty boxes.
    longest = max(top.shape[1] for top, _ in candidates)
    gaps = [((0, 0), (0, longest - top.shape[1])) for top, _ in candidates]
    pairs = [*zip(candidates, gaps, strict=True)]
    top = jnp.stack([jnp.pad(top, gap) for (top, _), gap in pairs], 1)
    boxes = jnp.stack([jnp.pad(boxes, (*gap, (0, 0))) for (_, boxes), gap in pairs], 1)
    kept = nms(boxes, iou_threshold, inclusive=False)
    ranked = jnp.where(kept, top, -jnp.inf).reshape(len(sizes), -1)
    count = min(after_nms, sum(top.shape[1] for top, _ in candidates))
    best, index = lax.top_k(ranked, count)
    proposals = jnp.take_along_axis(boxes.reshape(len(sizes), -1, 4), index[..., None], 1)
    return jnp.where(best[..., None] > -jnp.inf, proposals, 0)


def _best_of_level(
    logits: jax.Array, deltas: jax.Array, anchors: jax.typing.ArrayLike, sizes: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    """(logits f32[b, k], boxes f32[b, k, 4]) of the best anchors of a level, the best first."""
    top, index = selection.top_k(logits.astype(jnp.float32), min(k, logits.shape[1]))
    deltas = jnp.take_along_axis(lax.stop_gradient(deltas), index[..., None], 1)
    boxes = decode_boxes(deltas.astype(jnp.float32), jnp.asarray(anchors)[index], RPN_WEIGHTS)
    return top, clip(boxes, sizes[:, :1], sizes[:, 1:])


def _conv_on_cpus(x: jax.Array, kernel: jax.Array, *where: Any, **others: Any) -> jax.Array:
    """`conv_general_dilated` on CPUs; elsewhere XLA's own form, which TPUs were measured with."""
    conv = conv_general_dilated if device_kind() == "cpu" else lax.conv_general_dilated
    return conv(x, kernel, *where, **others)


class ConvTranspose2x2(nn.ConvTranspose):
    """flax's with a bias, 2x2 windows and a stride of 2: [b, h, w, c] to [b, 2h, 2w, features].

    On CPUs it is a product. XLA's gradient in the kernel took 44 s for 256 regions of 14x14 cells
    and 256 channels.
    """

    kernel_size: Any = (2, 2)
    strides: Any = (2, 2)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if device_kind() != "cpu":
            return super().__call__(x)
        b, h, w, c = x.shape
        kernel = self.param("kernel", self.kernel_init, (2, 2, c, self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        x, kernel, bias = (value.astype(self.dtype or x.dtype) for value in (x, kernel, bias))
        # The kernel's last row and column make the first of the new pixels.
        y = x @ kernel[::-1, ::-1].transpose(2, 0, 1, 3).reshape(c, -1)
        y = y.reshape(b, h, w, 2, 2, -1).transpose(0, 1, 3, 2, 4, 5)
        return y.reshape(b, 2 * h, 2 * w, -1) + bias
