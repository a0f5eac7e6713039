"""Writes a network for small devices: TensorFlow Lite, and ONNX in 8-bit integers."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from modes.export import onnx_graph
from modes.export.savedmodel import Compute
from ops.network import INPUT, Network
from ops.shards import tensorflow

_CALIBRATION_BATCH = 8


def write_tflite(network: Network, path: str) -> None:
    """Writes a model from one image uint8[1, s, s, 3] to logits float32[1, K]."""
    tf, size, compute = tensorflow(), network.size, Compute(network)
    images = tf.TensorSpec([1, size, size, 3], tf.uint8, INPUT)
    function = tf.function(compute, input_signature=[images]).get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], compute.module)
    with open(path, "wb") as file:
        file.write(converter.convert())


def tflite_runner(path: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function uint8[b, s, s, 3] -> logits of a TensorFlow Lite file, one image at a time."""
    with warnings.catch_warnings(action="ignore"):  # that the interpreter will move elsewhere
        interpreter = tensorflow().lite.Interpreter(path)
    interpreter.allocate_tensors()
    source = interpreter.get_input_details()[0]["index"]
    result = interpreter.get_output_details()[0]["index"]

    def run(images: np.ndarray) -> np.ndarray:
        rows = []
        for image in images:
            interpreter.set_tensor(source, image[np.newaxis])
            interpreter.invoke()
            rows.append(interpreter.get_tensor(result)[0])
        return np.stack(rows)

    return run


def write_int8(network: Network, pictures: np.ndarray, path: str) -> None:
    """Writes ONNX whose convolutions and dense layers compute with 8-bit integers.

    Args:
      network: the steps.
      pictures: uint8[n, s, s, 3], photos like those that the model will see.
      path: the new file.
    """
    from onnxruntime import quantization

    begins = range(0, len(pictures), _CALIBRATION_BATCH)
    batches = iter([{INPUT: pictures[i : i + _CALIBRATION_BATCH]} for i in begins])

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> Any:
            return next(batches, None)

    with tempfile.TemporaryDirectory() as folder:
        floats = os.path.join(folder, "float.onnx")
        onnx_graph.write(network, {}, floats)
        quantization.quantize_static(
            floats,
            path,
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            op_types_to_quantize=["Conv", "Gemm", "Add", "MaxPool"],
        )
