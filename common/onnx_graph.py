"""Builds ONNX graphs without jax: opset 17, which onnxruntime has read since 1.12.

A `Graph` has nodes and constants; `Resnet` adds the layers of a trained ResNet. Images in a graph
are float32[b, c, h, w]. The result of a node has its name.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from common.layers.space_to_depth import unfold_kernel

INPUT = "images"  # the pixels; float32[b, 3, s, s] of 0..255 is `PIXELS`
PIXELS = f"{INPUT}/nchw"
Ends = Mapping[str, tuple[Any, Sequence[Any]]]  # by name (dtype, shape); a name is a free side
Padding = tuple[tuple[int, int], tuple[int, int]]  # ((top, bottom), (left, right))
_OPSET, _IR_VERSION = 17, 8


class Graph:
    """The nodes and the constants of a graph."""

    def __init__(self) -> None:
        import onnx  # an optional package; --format is checked for it

        self.types = onnx.TensorProto
        self._onnx: Any = onnx
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def encode(self, inputs: Ends, outputs: Ends, facts: Mapping[str, str]) -> bytes:
        """The content of a file; `facts` are its metadata."""
        helper = self._onnx.helper

        def described(ends: Ends) -> list[Any]:
            types = {k: helper.np_dtype_to_tensor_dtype(np.dtype(x)) for k, (x, _) in ends.items()}
            return [helper.make_tensor_value_info(k, types[k], ends[k][1]) for k in ends]

        ends = described(inputs), described(outputs)
        model = helper.make_model(
            helper.make_graph(self._nodes, "network", *ends, self._constants),
            opset_imports=[helper.make_opsetid("", _OPSET)],
            ir_version=_IR_VERSION,
            producer_name="tpu_suite",
        )
        helper.set_model_props(model, dict(facts))
        self._onnx.checker.check_model(model, full_check=True)
        return model.SerializeToString()

    def node(self, operator: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Adds a node with one result, which has its name; returns the name."""
        return self.nodes(operator, [name], inputs, **attributes)[0]

    def nodes(
        self, operator: str, names: Sequence[str], inputs: Sequence[str], **attributes: Any
    ) -> Sequence[str]:
        """Adds a node with several results; returns their names."""
        node = self._onnx.helper.make_node(operator, inputs, names, names[0], **attributes)
        self._nodes.append(node)
        return names

    def constant(self, name: str, array: Any, dtype: Any = np.float32) -> str:
        """Adds a constant, an array or a number; returns its name."""
        array = np.asarray(np.asarray(array, dtype), order="C")
        self._constants.append(self._onnx.numpy_helper.from_array(array, name))
        return name

    def integers(self, name: str, *values: int) -> str:
        """Adds a constant int64[n]."""
        return self.constant(name, values, np.int64)

    def conv(self, name: str, x: str, kernel: Any, bias: Any, stride: int, padding: Padding) -> str:
        """Adds a convolution with kernel[h, w, c, f] and bias[f]."""
        arrays = {"kernel": np.asarray(kernel).transpose(3, 2, 0, 1), "bias": bias}
        constants = [self.constant(f"{name}/{key}", array) for key, array in arrays.items()]
        return self.node("Conv", name, [x, *constants], **placement(stride, padding))

    def affine(self, name: str, x: str, scale: np.ndarray, bias: np.ndarray) -> str:
        """Adds x * scale[c] + bias[c]."""
        factor = self.constant(f"{name}/scale", scale[:, None, None])
        term = self.constant(f"{name}/bias", bias[:, None, None])
        return self.node("Add", name, [self.node("Mul", f"{name}/scaled", [x, factor]), term])

    def relu(self, x: str) -> str:
        return self.node("Relu", f"{x}/relu", [x])


def placement(stride: int, padding: Padding) -> dict[str, Any]:
    """The attributes of a node with windows."""
    (top, bottom), (left, right) = padding
    return {"strides": [stride] * 2, "pads": [top, left, bottom, right]}


def same_padding(size: int, window: int, stride: int) -> Padding:
    """TensorFlow's padding SAME of a square image."""
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    edge = (total // 2, total - total // 2)
    return edge, edge


@dataclasses.dataclass
class Resnet:
    """Adds the layers of a trained ResNet; pre-activation, D and SE show in the arrays' names.

    In inference BatchNorm multiplies and adds constants. Where it follows a convolution, they go
    into the kernel and the bias. `params` and `statistics` are NumPy arrays by `trees.by_name`.
    """

    graph: Graph  # has `PIXELS`, in RGB
    size: int  # the side of the last result, which is square; at first of `PIXELS`
    params: Mapping[str, Any]  # of the layers
    statistics: Mapping[str, Any]  # of their BatchNorms
    epsilon: float  # of BatchNorm
    is_version_1: bool = False  # whether a bottleneck's first convolution has the stride
    is_bgr: bool = False  # whether the first kernel is for BGR
    blur: tuple[np.ndarray, int] | None = None  # BlurPool's kernel [h, w], and its least channels

    def backbone(
        self, pixels: Sequence[Any], pool: Padding | str | None, is_strided: Callable[[str], Any]
    ) -> str:
        """Adds all layers before the head.

        `pixels` are mean and std, of 3 channels each; `pool` is the padding of the max-pool,
        "SAME", or None for `conv_pool`; `is_strided` says of a block's name if its stride is 2.
        """
        mean, std = (np.asarray(values, np.float64) for values in pixels)
        x = self._stem(self.graph.affine("normalised", PIXELS, 1 / std, -mean / std), pool)
        blocks = {name.split("/")[0] for name in self.params if name.startswith("stage")}
        for name in sorted(blocks, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
            x = self._block(x, name, 2 if is_strided(name) else 1)
        return self.graph.relu(self._norm(x, "bn_final")) if self._has("bn_final") else x

    def global_mean(self, name: str, x: str) -> str:
        return self.graph.node("ReduceMean", name, [x], axes=[2, 3], keepdims=0)

    def dense(self, x: str, name: str, result: str) -> str:
        """Adds a layer with kernel[c, f] and bias[f], whose kernel may have sides of 1 before."""
        kernel, bias = (self.params[f"{name}/{key}"] for key in ("kernel", "bias"))
        arrays = {"kernel": np.reshape(kernel, kernel.shape[-2:]), "bias": bias}
        constants = [self.graph.constant(f"{result}/{key}", x) for key, x in arrays.items()]
        return self.graph.node("Gemm", result, [x, *constants])

    def _has(self, layer: str) -> bool:
        return any(f"{layer}/{key}" in self.params for key in ("kernel", "scale"))

    def _stem(self, x: str, padding: Padding | str | None) -> str:
        name = ""
        for part in filter(self._has, ("conv_stem", "conv_stem2", "conv_stem3")):
            name, norm = part, part.replace("conv", "bn")
            x = self._conv(x, name, norm, stride=2 if name == "conv_stem" else 1)
            x = self.graph.relu(x) if self._has(norm) else x
        if padding is None:
            return self.graph.relu(self._conv(x, "conv_pool", "bn_pool", 2))
        if isinstance(padding, str):
            padding = same_padding(self.size, 3, 2)
        self.size = (self.size + sum(padding[0]) - 3) // 2 + 1
        name, attributes = name.replace("conv_stem", "max_pool"), placement(2, padding)
        return self.graph.node("MaxPool", name, [x], kernel_shape=[3, 3], **attributes)

    def _block(self, x: str, block: str, stride: int) -> str:
        """One residual block; the norms of a pre-activated one come before its convolutions."""
        relu, count = self.graph.relu, 3 if self._has(f"{block}/conv3") else 2
        strided = 1 if self.is_version_1 or count == 2 else 2
        is_early = self._has("bn_final")
        size, shortcut = self.size, x
        y = relu(self._norm(x, f"{block}/bn1")) if is_early else x
        if self._has(f"{block}/conv_proj"):
            shortcut = self._shortcut(y, block, stride)
        self.size = size
        for k in range(1, count + 1):
            norm = f"{block}/bn{k + is_early}"
            y = self._conv(y, f"{block}/conv{k}", norm, stride if k == strided else 1)
            y = relu(y) if k < count else y
        if self._has(f"{block}/se_reduce"):
            y = self._squeeze_excite(y, f"{block}/se")
        y = self.graph.node("Add", f"{block}/sum", [y, shortcut])
        return y if is_early else relu(y)

    def _shortcut(self, x: str, block: str, stride: int) -> str:
        """A strided 1x1 convolution; in a D model a mean-pool and a 1x1 convolution."""
        if stride > 1 and self._has("conv_stem2"):
            attributes = placement(stride, same_padding(self.size, stride, stride))
            self.size, window = -(-self.size // stride), [stride] * 2
            x = self.graph.node(
                "AveragePool", f"{block}/mean_pool", [x], kernel_shape=window, **attributes
            )
            stride = 1
        return self._conv(x, f"{block}/conv_proj", f"{block}/bn_proj", stride)

    def _squeeze_excite(self, x: str, name: str) -> str:
        node = self.graph.node
        weights = self.global_mean(f"{name}_mean", x)
        for part in ("reduce", "expand"):
            weights = self.dense(weights, f"{name}_{part}", f"{name}_{part}")
            weights = self.graph.relu(weights) if part == "reduce" else weights
        weights = node("Sigmoid", f"{name}_weights", [weights])
        axes = self.graph.integers(f"{name}/axes", 2, 3)
        return node("Mul", name, [x, node("Unsqueeze", f"{name}/weights", [weights, axes])])

    def _conv(self, x: str, name: str, norm: str, stride: int) -> str:
        """A convolution with a BatchNorm that may follow it, and the blur that may precede it."""
        kernel = np.asarray(self.params[f"{name}/kernel"], np.float64)
        edge = len(kernel) // 2, len(kernel) // 2
        if name == "conv_stem":
            if kernel.shape[2] == 12:  # space-to-depth, whose windows begin one pixel earlier
                kernel, edge = unfold_kernel(kernel), (4, 2)
            kernel = kernel[:, :, ::-1] if self.is_bgr else kernel
        channels = kernel.shape[2]
        if self.blur and stride > 1 and channels >= self.blur[1]:
            # The stride of a 1x1 convolution goes to the blur, which is the same.
            step, stride = (stride, 1) if len(kernel) == 1 else (1, stride)
            self.size = -(-self.size // step)
            blur = np.repeat(self.blur[0][None, None], channels, axis=0)
            inputs = [x, self.graph.constant(f"{name}/blur/kernel", blur)]
            attributes = placement(step, ((1, 1), (1, 1)))
            x = self.graph.node("Conv", f"{name}/blur", inputs, group=channels, **attributes)
        bias = np.zeros(kernel.shape[-1])
        if self._has(norm):
            scale, bias = self._constants(norm)
            kernel = kernel * scale
        self.size = (self.size + sum(edge) - len(kernel)) // stride + 1
        return self.graph.conv(name, x, kernel, bias, stride, (edge, edge))

    def _norm(self, x: str, name: str) -> str:
        """A BatchNorm that follows no convolution."""
        return self.graph.affine(name, x, *self._constants(name))

    def _constants(self, norm: str) -> tuple[np.ndarray, np.ndarray]:
        """float64[c]: what a BatchNorm multiplies by, and what it then adds."""
        names = ((self.params, "scale"), (self.params, "bias"))
        names += ((self.statistics, "mean"), (self.statistics, "var"))
        gamma, beta, mean, variance = (np.asarray(x[f"{norm}/{k}"], np.float64) for x, k in names)
        scale = gamma / np.sqrt(variance + self.epsilon)
        return scale, beta - mean * scale
