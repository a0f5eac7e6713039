"""Uses a trained detector: finds objects on photos, shows them, and exports the detector.

The exported `common.exportable.ExportableProgram` is a function of a photo.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.detection import exhibits, tiles, weights
from benchmarks.detection.detector import Detector
from benchmarks.uses import Boxes, Detection, Exhibit, Imported
from common.data import data_manifest
from common.errors import DataError, UserError
from common.exportable import Arrays, ExportableProgram
from common.images import photos, pixels
from common.images.input_spec import run_decoder
from common.tensorflow import tensorflow

_MARGIN = 1e-3  # how far rounding may move a score below the least one
_MEANING = {  # the meaning of a program's inputs and outputs
    "photo": "RGB, of any size; EXIF must be applied",
    "boxes": "y0, x0, y1, x1 in pixels of the photo",
    "class": "the line of labels.txt, counted from 1",
    "score": "from 0 to 1, the best first; 0 is no detection",
    "masks": "for each cell of the box the probability of the object, times 255",
}


class DetectorUses(Boxes):
    """The uses of a detector."""

    commands = {
        "find objects on photos": "python predict.py photo.jpg folder/ --workdir={workdir} "
        "--draw=drawn"
    }

    def __init__(self, benchmark: Detector):
        self._benchmark = benchmark

    def read_foreign(self, file: str) -> Imported:
        return weights.read_foreign(self._benchmark, file)

    def data_meaning(self) -> Mapping[str, Any]:
        keys = self._benchmark.keys
        content = data_manifest.load(keys.data_dir) if keys.data_dir else None
        if content is None or not content.category_ids:
            return {}
        categories = sorted(zip(content.category_ids, content.class_names, strict=True))
        return {"categories": self._benchmark.numbered(tuple(categories))}

    def listed(self, paths: Sequence[str]) -> tuple[str, dict[int, tuple[int, int, int]]]:
        try:
            if not self._benchmark.keys.data_dir:
                return "", {}
            annotations = self._benchmark.annotations
        except UserError:  # the folder has moved, or has other data by now
            return "", {}
        rows = {i: row for i, row in enumerate(annotations.listed(paths)) if row is not None}
        columns = np.column_stack([annotations.image_ids, annotations.sizes]).tolist()
        return annotations.path, {i: tuple(columns[row]) for i, row in rows.items()}

    def inputs(self, encoded: bytes, height: int, width: int) -> dict[str, Any]:
        return self.parts(encoded, height, width, 0)[0]()

    def parts(
        self, encoded: bytes, height: int, width: int, tile: int
    ) -> list[Callable[[], dict[str, Any]]]:
        decode, _, _ = self._graphs
        image = run_decoder(decode, pixels.decode, encoded).numpy()
        if image.shape[:2] != (height, width):
            found, wanted = (f"{h} x {w}" for h, w in (image.shape[:2], (height, width)))
            raise DataError(f"the image has {found} pixels (height x width), not {wanted}")
        windows = tiles.cut(height, width, tile).tolist()
        return [
            functools.partial(self._leaves, image[y : y + high, x : x + wide])
            for y, x, high, wide in windows
        ]

    @functools.cached_property
    def _graphs(self) -> tuple[Any, ...]:
        """Graphs that decode an image, and make the leaves of wide and of upright pixels."""
        tf = tensorflow()
        encoded, image = tf.TensorSpec([], tf.string), tf.TensorSpec([None, None, 3], tf.uint8)
        leaves = (functools.partial(self.leaves, upright=upright) for upright in (False, True))
        programs = zip((pixels.decode, *leaves), (encoded, image, image), strict=True)
        return tuple(
            tf.function(program, input_signature=[spec], autograph=False)
            for program, spec in programs
        )

    def _leaves(self, image: np.ndarray) -> dict[str, Any]:
        """The leaves of `predict` for pixels uint8[h, w, 3]."""
        height, width, _ = image.shape
        leaves = self._graphs[1 + (height > width)](image)
        return {name: x.numpy() for name, x in leaves.items()} | {"image_id": np.int32(0)}

    @property
    def tile_side(self) -> int:
        return self._benchmark.settings.images.side

    def join(
        self, rows: Sequence[Mapping[str, np.ndarray]], height: int, width: int, tile: int
    ) -> dict[str, np.ndarray]:
        stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return tiles.join(stacked, tiles.cut(height, width, tile))

    def leaves(self, image: Any, upright: bool) -> dict[str, Any]:
        """The leaves that `predict` takes, as TensorFlow's tensors, of an image uint8[h, w, 3]."""
        raise NotImplementedError

    def resized(self, photo: jax.Array, upright: bool) -> dict[str, jax.Array]:
        """The leaves that `predict` takes, computed by jax from a photo uint8[h, w, 3]."""
        raise NotImplementedError

    def programs(self, params: Any, model_state: Any) -> dict[str, ExportableProgram]:
        """The detector with resizing and suppression inside: a photo in, boxes in its pixels out.

        Where upright photos have another padded shape, the program "upright" is for them.
        """
        orientations = [False, True] if len(self._benchmark.image_shapes) > 1 else [False]
        model = jax.tree.map(jnp.asarray, (params, model_state))
        return {"upright" * upright: self._program(model, upright) for upright in orientations}

    def _program(self, model: tuple[Any, Any], upright: bool) -> ExportableProgram:
        benchmark = self._benchmark
        takes_all = len(benchmark.image_shapes) == 1

        def outputs(leaves: Mapping[str, Any]) -> Arrays:
            batch = {name: jnp.asarray(x)[None] for name, x in leaves.items()}
            row = benchmark.predict(*model, batch)
            return {name: row[name][0] for name in _MEANING if name in row}

        def compute(inputs: Arrays) -> Arrays:
            leaves = self.resized(inputs["photo"], upright)
            return outputs({**leaves, "image_id": jnp.zeros((), int)})

        def examples(pictures: Sequence[bytes]) -> Sequence[tuple[Arrays, Arrays]]:
            pairs, predicted = [], jax.jit(outputs)
            for picture in pictures:
                photo = photos.convert(picture, rotate=True, quality=95)  # as predict.py reads it
                if takes_all or (photo.height > photo.width) == upright:
                    leaves = self.inputs(photo.encoded, photo.height, photo.width)
                    inputs = {"photo": pixels.decode(photo.encoded).numpy()}
                    pairs.append((inputs, predicted(leaves)))
            return pairs

        shape = "" if takes_all else "upright " if upright else "wide "
        return ExportableProgram(
            task=f"finds objects in {shape}photos",
            compute=compute,
            inputs={"photo": ("height, width, 3", np.uint8)},
            meaning=_MEANING,
            examples=examples,
            distance=functools.partial(distance, min_score=benchmark.settings.detection.min_score),
        )

    def detections(self, row: Mapping[str, np.ndarray], height: int, width: int) -> list[Detection]:
        best = np.argsort(-row["score"], kind="stable")
        best = best[row["score"][best] > 0]  # a score that is nan is no object
        columns = (row[name][best].tolist() for name in ("class", "score", "boxes"))
        return [Detection(n, score, tuple(box)) for n, score, box in zip(*columns, strict=True)]

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """The classes, the worst and the first images; detections.json in COCO's form."""
        benchmark = self._benchmark
        columns = benchmark.scorer.columns(rows)
        quality = benchmark.scorer.quality(columns)
        return exhibits.show(benchmark.annotations, benchmark.source("eval"), columns, quality)


def distance(wanted: Arrays, found: Arrays, min_score: float) -> float:
    """The largest distance between a detection in one list and its match in the other.

    It is a difference in score, or in box as a share of the largest side; NaN if a number is NaN.
    Detections whose scores are equal but for rounding may be in another order; one at `min_score`,
    or at the end of a full list, may be missing.
    """
    off = [_off(*pair, min_score) for pair in ((wanted, found), (found, wanted))]
    return float(np.max(off))


def _off(wanted: Arrays, found: Arrays, min_score: float) -> float:
    """The largest distance from a detection in `wanted` to the nearest detection in `found`."""
    score, boxes, classes = (
        np.asarray(wanted[name])[:, None] for name in ("score", "boxes", "class")
    )
    off = np.abs(found["boxes"] - boxes).max(-1) / max(np.abs(boxes).max(), 1e-6)
    off = np.maximum(off, np.abs(found["score"] - score))
    off = np.where(found["class"] == classes, off, 1.0).min(1)
    least = max(min_score, score.min()) + _MARGIN
    return float(off[score[:, 0] > least].max(initial=0.0))


def scaled_photo(
    photo: jax.Array, shape: Sequence[int], size: Any, antialias: bool = False
) -> jax.Array:
    """uint8[*shape, 3] of uint8[h, w, 3]: bilinear, the values of `common.images.pixels`.

    `size` is the height and width to which the photo is scaled; beyond it the values have no
    meaning. `antialias` averages over the pixels, as `pixels.shrink` does; else `pixels.sample`.
    """
    x, sides = photo.astype(jnp.float32), photo_sides(photo)
    for axis in (0, 1) if antialias else (1, 0):  # the order of TensorFlow's kernels
        x = jnp.moveaxis(x, axis, 0)
        scale = _average if antialias else _interpolate
        x = jnp.moveaxis(scale(x, sides[axis], shape[axis], size[axis]), 0, axis)
    return (x + 0.5).astype(jnp.uint8)


def _interpolate(x: jax.Array, length: jax.Array, count: int, size: Any) -> jax.Array:
    """float32[count, ...] of x float32[length, ...]: between the two nearest rows."""
    positions = _product(jnp.arange(count) + 0.5, length / size) - 0.5
    before = jnp.floor(positions)
    first, last = _rows(x, before, length), _rows(x, jnp.ceil(positions), length)
    return first + _product(last - first, (positions - before)[:, None, None])


def _average(x: jax.Array, length: jax.Array, count: int, size: Any) -> jax.Array:
    """float32[count, ...] of x float32[length, ...]: means of rows, weighted by a triangle.

    Each side of the triangle has the length of a row at least.
    """
    step = 1 / (size / length)
    width, centres = jnp.maximum(step, 1), _product(jnp.arange(count) + 0.5, step)
    start = jnp.maximum(jnp.ceil(centres - width - 0.5), 0)
    end = jnp.minimum(jnp.floor(centres + width - 0.5), length - 1)

    def weights(i: Any) -> jax.Array:
        height = 1 - _product(jnp.abs(start + i + 0.5 - centres), 1 / width)
        return jnp.where(start + i <= end, jnp.maximum(height, 0), 0)

    def total(add: Callable[[Any], jax.Array], *sides: int) -> jax.Array:
        # One row after another, as TensorFlow adds.
        max_rows = 2 * jnp.ceil(width).astype(jnp.int32) + 1
        zeros = jnp.zeros((count, *sides))
        return jax.lax.fori_loop(0, max_rows, lambda i, before: before + add(i), zeros)

    shares = 1 / total(weights)

    def add(i: Any) -> jax.Array:
        return _product(_rows(x, start + i, length), (weights(i) * shares)[:, None, None])

    return total(add, *x.shape[1:])


def _product(x: jax.Array, y: Any) -> jax.Array:
    """x * y, rounded before something is added to it, as in TensorFlow's kernels.

    No value here reaches the bound, which keeps compilers from fusing product and sum: that
    changes ties of the last rounding.
    """
    return jnp.minimum(x * y, 65536.0)


def _rows(x: jax.Array, positions: jax.Array, length: jax.Array) -> jax.Array:
    """The rows of x at `positions` float32[n], which are integers; the border repeats."""
    return x[jnp.clip(positions, 0, length - 1).astype(jnp.int32)]


def photo_sides(photo: jax.Array) -> jax.Array:
    """float32[2], the height and width of a photo, even if they are only known at run time."""
    return jnp.stack([jnp.asarray(side, jnp.float32) for side in photo.shape[:2]])
