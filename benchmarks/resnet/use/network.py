"""Turns a trained ResNet into the plain steps of `common.portable`, with BatchNorm folded in.

In inference BatchNorm multiplies and adds constants. Where it follows a convolution, the constants
go into the kernel and the bias, so that other programs compute neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.resnet import variants
from benchmarks.resnet.architecture import MAX_POOLS, Architecture
from common import portable
from common.foreign.resnets import unfold_kernel
from common.images.input_spec import InputSpec
from common.portable import Network, Padding
from models import EPSILON


def build(keys: Architecture, variables: Any, spec: InputSpec) -> Network:
    """The network from float32[b, size, size, 3] of RGB pixels in 0..255 to logits [b, K].

    Args:
      keys: of the recipe, for what the arrays do not show: padding, strides, blurs.
      variables: its `params` and `batch_stats` as NumPy arrays; pre-activation, D, SE and the
        convolution instead of a max-pool show in their names.
      spec: the model's pixels.
    """
    return _Builder(keys, variables, spec).build()


class _Builder:
    """Adds the steps of one model; `_size` is the side of the last result, which is square."""

    def __init__(self, keys: Architecture, variables: Any, spec: InputSpec):
        self._keys, self._spec, self._size = keys, spec, spec.size
        self._params, self._statistics = variables["params"], variables["batch_stats"]
        self._network = Network(spec.size)

    def build(self) -> Network:
        x = self._stem(self._normalise())
        blocks = [name for name in self._params if name.startswith("stage")]
        for name in sorted(blocks, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
            is_strided = re.fullmatch(r"stage(?!1_)\d+_block1", name) is not None
            x = self._block(x, name, 2 if is_strided else 1)
        if "bn_final" in self._params:
            x = self._relu(self._norm(x, "", "bn_final"))
        x = self._network.add("global_mean", "features", x)
        self._dense(x, "", "head", "logits")
        return self._network

    def _normalise(self) -> str:
        """(x - mean) / std; the stem's kernel takes care of BGR, see `_kernel`."""
        spec = self._spec
        mean, std = np.asarray(spec.mean, np.float64), np.asarray(spec.std, np.float64)
        arrays = {"scale": 1 / std, "bias": -mean / std}
        return self._network.add("affine", "normalised", portable.INPUT, arrays=arrays)

    def _stem(self, x: str) -> str:
        last = "conv_stem"
        for name in ("conv_stem", "conv_stem2", "conv_stem3"):
            if name in self._params:
                norm = name.replace("conv", "bn")
                x = self._conv(x, "", name, norm, stride=2 if name == "conv_stem" else 1)
                x, last = self._relu(x) if norm in self._params else x, name
        if (padding := MAX_POOLS[self._keys.max_pool]) is None:
            return self._relu(self._conv(x, "", "conv_pool", "bn_pool", 2))
        if isinstance(padding, str):
            padding = portable.same_padding(self._size, 3, 2)
        self._size = (self._size + sum(padding[0]) - 3) // 2 + 1
        name = last.replace("conv_stem", "max_pool")
        return self._network.add("max_pool", name, x, window=3, stride=2, padding=padding)

    def _block(self, x: str, block: str, stride: int) -> str:
        """One residual block; the norms of a pre-activated one come before its convolutions."""
        count = 3 if "conv3" in self._params[block] else 2
        strided = 1 if self._keys.resnet_version == "1" or count == 2 else 2
        is_early = "bn_final" in self._params
        size, shortcut = self._size, x
        y = self._relu(self._norm(x, block, "bn1")) if is_early else x
        if "conv_proj" in self._params[block]:
            shortcut = self._shortcut(y, block, stride)
        self._size = size
        for k in range(1, count + 1):
            norm = f"bn{k + is_early}"
            y = self._conv(y, block, f"conv{k}", norm, stride if k == strided else 1)
            y = self._relu(y) if k < count else y
        if "se_reduce" in self._params[block]:
            y = self._squeeze_excite(y, block)
        y = self._network.add("add", f"{block}/sum", y, shortcut)
        return y if is_early else self._relu(y)

    def _shortcut(self, x: str, block: str, stride: int) -> str:
        """A strided 1x1 convolution; in a D model a mean-pool and a 1x1 convolution."""
        if stride > 1 and "conv_stem2" in self._params:
            padding = portable.same_padding(self._size, stride, stride)
            self._size = -(-self._size // stride)
            values: dict[str, Any] = {"window": stride, "stride": stride, "padding": padding}
            x, stride = self._network.add("mean_pool", f"{block}/mean_pool", x, **values), 1
        return self._conv(x, block, "conv_proj", "bn_proj", stride)

    def _squeeze_excite(self, x: str, block: str) -> str:
        weights = self._network.add("global_mean", f"{block}/se_mean", x)
        weights = self._relu(self._dense(weights, block, "se_reduce"))
        weights = self._dense(weights, block, "se_expand")
        weights = self._network.add("sigmoid", f"{block}/se_weights", weights)
        return self._network.add("gate", f"{block}/se", x, weights)

    def _conv(self, x: str, block: str, name: str, norm: str, stride: int) -> str:
        """A convolution; a BatchNorm that follows it is folded in."""
        kernel = np.asarray(self._branch(block)[name]["kernel"], np.float64)
        if name == "conv_stem":
            kernel, padding = self._stem_kernel(kernel)
        else:
            edge = (kernel.shape[0] // 2,) * 2
            padding = (edge, edge)
        if self._keys.blur_pool and stride > 1 and kernel.shape[2] >= variants.MIN_BLUR_CHANNELS:
            # The stride of a 1x1 convolution goes to the blur, see `variants.compose_blur_pool`.
            is_1x1 = kernel.shape[0] == 1
            x = self._blur(x, _join(block, name), kernel.shape[2], stride if is_1x1 else 1)
            stride = 1 if is_1x1 else stride
        bias = np.zeros(kernel.shape[-1])
        if norm in self._branch(block):
            scale, bias = self._constants(block, norm)
            kernel = kernel * scale
        self._size = (self._size + sum(padding[0]) - kernel.shape[0]) // stride + 1
        arrays = {"kernel": kernel, "bias": bias}
        return self._network.add(
            "conv", _join(block, name), x, arrays=arrays, stride=stride, padding=padding
        )

    def _blur(self, x: str, conv: str, channels: int, stride: int) -> str:
        """The blur before a convolution."""
        self._size = -(-self._size // stride)
        arrays = {"kernel": np.repeat(variants.BLUR_KERNEL[..., None], channels, axis=-1)}
        padding = ((1, 1), (1, 1))
        return self._network.add(
            "depthwise", f"{conv}/blur", x, arrays=arrays, stride=stride, padding=padding
        )

    def _stem_kernel(self, kernel: np.ndarray) -> tuple[np.ndarray, Padding]:
        """The kernel of the stem on plain RGB pixels, and its padding."""
        edge = (kernel.shape[0] // 2,) * 2
        if kernel.shape[2] == 12:  # space-to-depth, whose windows begin one pixel earlier
            kernel, edge = unfold_kernel(kernel), (4, 2)
        if self._spec.channels == "BGR":
            kernel = kernel[:, :, ::-1]
        return kernel, (edge, edge)

    def _norm(self, x: str, block: str, name: str) -> str:
        """A BatchNorm of its own."""
        scale, bias = self._constants(block, name)
        arrays = {"scale": scale, "bias": bias}
        return self._network.add("affine", _join(block, name), x, arrays=arrays)

    def _constants(self, block: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """float64[c]: what a BatchNorm multiplies by, and what it then adds."""
        learned, running = self._branch(block)[name], self._statistics
        running = (running[block] if block else running)[name]
        values = (learned["scale"], learned["bias"], running["mean"], running["var"])
        gamma, beta, mean, variance = (np.asarray(v, np.float64) for v in values)
        scale = gamma / np.sqrt(variance + EPSILON)
        return scale, beta - mean * scale

    def _dense(self, x: str, block: str, name: str, result: str = "") -> str:
        layer = self._branch(block)[name]
        kernel = np.asarray(layer["kernel"])
        arrays = {"kernel": kernel.reshape(kernel.shape[-2:]), "bias": layer["bias"]}
        return self._network.add("dense", result or _join(block, name), x, arrays=arrays)

    def _relu(self, x: str) -> str:
        return self._network.add("relu", f"{x}/relu", x)

    def _branch(self, block: str) -> Mapping[str, Any]:
        return self._params[block] if block else self._params


def _join(block: str, name: str) -> str:
    return f"{block}/{name}" if block else name
