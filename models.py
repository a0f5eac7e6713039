"""The ResNet v1.5 family, 18 to 200 layers, with endpoints for detectors.

Sources: He et al. 2015 (arXiv:1512.03385) for the residual network; Goyal et al. 2017
(arXiv:1706.02677) for the stride on the 3x3 convolution ("v1.5"), gamma = 0 at each block's
end, N(0, 0.01) for the classifier and BatchNorm statistics per device; Ying et al. 2018
(arXiv:1811.06992) for statistics over groups of devices; Google's MLPerf v0.7 entry for the
space-to-depth stem.

Parameters are float32. Convolutions, BatchNorm outputs and activations are in the compute dtype;
BatchNorm statistics, the global average pool, the dense layer and the logits are in float32.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ops.layers.gram_layers import (
    Kernel,
    NormVariables,
    PooledNorm,
    TwiceNorm,
    conv_init,
    max_pool,
    relu,
)
from ops.layers.gram_norm import conv_norm, conv_norm_sum

# depth: (blocks per stage, bottleneck blocks rather than basic ones)
DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
    200: ((3, 24, 36, 3), True),
}

BATCH_NORMS = ("gram", "plain")


class ResNet(nn.Module):
    """Residual network: stem, stages of residual blocks, global average pool, dense `head`.

    Attributes:
        stage_sizes: blocks per stage; stage i (from 0) has width num_filters * 2**i and
            stride 2, the first one stride 1.
        bottleneck: 1x1, 3x3, 1x1 blocks with 4 * width channels out, else 3x3, 3x3 with width.
        num_classes: size of the logits.
        num_filters: channels of the stem and width of the first stage.
        dtype: compute dtype. With float32, the TPU still multiplies in bfloat16 unless
            `jax.default_matmul_precision` says otherwise (the head is always exact float32).
        bn_axes: names of the mesh axes over which training statistics of BatchNorm are
            averaged, inside `jax.shard_map`; () leaves each device its own. Batch shares are of
            equal size, so the mean over devices of E[x] and E[x^2] is that of the whole span.
        bn_momentum: weight of the old value in the running statistics.
        bn_epsilon: added to the variance.
        batch_norm: "plain", or "gram" for the same function and gradients in training with less
            memory traffic: where a 1x1 convolution widens, its output's statistics come from the
            moments of its input (`ops.layers.gram_norm`), the stem is pooled, then normalised
            and computed again in the backward pass. Variables are the same, so either reads the
            other's checkpoints.
        space_to_depth: rearrange images to [b, H/2, W/2, 12] first, so that the stem feeds 12
            channels instead of 3 to the matrix unit. Its kernel is [4, 4, 12, F] then.

    Variables: `params` and `batch_stats`, float32. Training needs `mutable=["batch_stats"]`.
    """

    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    num_classes: int = 1000
    num_filters: int = 64
    dtype: Any = jnp.bfloat16
    bn_axes: tuple[str, ...] = ()
    bn_momentum: float = 0.9
    bn_epsilon: float = 1e-5
    batch_norm: str = "plain"
    space_to_depth: bool = False

    def setup(self):
        # HIGHEST: by default accelerators round float32 operands (to bfloat16 or TF32). The
        # head is 0.05% of the multiplications of ResNet-50.
        self.head = nn.Dense(
            self.num_classes,
            dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
            kernel_init=nn.initializers.normal(0.01),
        )

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Classifies images.

        Args:
            images: float[b, H, W, 3], already normalised.
            train: normalise with the batch's statistics and update the running ones, else use
                the running ones.

        Returns:
            Logits, f32[b, num_classes].

        Raises:
            ValueError: odd H or W with `space_to_depth`; a `batch_norm` other than the two.
            NameError: `train` with `bn_axes` outside a `shard_map` over them.
        """
        *_, features = self.endpoints(images, train).values()
        return self.head(jnp.mean(features, axis=(1, 2), dtype=jnp.float32))

    @nn.compact
    def endpoints(self, images: jax.Array, train: bool) -> dict[str, jax.Array]:
        """Returns each stage's output, for detectors.

        Use as `backbone.endpoints(images, train)` inside a module, or with
        `init(..., method="endpoints")` and `apply(..., method="endpoints")`; `init` then makes
        no `head`. Arguments and errors are those of `__call__`.

        Returns:
            `{"C2": ..., "C3": ..., "C4": ..., "C5": ...}` in the compute dtype, strides 4, 8, 16
            and 32: C_k is [b, ceil(H / 2**k), ceil(W / 2**k), num_filters * 2**(k-2) * e], where
            e is 4 with bottleneck blocks, else 1. The last one is C{len(stage_sizes) + 1}.
        """
        if self.batch_norm not in BATCH_NORMS:
            known = " or ".join(map(repr, BATCH_NORMS))
            raise ValueError(f"batch_norm={self.batch_norm!r}: use {known}")
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype, kernel_init=conv_init)
        axis_name: Any = self.bn_axes or None  # flax says str; lax.pmean below it takes a tuple
        shared = {
            "momentum": self.bn_momentum,
            "epsilon": self.bn_epsilon,
            "axis_name": axis_name,
        }
        norm = partial(
            nn.BatchNorm,
            use_running_average=not train,
            dtype=self.dtype,  # of the output: flax keeps the statistics in float32
            **shared,
            # E[x^2] - E[x]^2 takes one pass and one pmean; flax clips it at 0.
            use_fast_variance=True,
        )

        f = self.num_filters
        gram = shared if train and self.batch_norm == "gram" else None
        x = self._stem(images, conv, norm, gram)
        outputs = {}
        for i, size in enumerate(self.stage_sizes):
            for j in range(size):
                x = Block(
                    conv,
                    norm,
                    filters=f * 2**i,
                    stride=2 if i > 0 and j == 0 else 1,
                    bottleneck=self.bottleneck,
                    gram=gram,
                    name=f"stage{i + 1}_block{j + 1}",
                )(x)
            outputs[f"C{i + 2}"] = x
        return outputs

    def _stem(self, images: jax.Array, conv: Any, norm: Any, gram: Any) -> jax.Array:
        """[b, H, W, 3] to [b, ceil(H / 4), ceil(W / 4), num_filters]; `gram` as for `Block`."""
        f = self.num_filters
        if self.space_to_depth:
            images = space_to_depth(images)
            layer = partial(conv, f, (4, 4), padding=((2, 1),) * 2, kernel_init=_stem_init)
        else:
            # Paddings are explicit because SAME with stride 2 pads unevenly.
            layer = partial(conv, f, (7, 7), strides=2, padding=3)
        if not gram:
            return max_pool(nn.relu(norm(name="bn_stem")(layer(name="conv_stem")(images))))
        unbound = layer(parent=None)  # the function without its variable
        shape = (*unbound.kernel_size, images.shape[-1], f)
        kernel = Kernel(shape, unbound.kernel_init, name="conv_stem")()
        return PooledNorm(**gram, name="bn_stem")(
            lambda images, kernel: unbound.apply({"params": {"kernel": kernel}}, images),
            images,
            kernel,
        )


class Block(nn.Module):
    """Residual block: relu(shortcut(x) + F(x)), with F(x) = 0 at initialisation.

    Maps [b, h, w, c] to [b, ceil(h / stride), ceil(w / stride), e * filters], where e is 4 for a
    bottleneck and 1 for a basic block. `conv` and `norm` are `nn.Conv` and `nn.BatchNorm` with the
    model-wide settings applied. `gram` is None, or in training the settings of BatchNorm: then
    `ops.layers.gram_norm` takes the place of 1x1 convolutions that have more channels out than in.
    """

    conv: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    filters: int
    stride: int
    bottleneck: bool
    gram: Mapping[str, Any] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        f, s = self.filters, self.stride
        if self.bottleneck:
            layers = [(f, 1, 1), (f, 3, s), (4 * f, 1, 1)]  # v1.5: the stride is on the 3x3
        else:
            layers = [(f, 3, s), (f, 3, 1)]
        *layers, final = layers
        features = final[0]
        projected = s != 1 or x.shape[-1] != features
        joint = self.gram if projected and self.bottleneck else None
        y: Any = x
        for i, layer in enumerate(layers, 1):
            if joint is not None and i == len(layers):
                y = TwiceNorm(**joint, name=f"bn{i}")(self._conv(y, layer, str(i)))
            else:
                y = nn.relu(self._layer(y, layer, str(i)))
        # Zero gamma: every block starts as its shortcut, which eases large-batch training.
        last, zeros, ones = str(len(layers) + 1), nn.initializers.zeros, nn.initializers.ones
        if joint is not None:
            return relu(self._gram(features, (y, last, zeros), (x[:, ::s, ::s], "_proj", ones)))
        y = self._layer(y, final, last, zeros)
        if projected:
            x = self._layer(x, (features, 1, s), "_proj")
        return relu(x + y) if self.gram else nn.relu(x + y)

    def _conv(self, x: jax.Array, layer: tuple[int, int, int], suffix: str) -> jax.Array:
        features, size, stride = layer
        settings: Any = {"strides": stride, "padding": size // 2, "name": f"conv{suffix}"}
        return self.conv(features, (size, size), **settings)(x)

    def _layer(
        self,
        x: jax.Array,
        layer: tuple[int, int, int],
        suffix: str,
        scale_init: Any = nn.initializers.ones,
    ) -> jax.Array:
        """Convolution and BatchNorm: [b, h, w, c] to [b, ceil(h / s), ceil(w / s), features].

        `layer` is (features, size of the kernel, stride s).
        """
        features, size, s = layer
        if self.gram and size == 1 and features > x.shape[-1]:
            return self._gram(features, (x[:, ::s, ::s], suffix, scale_init))
        x = self._conv(x, layer, suffix)
        return self.norm(scale_init=scale_init, name=f"bn{suffix}")(x)

    def _gram(self, features: int, *branches: tuple[Any, ...]) -> jax.Array:
        """Sum of 1x1 convolutions with BatchNorm, in training: see `ops.layers.gram_norm`.

        A branch is (x [b, h, w, c] or `Twice`, suffix of its names, initialiser of its scale).
        """
        assert self.gram is not None
        inputs, tracks, settings = [], [], {}
        for x, suffix, init in branches:
            kernel = Kernel((1, 1, x.shape[-1], features), name=f"conv{suffix}")()[0, 0]
            norm = NormVariables(**self.gram, scale_init=init, name=f"bn{suffix}")
            scale, bias, track = norm(features)
            inputs.append((x, kernel, scale, bias))
            tracks.append(track)
            settings = {"epsilon": norm.epsilon, "axis_name": norm.axes()}
        if len(inputs) == 1:
            y, *moments = conv_norm(*inputs[0], **settings)
            found: Any = [moments]
        else:
            y, found = conv_norm_sum(inputs, **settings)
        for track, moments in zip(tracks, found, strict=True):
            track(*moments)
        return y


def resnet(depth: int, **kwargs: Any) -> ResNet:
    """Returns the ResNet of this depth; `kwargs` are `ResNet`'s further attributes.

    Raises:
        ValueError: a depth other than 18, 34, 50, 101, 152, 200.
    """
    if depth not in DEPTHS:
        known = ", ".join(map(str, DEPTHS))
        raise ValueError(f"no ResNet of depth {depth!r}; known depths: {known}")
    stage_sizes, bottleneck = DEPTHS[depth]
    return ResNet(stage_sizes=stage_sizes, bottleneck=bottleneck, **kwargs)


def space_to_depth(images: jax.Array) -> jax.Array:
    """Moves 2x2 pixels into channels: [b, H, W, C] to [b, H/2, W/2, 4 * C], dtype kept.

    Channel (2 * (y % 2) + x % 2) * C + c holds pixel (y, x), channel c.

    Raises:
        ValueError: odd H or W.
    """
    b, h, w, c = images.shape
    if h % 2 or w % 2:
        raise ValueError(f"space_to_depth needs even image height and width, got {h} x {w}")
    x = images.reshape(b, h // 2, 2, w // 2, 2, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c)


def space_to_depth_kernel(kernel: jax.Array) -> jax.Array:
    """Converts the plain stem's kernel to that of the space-to-depth stem, dtype kept.

    [7, 7, C, F] to [4, 4, 4 * C, F]: stride 1 and padding (2, 1) on `space_to_depth(images)` then
    give what stride 2 and padding (3, 3) give on `images`.

    Raises:
        ValueError: a kernel that is not [7, 7, C, F].
    """
    if kernel.ndim != 4 or kernel.shape[:2] != (7, 7):
        raise ValueError(f"space_to_depth_kernel needs [7, 7, C, F], got {list(kernel.shape)}")
    c, f = kernel.shape[2:]
    # The window begins 3 pixels before an even one, inside a 2x2 cell: a zero row and column in
    # front make it begin with the cell.
    k = jnp.pad(kernel, ((1, 0), (1, 0), (0, 0), (0, 0))).reshape(4, 2, 4, 2, c, f)
    return k.transpose(0, 2, 1, 3, 4, 5).reshape(4, 4, 4 * c, f)


def _stem_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws the plain stem's kernel and converts it: both stems begin as the same function."""
    return space_to_depth_kernel(conv_init(key, (7, 7, shape[2] // 4, shape[3]), dtype))
