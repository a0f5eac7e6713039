"""Writes networks as ONNX, without jax: opset 17, which onnxruntime has read since 1.12.

A classifier takes pixels of one size. A detector of one stage takes a photo of any size and gives
boxes in its pixels: resizing and suppression are inside, the program's own rules in ONNX's
operations.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from common.errors import OutputError
from common.portable import INPUT, Arrays, Network, Program, SingleShot, Step
from engine import model_source

PATH, _PHOTO = "model.onnx", "photo"
DETECTOR_OUTPUTS = ("boxes", "class", "score")
DETECTOR_LIMIT = 1e-3  # a pixel may be rounded to the next of the 255 levels
DETECTOR_CODE = (
    "import numpy, onnxruntime",
    "from PIL import Image, ImageOps",
    f'session = onnxruntime.InferenceSession("{PATH}")',
    'photo = numpy.asarray(ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB"))',
    'boxes, classes, scores = session.run(["boxes", "class", "score"], {"photo": photo})',
)
_OPSET, _IR_VERSION = 17, 8
_OPERATORS = {"relu": "Relu", "sigmoid": "Sigmoid", "add": "Add"}
_END = np.iinfo(np.int64).max  # of a slice: all that remain


# Classifiers.


def write_classifier(network: Network, facts: Mapping[str, str], path: str) -> None:
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


def classifier_runner(path: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function uint8[b, s, s, 3] -> logits of a file; see `session`."""
    computes = session(path)
    return lambda images: computes.run(None, {INPUT: images})[0]


# The graph of any network.


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
        placement = {"strides": [step.stride] * 2, "pads": [top, left, bottom, right]}
        arrays, window = step.arrays, [step.window] * 2
        if step.kind == "conv":
            kernel = self.constant(f"{step.name}/kernel", arrays["kernel"].transpose(3, 2, 0, 1))
            bias = self.constant(f"{step.name}/bias", arrays["bias"])
            self.node("Conv", step.name, [*inputs, kernel, bias], **placement)
        elif step.kind == "depthwise":
            kernel = arrays["kernel"].transpose(2, 0, 1)[:, None]
            inputs = [*inputs, self.constant(f"{step.name}/kernel", kernel)]
            self.node("Conv", step.name, inputs, group=len(kernel), **placement)
        elif step.kind == "affine":
            scale, bias = (
                self.constant(f"{step.name}/{k}", arrays[k][:, None, None])
                for k in ("scale", "bias")
            )
            self.node("Mul", f"{step.name}/scaled", [*inputs, scale])
            self.node("Add", step.name, [f"{step.name}/scaled", bias])
        elif step.kind == "max_pool":
            self.node("MaxPool", step.name, inputs, kernel_shape=window, **placement)
        elif step.kind == "mean_pool":
            self.node("AveragePool", step.name, inputs, kernel_shape=window, **placement)
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


# Detectors.


def write_detector(model: SingleShot, facts: Mapping[str, str], path: str) -> None:
    """Writes a model from `photo` uint8[height, width, 3] to D detections, the best first.

    The outputs are `boxes` float32[D, 4], `class` int32[D] and `score` float32[D].

    Args:
      model: the detector.
      facts: the metadata of the file, as text.
      path: the new file.
    """
    import onnx  # an optional package; --format is checked for it

    drawing = _Drawing(onnx, model)
    drawing.resize()
    for step in model.network.steps:
        drawing.graph.add(step)
    count = drawing.suppress(drawing.boxes(drawing.rows()))
    photo = {_PHOTO: (np.uint8, ["height", "width", 3])}
    outputs = {
        "boxes": (np.float32, [count, 4]),
        "class": (np.int32, [count]),
        "score": (np.float32, [count]),
    }
    drawing.graph.write(photo, outputs, facts, path)


def detector_runner(path: str) -> Callable[[Arrays], Arrays]:
    """Loads the function that a file holds, see `session`."""
    computes = session(path)
    return lambda inputs: dict(
        zip(DETECTOR_OUTPUTS, computes.run(DETECTOR_OUTPUTS, dict(inputs)), strict=True)
    )


def export_detector(
    model: model_source.Model, program: Program, examples: Sequence[Arrays], folder: str
) -> dict[str, Any]:
    """Writes a detector into a folder and checks it against its program in float32.

    Args:
      model: the checkpoint.
      program: of it.
      examples: inputs of the program.
      folder: local.

    Returns:
      The facts about the file.

    Raises:
      OutputError: what was written computes something else.
    """
    plain = model.benchmark.uses.single_shot(model.params, model.model_state)
    assert plain is not None  # `programs.choose` has asked for it
    names = [name for _, name in model.manifest.get("categories", ())]
    write_detector(plain, {"class_names": json.dumps(names)}, f"{folder}/{PATH}")
    run, compute = detector_runner(f"{folder}/{PATH}"), jax.jit(program.compute)
    error = max(detection_difference(compute(x), run(x), plain.min_score) for x in examples)
    if not error <= DETECTOR_LIMIT:
        raise OutputError(
            f"--format=onnx: what was written is off by {error:.1e} of the largest value of an "
            f"output, more than {DETECTOR_LIMIT:.0e}; nothing is exported"
        )
    size = os.path.getsize(f"{folder}/{PATH}") / 1e6
    print(f"onnx: {PATH}, {size:.1f} MB, off by {error:.1e} of the largest value")
    return {"path": PATH, "error": error}


def detection_difference(wanted: Arrays, found: Arrays, min_score: float) -> float:
    """How far a detection is off its match at most, in score or as a share of the largest side.

    Detections whose scores are equal but for rounding may be in another order; one at the limit of
    the scores may be missing.
    """
    score, boxes, classes = (
        np.asarray(wanted[name])[:, None] for name in ("score", "boxes", "class")
    )
    distance = np.abs(found["boxes"] - boxes).max(-1) / max(np.abs(boxes).max(), 1e-6)
    distance = np.maximum(distance, np.abs(found["score"] - score))
    distance = np.where(found["class"] == classes, distance, 1.0).min(1)
    return float(distance[score[:, 0] > min_score + DETECTOR_LIMIT].max(initial=0.0))


class _Drawing:
    """Draws the parts of one detector. The result of a node has its name."""

    def __init__(self, onnx: Any, model: SingleShot):
        self.graph, self._model = Graph(onnx), model
        self._types = onnx.TensorProto

    def resize(self) -> None:
        """The pixels that the network reads, see `benchmarks.detection.use.scaled_photo`."""
        node = self.graph.node
        node("Shape", "photo/shape", [_PHOTO])
        node("Cast", "photo/lengths", ["photo/shape"], to=self._types.FLOAT)
        node("Cast", "photo/float", [_PHOTO], to=self._types.FLOAT)
        node("Transpose", "photo/chw", ["photo/float"], perm=[2, 0, 1])
        self._number("zero", 0)
        self._number("half", 0.5)
        self._number("one", 1)
        self._number("size", self._model.network.size)
        node("MatMul", "resized/rows", [self._weights("rows", 0), "photo/chw"])
        node("Transpose", "columns/turned", [self._weights("columns", 1)], perm=[1, 0])
        node("MatMul", "resized", ["resized/rows", "columns/turned"])
        node("Add", "resized/half", ["resized", "half"])
        node("Floor", "resized/rounded", ["resized/half"])
        node("Unsqueeze", f"{INPUT}/nchw", ["resized/rounded", self._integers("resized/axis", 0)])

    def _weights(self, name: str, axis: int) -> str:
        """float32[s, length]: what each pixel of the photo adds to each of the resized image."""
        node, size = self.graph.node, self._model.network.size
        index = self.graph.constant(f"{name}/axis", np.int64(axis))
        node("Gather", f"{name}/length", ["photo/lengths", index], axis=0)
        node("Div", f"{name}/scale", ["size", f"{name}/length"])
        node("Div", f"{name}/step", ["one", f"{name}/scale"])
        middles = np.arange(size, dtype=np.float32)[:, None] + np.float32(0.5)
        middles_name = self.graph.constant(f"{name}/middles", middles)
        node("Mul", f"{name}/places", [middles_name, f"{name}/step"])
        node("Sub", f"{name}/samples", [f"{name}/places", "half"])
        node("Range", f"{name}/pixels", ["zero", f"{name}/length", "one"])
        node("Sub", f"{name}/offsets", [f"{name}/samples", f"{name}/pixels"])
        distance = node("Abs", f"{name}/distance", [f"{name}/offsets"])
        if self._model.antialias:
            node("Max", f"{name}/width", [f"{name}/step", "one"])
            distance = node("Div", f"{name}/share", [distance, f"{name}/width"])
        node("Sub", f"{name}/slope", ["one", distance])
        node("Relu", f"{name}/triangle", [f"{name}/slope"])
        axes = self._integers(f"{name}/axes", 1)
        node("ReduceSum", f"{name}/sum", [f"{name}/triangle", axes], keepdims=1)
        return node("Div", f"{name}/weights", [f"{name}/triangle", f"{name}/sum"])

    def rows(self) -> str:
        """float32[N, 4 + L]: the offsets and the logits of each default box."""
        maps, shape = [], self._integers("maps/shape", -1, 4 + self._model.logits)
        for name in self._model.maps:
            self.graph.node("Transpose", f"{name}/last", [name], perm=[0, 2, 3, 1])
            maps.append(self.graph.node("Reshape", f"{name}/rows", [f"{name}/last", shape]))
        return self.graph.node("Concat", "maps", maps, axis=0)

    def boxes(self, rows: str) -> tuple[str, str]:
        """Boxes float32[N, 4] and scores float32[C, N], without the logit of no object."""
        node, constant, model = self.graph.node, self.graph.constant, self._model
        node("Softmax", "probabilities", [self._columns("logits", rows, 4, _END)], axis=-1)
        objects = self._columns("objects", "probabilities", 1, _END)
        scores = node("Transpose", "scores", [objects], perm=[1, 0])
        weights = constant("weights", np.array(model.weights, np.float32))
        node("Div", "offsets", [self._columns("codes", rows, 0, 4), weights])
        sides = constant("default/sides", model.sides)
        node("Mul", "moves", [self._columns("shares", "offsets", 0, 2), sides])
        node("Add", "centres", [constant("default/centres", model.centres), "moves"])
        largest = self._number("largest_log", model.largest_log)
        node("Min", "logarithms", [self._columns("logs", "offsets", 2, 4), largest])
        node("Exp", "growth", ["logarithms"])
        node("Mul", "halves", [constant("default/halves", model.sides / 2), "growth"])
        node("Sub", "firsts", ["centres", "halves"])
        node("Add", "lasts", ["centres", "halves"])
        boxes = node("Concat", "corners", ["firsts", "lasts"], axis=1)
        if model.clips:
            boxes = node("Clip", "clipped", [boxes, "zero", "one"])
        return boxes, scores

    def suppress(self, every: tuple[str, str]) -> int:
        """The outputs, see `benchmarks.detection.boxes.best_detections`; returns their number."""
        node, constant, model = self.graph.node, self.graph.constant, self._model
        boxes, scores = every
        classes, count = model.logits - 1, len(model.centres)
        of_class = min(model.most, count)
        most = min(model.most, classes * of_class)
        number = self._integers("of_class", of_class)
        self.graph.nodes("TopK", ["top", "top/boxes"], [scores, number], axis=1)
        node("Gather", "top/all", [boxes, "top/boxes"], axis=0)
        node("Greater", "is_scored", ["top", self._number("min_score", model.min_score)])
        node("Unsqueeze", "is_scored/boxes", ["is_scored", self._integers("is_scored/axis", 2)])
        node("Where", "candidates", ["is_scored/boxes", "top/all", "zero"])
        # A box without area has the score 0, which takes no part.
        first = self._columns("candidates/first", "candidates", 0, 2, axis=2)
        last = self._columns("candidates/last", "candidates", 2, 4, axis=2)
        node("Sub", "candidates/sides", [last, first])
        node("ReduceMin", "candidates/side", ["candidates/sides"], axes=[2], keepdims=0)
        node("Greater", "has_area", ["candidates/side", "zero"])
        node("Where", "weighed", ["has_area", "top", "zero"])
        node("Unsqueeze", "weighed/classes", ["weighed", self._integers("weighed/axis", 1)])
        # ONNX drops a box whose overlap is larger than the limit, we one with the limit itself.
        limit = constant("iou", np.array([np.nextafter(np.float32(model.iou), np.float32(0))]))
        rules = [number, limit, constant("no_score", np.zeros(1, np.float32))]
        node("NonMaxSuppression", "chosen", ["candidates", "weighed/classes", *rules])
        node("Gather", "chosen/places", ["chosen", self._integers("chosen/columns", 0, 2)], axis=1)
        node("GatherND", "chosen/scores", ["weighed", "chosen/places"])
        nothing = constant("nothing", np.zeros((classes, of_class), np.float32))
        node("ScatterND", "kept", [nothing, "chosen/places", "chosen/scores"])
        node("Reshape", "kept/flat", ["kept", self._integers("flat", -1)])
        best = ["kept/flat", self._integers("most", most)]
        self.graph.nodes("TopK", ["score", "places"], best, axis=0)
        self._outputs(of_class)
        return most

    def _outputs(self, of_class: int) -> None:
        """`boxes` and `class` of the detections at `places`, of all classes' candidates."""
        node = self.graph.node
        node("Div", "class/index", ["places", self._integers("class/size", of_class)])
        node("Add", "class/number", ["class/index", self._integers("class/first", 1)])
        node("Cast", "class", ["class/number"], to=self._types.INT32)
        node("Reshape", "candidates/flat", ["candidates", self._integers("boxes/shape", -1, 4)])
        node("Gather", "boxes/shares", ["candidates/flat", "places"], axis=0)
        corners = self._integers("photo/corners", 0, 1, 0, 1)
        node("Gather", "photo/pixels", ["photo/lengths", corners], axis=0)
        node("Mul", "boxes", ["boxes/shares", "photo/pixels"])

    def _columns(self, name: str, x: str, first: int, end: int, axis: int = 1) -> str:
        """A slice of x."""
        ends = [self._integers(f"{name}/{k}", v) for k, v in (("from", first), ("to", end))]
        return self.graph.node("Slice", name, [x, *ends, self._integers(f"{name}/axis", axis)])

    def _number(self, name: str, value: float) -> str:
        return self.graph.constant(name, np.float32(value))

    def _integers(self, name: str, *values: int) -> str:
        return self.graph.constant(name, np.array(values, np.int64))
