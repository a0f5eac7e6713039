"""Uses a trained SSD: as any detector, and as an ONNX graph.

The graph takes a photo of any size and gives boxes in its pixels: it contains resizing and
suppression, with the program's rules in ONNX's operations.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.detection import boxes
from benchmarks.detection.ssd import models
from benchmarks.detection.ssd.models import PADDING
from benchmarks.detection.ssd.settings import Settings
from benchmarks.detection.use import DetectorUses, photo_sides, scaled_photo
from common.exportable import ExportableProgram
from common.images.input_spec import IMAGENET
from common.onnx_graph import PIXELS, Ends, Graph, Resnet
from common.tensorflow import tensorflow
from common.trees import by_name
from models import EPSILON

_PHOTO = "photo"
_END = np.iinfo(np.int64).max  # the end of a slice: takes all elements


class SsdUses(DetectorUses):
    """The uses of an SSD."""

    def leaves(self, image: Any, upright: bool) -> dict[str, Any]:
        del upright
        tf, keys = tensorflow(), self._benchmark.settings.images
        return {"image": keys.resize(image), "size": tf.cast(tf.shape(image)[:2], tf.float32)}

    def resized(self, photo: jax.Array, upright: bool) -> dict[str, jax.Array]:
        del upright
        keys, size = self._benchmark.settings.images, photo_sides(photo)
        shape = (keys.image_size, keys.image_size)
        image = scaled_photo(photo, shape, shape, keys.antialias)
        return {"image": image, "size": size}

    def programs(self, params: Any, model_state: Any) -> dict[str, ExportableProgram]:
        (program,) = super().programs(params, model_state).values()
        settings, statistics = self._benchmark.settings, model_state["batch_stats"]["backbone"]
        draw = functools.partial(draw_detector, settings, params, statistics)
        return {"": dataclasses.replace(program, draw=draw)}


def draw_detector(
    settings: Settings, params: Any, statistics: Any, graph: Graph
) -> tuple[Ends, Ends]:
    """Adds an SSD to a graph, from `photo` uint8[height, width, 3] to D detections, best first.

    The outputs are `boxes` float32[D, 4], `class` int32[D] and `score` float32[D]. `params` and
    `statistics`, of the backbone's BatchNorms, are NumPy arrays.
    """
    drawing = _Drawing(graph, settings)
    drawing.resize()
    maps = drawing.maps(params, statistics)
    classes = len(params["head1"]["bias"]) // settings.maps.default_boxes.boxes_per_cell[0] - 4
    count = drawing.suppress(*drawing.boxes(drawing.rows(maps, classes)), classes - 1)
    outputs = {"boxes": (np.float32, [count, 4]), "class": (np.int32, [count])}
    photo = {_PHOTO: (np.uint8, ["height", "width", 3])}
    return photo, {**outputs, "score": (np.float32, [count])}


class _Drawing:
    """Draws the parts of one SSD. The result of a node has its name."""

    def __init__(self, graph: Graph, settings: Settings):
        self._graph, self._settings = graph, settings
        self._keys, self._size = settings.detection, settings.images.image_size

    def resize(self) -> None:
        """Scales the photo to the pixels that the network reads, as `scaled_photo` does."""
        graph, node = self._graph, self._graph.node
        node("Shape", "photo/shape", [_PHOTO])
        node("Cast", "photo/lengths", ["photo/shape"], to=graph.types.FLOAT)
        node("Cast", "photo/float", [_PHOTO], to=graph.types.FLOAT)
        node("Transpose", "photo/chw", ["photo/float"], perm=[2, 0, 1])
        for name, value in (("zero", 0), ("half", 0.5), ("one", 1), ("size", self._size)):
            graph.constant(name, value)
        if self._settings.images.antialias:
            node("MatMul", "resized/rows", [self._weights("rows", 0), "photo/chw"])
            node("Transpose", "columns/turned", [self._weights("columns", 1)], perm=[1, 0])
            resized = node("MatMul", "resized", ["resized/rows", "columns/turned"])
        else:
            resized = self._between("rows", self._between("columns", "photo/chw", 1), 0)
        node("Add", "resized/half", [resized, "half"])
        node("Floor", "resized/rounded", ["resized/half"])
        node("Unsqueeze", PIXELS, ["resized/rounded", graph.integers("resized/axis", 0)])

    def _positions(self, name: str, axis: int, *shape: int) -> str:
        """The positions in the photo of the resized pixels' centres, float32[shape]."""
        graph, node = self._graph, self._graph.node
        index = graph.constant(f"{name}/axis", axis, np.int64)
        length = node("Gather", f"{name}/length", ["photo/lengths", index], axis=0)
        if self._settings.images.antialias:
            node("Div", f"{name}/scale", ["size", length])
            step = node("Div", f"{name}/step", ["one", f"{name}/scale"])
        else:
            step = node("Div", f"{name}/step", [length, "size"])
        middles = graph.constant(f"{name}/middles", np.arange(self._size).reshape(shape) + 0.5)
        node("Mul", f"{name}/places", [middles, step])
        return node("Sub", f"{name}/samples", [f"{name}/places", "half"])

    def _between(self, name: str, x: str, axis: int) -> str:
        """float32[3, height, width] of another size along an axis, between two neighbours."""
        graph, node = self._graph, self._graph.node
        positions = self._positions(name, axis, -1)
        first = node("Floor", f"{name}/floor", [positions])
        share = node("Sub", f"{name}/share", [positions, first])
        if axis == 0:
            share = node("Unsqueeze", f"{name}/shares", [share, graph.integers(f"{name}/axes", 1)])
        first = node("Max", f"{name}/first", [first, "zero"])
        node("Sub", f"{name}/end", [f"{name}/length", "one"])
        last = node(
            "Min", f"{name}/last", [node("Ceil", f"{name}/ceil", [positions]), f"{name}/end"]
        )
        sides = []
        for index in (first, last):
            integers = node("Cast", f"{index}/index", [index], to=graph.types.INT64)
            sides.append(node("Gather", f"{index}/values", [x, integers], axis=axis + 1))
        node("Sub", f"{name}/difference", sides[::-1])
        node("Mul", f"{name}/moves", [f"{name}/difference", share])
        return node("Add", f"{name}/resized", [sides[0], f"{name}/moves"])

    def _weights(self, name: str, axis: int) -> str:
        """float32[s, length]: the weight of each pixel of the photo in each resized pixel."""
        node, samples = self._graph.node, self._positions(name, axis, -1, 1)
        node("Range", f"{name}/pixels", ["zero", f"{name}/length", "one"])
        node("Sub", f"{name}/offsets", [samples, f"{name}/pixels"])
        distance = node("Abs", f"{name}/distance", [f"{name}/offsets"])
        node("Max", f"{name}/width", [f"{name}/step", "one"])
        node("Div", f"{name}/share", [distance, f"{name}/width"])
        node("Sub", f"{name}/slope", ["one", f"{name}/share"])
        node("Relu", f"{name}/triangle", [f"{name}/slope"])
        axes = self._graph.integers(f"{name}/axes", 1)
        node("ReduceSum", f"{name}/sum", [f"{name}/triangle", axes], keepdims=1)
        return node("Div", f"{name}/weights", [f"{name}/triangle", f"{name}/sum"])

    def maps(self, params: Any, statistics: Any) -> list[str]:
        """Adds the network; returns its heads."""
        graph, settings = self._graph, self._settings
        arrays = by_name(params["backbone"]), by_name(statistics)
        layers = Resnet(graph, self._size, *arrays, EPSILON)
        pool, is_strided = settings.backbone.pool_padding, "stage2_block1".__eq__
        x = layers.backbone(IMAGENET, pool, is_strided)

        def conv(name: str, x: str, stride: int, edge: int) -> str:
            kernel, bias = (params[name][key] for key in ("kernel", "bias"))
            return graph.conv(name, x, kernel, bias, stride, ((edge, edge), (edge, edge)))

        maps = [x]
        for i, extra in enumerate(settings.maps.extras, 1):
            x = graph.relu(conv(f"extra{i}_conv1", x, 1, 0))
            x = graph.relu(conv(f"extra{i}_conv2", x, extra.stride, extra.padding))
            maps.append(x)
        return [conv(f"head{i}", x, 1, PADDING[0][0]) for i, x in enumerate(maps, 1)]

    def rows(self, maps: Sequence[str], classes: int) -> str:
        """float32[N, 4 + C]: the offsets and the logits of each default box."""
        node, rows = self._graph.node, []
        shape = self._graph.integers("maps/shape", -1, 4 + classes)
        for name in maps:
            node("Transpose", f"{name}/last", [name], perm=[0, 2, 3, 1])
            rows.append(node("Reshape", f"{name}/rows", [f"{name}/last", shape]))
        return node("Concat", "maps", rows, axis=0)

    def boxes(self, rows: str) -> tuple[str, str]:
        """Boxes float32[N, 4] and scores float32[C - 1, N], without the background."""
        node, constant = self._graph.node, self._graph.constant
        corners = models.box_corners(self._settings.maps.default_boxes.boxes())
        y, x, height, width = map(np.asarray, boxes.centred(corners.astype(np.float32)))
        sizes = np.stack([height, width], -1)
        node("Softmax", "probabilities", [self._columns("logits", rows, 4, _END)], axis=-1)
        objects = self._columns("objects", "probabilities", 1, _END)
        scores = node("Transpose", "scores", [objects], perm=[1, 0])
        weights = constant("weights", boxes.CODER_WEIGHTS)
        node("Div", "offsets", [self._columns("deltas", rows, 0, 4), weights])
        sides = constant("default/sides", sizes)
        node("Mul", "moves", [self._columns("shares", "offsets", 0, 2), sides])
        node("Add", "centres", [constant("default/centres", np.stack([y, x], -1)), "moves"])
        largest = constant("largest_log", boxes.LARGEST_LOG)
        node("Min", "logarithms", [self._columns("logs", "offsets", 2, 4), largest])
        node("Exp", "growth", ["logarithms"])
        node("Mul", "halves", [constant("default/halves", sizes / 2), "growth"])
        node("Sub", "firsts", ["centres", "halves"])
        node("Add", "lasts", ["centres", "halves"])
        corners = node("Concat", "corners", ["firsts", "lasts"], axis=1)
        if self._keys.clip_boxes:
            corners = node("Clip", "clipped", [corners, "zero", "one"])
        return corners, scores

    def suppress(self, boxes: str, scores: str, classes: int) -> int:
        """The best detections after suppression within each class; returns their number."""
        graph, node, constant = self._graph, self._graph.node, self._graph.constant
        keys, default_boxes = self._keys, self._settings.maps.default_boxes
        of_class = min(keys.max_detections, len(default_boxes.boxes()))
        most = min(keys.max_detections, classes * of_class)
        number = graph.integers("of_class", of_class)
        graph.nodes("TopK", ["top", "top/boxes"], [scores, number], axis=1)
        node("Gather", "top/all", [boxes, "top/boxes"], axis=0)
        node("Greater", "is_scored", ["top", constant("min_score", keys.min_score)])
        node("Unsqueeze", "is_scored/boxes", ["is_scored", graph.integers("is_scored/axis", 2)])
        node("Where", "candidates", ["is_scored/boxes", "top/all", "zero"])
        # A box without area has the score 0, which takes no part.
        first = self._columns("candidates/first", "candidates", 0, 2, axis=2)
        last = self._columns("candidates/last", "candidates", 2, 4, axis=2)
        node("Sub", "candidates/sides", [last, first])
        node("ReduceMin", "candidates/side", ["candidates/sides"], axes=[2], keepdims=0)
        node("Greater", "has_area", ["candidates/side", "zero"])
        node("Where", "weighed", ["has_area", "top", "zero"])
        node("Unsqueeze", "weighed/classes", ["weighed", graph.integers("weighed/axis", 1)])
        # ONNX drops boxes whose overlap is above the limit; here the limit itself drops them too.
        limit = constant("iou", [np.nextafter(np.float32(keys.nms_iou), np.float32(0))])
        rules = [number, limit, constant("no_score", np.zeros(1))]
        node("NonMaxSuppression", "chosen", ["candidates", "weighed/classes", *rules])
        node("Gather", "chosen/places", ["chosen", graph.integers("chosen/columns", 0, 2)], axis=1)
        node("GatherND", "chosen/scores", ["weighed", "chosen/places"])
        nothing = constant("nothing", np.zeros((classes, of_class)))
        node("ScatterND", "kept", [nothing, "chosen/places", "chosen/scores"])
        node("Reshape", "kept/flat", ["kept", graph.integers("flat", -1)])
        best = ["kept/flat", graph.integers("most", most)]
        graph.nodes("TopK", ["score", "places"], best, axis=0)
        # The boxes and classes of the best detections.
        node("Div", "class/index", ["places", graph.integers("class/size", of_class)])
        node("Add", "class/number", ["class/index", graph.integers("class/first", 1)])
        node("Cast", "class", ["class/number"], to=graph.types.INT32)
        node("Reshape", "candidates/flat", ["candidates", graph.integers("boxes/shape", -1, 4)])
        node("Gather", "boxes/shares", ["candidates/flat", "places"], axis=0)
        corners = graph.integers("photo/corners", 0, 1, 0, 1)
        node("Gather", "photo/pixels", ["photo/lengths", corners], axis=0)
        node("Mul", "boxes", ["boxes/shares", "photo/pixels"])
        return most

    def _columns(self, name: str, x: str, first: int, end: int, axis: int = 1) -> str:
        """A slice of x."""
        graph = self._graph
        ends = [graph.integers(f"{name}/{k}", v) for k, v in (("from", first), ("to", end))]
        return graph.node("Slice", name, [x, *ends, graph.integers(f"{name}/axis", axis)])
