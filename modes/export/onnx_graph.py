"""Writes a network as ONNX, without jax: opset 17, which onnxruntime has read since 1.12."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ops.network import INPUT, Network, Step

_OPSET, _IR_VERSION = 17, 8
_OPERATORS = {"relu": "Relu", "sigmoid": "Sigmoid", "add": "Add"}


def write(network: Network, facts: Mapping[str, str], path: str) -> None:
    """Writes a model from `images` uint8[b, s, s, 3] to `logits` float32[b, K].

    Args:
      network: the steps; float32 throughout.
      facts: the metadata of the file, as text.
      path: the new file.
    """
    import onnx  # an optional package; --format is checked for it

    graph = _Graph(onnx)
    for step in network.steps:
        graph.add(step)
    pixels = ["batch", network.size, network.size, 3]
    types, classes = onnx.TensorProto, len(network.steps[-1].arrays["bias"])
    content = onnx.helper.make_graph(
        graph.nodes,
        "network",
        [onnx.helper.make_tensor_value_info(INPUT, types.UINT8, pixels)],
        [onnx.helper.make_tensor_value_info(network.output, types.FLOAT, ["batch", classes])],
        graph.constants,
    )
    model = onnx.helper.make_model(
        content,
        opset_imports=[onnx.helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
        producer_name="tpu_suite",
    )
    onnx.helper.set_model_props(model, dict(facts))
    onnx.checker.check_model(model, full_check=True)
    with open(path, "wb") as file:
        file.write(model.SerializeToString(deterministic=True))


def runner(path: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function uint8[b, s, s, 3] -> logits of a file, as ONNX's own interpreter reads it.

    onnxruntime computes where it is installed; else the reference implementation of `onnx`.
    """
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        session: Any = ReferenceEvaluator(path)
    else:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {INPUT: images})[0]


class _Graph:
    """The nodes and the constants of a graph; inside it images are [b, c, h, w], as in ONNX."""

    def __init__(self, onnx: Any):
        self._onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._node("Cast", f"{INPUT}/float", [INPUT], to=onnx.TensorProto.FLOAT)
        self._node("Transpose", f"{INPUT}/nchw", [f"{INPUT}/float"], perm=[0, 3, 1, 2])

    def add(self, step: Step) -> None:
        """Adds the nodes of one step."""
        inputs = [f"{INPUT}/nchw" if name == INPUT else name for name in step.inputs]
        (top, bottom), (left, right) = step.padding
        places = {"strides": [step.stride] * 2, "pads": [top, left, bottom, right]}
        arrays, window = step.arrays, [step.window] * 2
        if step.kind == "conv":
            kernel = self._constant(f"{step.name}/kernel", arrays["kernel"].transpose(3, 2, 0, 1))
            bias = self._constant(f"{step.name}/bias", arrays["bias"])
            self._node("Conv", step.name, [*inputs, kernel, bias], **places)
        elif step.kind == "depthwise":
            kernel = arrays["kernel"].transpose(2, 0, 1)[:, None]
            inputs = [*inputs, self._constant(f"{step.name}/kernel", kernel)]
            self._node("Conv", step.name, inputs, group=len(kernel), **places)
        elif step.kind == "affine":
            self._affine(step, inputs)
        elif step.kind == "group_norm":
            self._affine(step, [self._in_groups(step, inputs[0])])
        elif step.kind == "max_pool":
            self._node("MaxPool", step.name, inputs, kernel_shape=window, **places)
        elif step.kind == "mean_pool":
            self._node("AveragePool", step.name, inputs, kernel_shape=window, **places)
        elif step.kind == "global_mean":
            self._node("ReduceMean", step.name, inputs, axes=[2, 3], keepdims=0)
        elif step.kind == "dense":
            constants = [self._constant(f"{step.name}/{k}", arrays[k]) for k in ("kernel", "bias")]
            self._node("Gemm", step.name, [*inputs, *constants])
        elif step.kind == "gate":
            axes = self._constant(f"{step.name}/axes", np.array([2, 3], np.int64))
            self._node("Unsqueeze", f"{step.name}/weights", [inputs[1], axes])
            self._node("Mul", step.name, [inputs[0], f"{step.name}/weights"])
        else:
            self._node(_OPERATORS[step.kind], step.name, inputs)

    def _affine(self, step: Step, inputs: list[str]) -> None:
        """inputs * scale + bias."""
        scale, bias = (
            self._constant(f"{step.name}/{k}", step.arrays[k][:, None, None])
            for k in ("scale", "bias")
        )
        self._node("Mul", f"{step.name}/scaled", [*inputs, scale])
        self._node("Add", step.name, [f"{step.name}/scaled", bias])

    def _in_groups(self, step: Step, x: str) -> str:
        """x with mean 0 and variance 1 in each group, which counts as one channel meanwhile."""
        name, ones = f"{step.name}/groups", np.ones(step.groups, np.float32)
        shape = self._constant(f"{name}/shape", np.array([0, step.groups, -1], np.int64))
        scale = self._constant(f"{name}/scale", ones)
        bias = self._constant(f"{name}/bias", 0 * ones)
        self._node("Reshape", name, [x, shape])
        normalised = [name, scale, bias]
        self._node("InstanceNormalization", f"{name}/norm", normalised, epsilon=step.epsilon)
        self._node("Shape", f"{name}/before", [x])
        self._node("Reshape", f"{name}/flat", [f"{name}/norm", f"{name}/before"])
        return f"{name}/flat"

    def _node(self, operator: str, name: str, inputs: list[str], **attributes: Any) -> None:
        node = self._onnx.helper.make_node(operator, inputs, [name], name, **attributes)
        self.nodes.append(node)

    def _constant(self, name: str, array: np.ndarray) -> str:
        array = np.ascontiguousarray(array)
        self.constants.append(self._onnx.numpy_helper.from_array(array, name))
        return name
