"""Writes a network as ONNX, without jax: opset 17, which onnxruntime has read since 1.12."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    graph = Graph(onnx)
    graph.node("Cast", f"{INPUT}/float", [INPUT], to=onnx.TensorProto.FLOAT)
    graph.node("Transpose", f"{INPUT}/nchw", [f"{INPUT}/float"], perm=[0, 3, 1, 2])
    for step in network.steps:
        graph.add(step)
    pixels = ["batch", network.size, network.size, 3]
    classes = len(network.steps[-1].arrays["bias"])
    inputs = {INPUT: (np.uint8, pixels)}
    graph.write(inputs, {network.output: (np.float32, ["batch", classes])}, facts, path)


def runner(path: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function uint8[b, s, s, 3] -> logits of a file; see `session`."""
    computes = session(path)
    return lambda images: computes.run(None, {INPUT: images})[0]


def session(path: str) -> Any:
    """A file to compute with, by `run(names of outputs, inputs by name)`.

    onnxruntime computes where it is installed; else the reference implementation of `onnx`.
    """
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(path)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


class Graph:
    """The nodes and the constants of a graph; inside it images are [b, c, h, w], as in ONNX."""

    def __init__(self, onnx: Any):
        self._onnx = onnx
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def write(
        self,
        inputs: Mapping[str, tuple[Any, Sequence[Any]]],
        outputs: Mapping[str, tuple[Any, Sequence[Any]]],
        facts: Mapping[str, str],
        path: str,
    ) -> None:
        """Writes the graph as a file.

        Args:
          inputs, outputs: by name (dtype, shape); a name in a shape is a side of any length.
          facts: the metadata of the file, as text.
          path: the new file.
        """
        helper = self._onnx.helper
        ends = [
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(np.dtype(x)), shape
                )
                for name, (x, shape) in side.items()
            ]
            for side in (inputs, outputs)
        ]
        model = helper.make_model(
            helper.make_graph(self._nodes, "network", *ends, self._constants),
            opset_imports=[helper.make_opsetid("", _OPSET)],
            ir_version=_IR_VERSION,
            producer_name="tpu_suite",
        )
        helper.set_model_props(model, dict(facts))
        self._onnx.checker.check_model(model, full_check=True)
        with open(path, "wb") as file:
            file.write(model.SerializeToString(deterministic=True))

    def add(self, step: Step) -> None:
        """Adds the nodes of one step, which reads pixels as `images/nchw`."""
        inputs = [f"{INPUT}/nchw" if name == INPUT else name for name in step.inputs]
        (top, bottom), (left, right) = step.padding
        places = {"strides": [step.stride] * 2, "pads": [top, left, bottom, right]}
        arrays, window = step.arrays, [step.window] * 2
        if step.kind == "conv":
            kernel = self.constant(f"{step.name}/kernel", arrays["kernel"].transpose(3, 2, 0, 1))
            bias = self.constant(f"{step.name}/bias", arrays["bias"])
            self.node("Conv", step.name, [*inputs, kernel, bias], **places)
        elif step.kind == "depthwise":
            kernel = arrays["kernel"].transpose(2, 0, 1)[:, None]
            inputs = [*inputs, self.constant(f"{step.name}/kernel", kernel)]
            self.node("Conv", step.name, inputs, group=len(kernel), **places)
        elif step.kind == "affine":
            scale, bias = (
                self.constant(f"{step.name}/{k}", arrays[k][:, None, None])
                for k in ("scale", "bias")
            )
            self.node("Mul", f"{step.name}/scaled", [*inputs, scale])
            self.node("Add", step.name, [f"{step.name}/scaled", bias])
        elif step.kind == "max_pool":
            self.node("MaxPool", step.name, inputs, kernel_shape=window, **places)
        elif step.kind == "mean_pool":
            self.node("AveragePool", step.name, inputs, kernel_shape=window, **places)
        elif step.kind == "global_mean":
            self.node("ReduceMean", step.name, inputs, axes=[2, 3], keepdims=0)
        elif step.kind == "dense":
            constants = [self.constant(f"{step.name}/{k}", arrays[k]) for k in ("kernel", "bias")]
            self.node("Gemm", step.name, [*inputs, *constants])
        elif step.kind == "gate":
            axes = self.constant(f"{step.name}/axes", np.array([2, 3], np.int64))
            self.node("Unsqueeze", f"{step.name}/weights", [inputs[1], axes])
            self.node("Mul", step.name, [inputs[0], f"{step.name}/weights"])
        else:
            self.node(_OPERATORS[step.kind], step.name, inputs)

    def node(self, operator: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Adds a node with one result, which has its name; returns the name."""
        return self.nodes(operator, [name], inputs, **attributes)[0]

    def nodes(
        self, operator: str, names: Sequence[str], inputs: Sequence[str], **attributes: Any
    ) -> Sequence[str]:
        """Adds a node with several results; returns their names."""
        self._nodes.append(
            self._onnx.helper.make_node(operator, inputs, names, names[0], **attributes)
        )
        return names

    def constant(self, name: str, array: Any) -> str:
        """Adds a constant, an array or a number of NumPy; returns its name."""
        array = np.asarray(array, order="C")
        self._constants.append(self._onnx.numpy_helper.from_array(array, name))
        return name
