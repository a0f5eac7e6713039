"""Small objects in large pictures: a detector looks at overlapping tiles and at the whole picture.

The tiles are those of SAHI (Akyon et al. 2022, arXiv:2202.06934): squares that overlap by a fifth,
the last of a row or column moved back to the border. Each part, a tile or the whole, is resized as
a picture of its own. `join` then leaves one detection of each object that several parts show.
predict.py and the evaluation cut and join with the same functions.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.detection import records
from benchmarks.detection.coco import Annotations
from benchmarks.uses import Boxes
from common import pools
from common.data.decoding import Batch, Reader, eval_slices, pad_batch
from common.errors import DataError
from common.progress import Progress
from common.tensorflow import tensorflow

_OVERLAP = 0.2  # of a tile and the next, as a share of its side
_ARRAYS = ("score", "class", "boxes", "masks")  # of detections, in the outputs of `predict`
_SHARED = 0.5  # of the smaller of two boxes: with so much in the better one, both are one object
_NEAR = 0.04  # of a tile: a box that ends so near to its border is cut


def cut(height: int, width: int, side: int) -> np.ndarray:
    """int[n, 4] (y, x, height, width): the parts of a picture, itself first and then its tiles.

    A picture that is not larger than a tile of `side` pixels is its only part; 0 cuts none.
    """
    whole = (0, 0, height, width)
    if not side or max(height, width) <= side:
        return np.array([whole])
    high, wide = min(side, height), min(side, width)
    corners = itertools.product(_starts(height, side), _starts(width, side))
    return np.array([whole, *((y, x, high, wide) for y, x in corners)])


def _starts(length: int, side: int) -> list[int]:
    """Where the tiles along an axis begin."""
    overlap = int(_OVERLAP * side)
    starts = range(0, max(length - overlap, 1), side - overlap)
    return [min(start, max(length - side, 0)) for start in starts]


def join(rows: Mapping[str, np.ndarray], windows: np.ndarray) -> dict[str, np.ndarray]:
    """The detections of a picture, from those of its parts; the best come first.

    Of two detections in parts that overlap, which share `_SHARED` of the smaller one's area, only
    the better one stays if they are of one class, or if the other one is smaller and cut: it ends
    at a border that its tile has inside the picture, so that it may be half an 8 that looks like a
    3. A detection that stays and is cut itself grows to hold those of its class that go, with their
    masks, as in SAHI's GREEDYNMM; but none that is larger by half of it beyond its other sides.
    Detections of one part are left to the detector's suppression.

    Args:
      rows: what `Detector.predict` returns, of n parts: score [n, D] (0 is no detection), class
        [n, D], boxes [n, D, 4] in pixels of the part, masks [n, D, s, s] if there are any.
      windows: int[n, 4], the parts, as `cut` has them.

    Returns:
      The same arrays [m, ...], with boxes in pixels of the picture.
    """
    part, place = np.nonzero(rows["score"] > 0)
    best = np.argsort(-rows["score"][part, place], kind="stable")
    part, place = part[best], place[best]
    found = {name: rows[name][part, place] for name in _ARRAYS if name in rows}
    begin, sides = windows[part, :2], windows[part, 2:]
    found["boxes"] = found["boxes"] + np.tile(begin, 2).astype(np.float32)
    boxes, classes = found["boxes"].astype(np.float64), found["class"]
    low, high = boxes[:, :2], boxes[:, 2:]
    areas = np.prod(np.maximum(high - low, 0), axis=1)
    margin, end = _NEAR * sides, begin + sides  # of each detection's part
    is_open = np.concatenate(  # for each side of a box, whether it is cut
        [(low < begin + margin) & (begin > 0), (high > end - margin) & (end < windows[0, 2:])], 1
    )
    is_cut = np.any(is_open, axis=1)
    starts, stops = windows[:, None, :2], windows[:, None, :2] + windows[:, None, 2:]
    meets = np.all((starts < stops[:, 0]) & (starts[:, 0] < stops), axis=2)
    np.fill_diagonal(meets, False)
    others = [np.flatnonzero(of_part[part]) for of_part in meets]  # in the parts that overlap one
    stays = np.ones(len(part), bool)
    for first in range(len(part)):
        if not stays[first]:
            continue
        left = others[part[first]]
        left = left[(left > first) & stays[left]]
        ends = np.minimum(high[first], high[left]) - np.maximum(low[first], low[left])
        shared = np.prod(np.maximum(ends, 0), axis=1)
        near = (shared >= _SHARED * np.minimum(areas[first], areas[left])) & (shared > 0)
        same = near & (classes[left] == classes[first])
        if is_cut[first]:
            beyond = np.concatenate([low[first] - low[left], high[left] - high[first]], 1)
            most = np.tile(high[first] - low[first], 2) / 2
            fits = np.all(is_open[first] | (beyond <= most), axis=1)
            if len(pieces := left[same & fits]):
                _grow(found, first, pieces)
        stays[left[same | (near & is_cut[left] & (areas[left] <= areas[first]))]] = False
    return {name: values[stays] for name, values in found.items()}


def _grow(found: Mapping[str, np.ndarray], first: int, others: np.ndarray) -> None:
    """Makes the box and the mask of a detection hold those of others."""
    rows = np.append(others, first)
    boxes = found["boxes"][rows].astype(np.float64)
    grown = np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])
    found["boxes"][first] = grown
    if "masks" in found:
        masks = [_resampled(*each, grown) for each in zip(found["masks"][rows], boxes, strict=True)]
        found["masks"][first] = np.max(masks, axis=0).round()


def _resampled(mask: np.ndarray, box: np.ndarray, onto: np.ndarray) -> np.ndarray:
    """float[s, s]: the mask [s, s] of `box` in the cells of `onto`; bilinear, 0 around it."""
    side = len(mask)
    cells, weights = np.arange(side), []
    for axis in (0, 1):
        centres = onto[axis] + (cells + 0.5) / side * (onto[axis + 2] - onto[axis])
        at = (centres - box[axis]) / (box[axis + 2] - box[axis]) * side - 0.5
        weights.append(np.maximum(1 - np.abs(at[:, None] - cells), 0))
    return weights[0] @ mask @ weights[1].T


class Parts:
    """The parts of all images to evaluate, which are numbered in the order of the annotations.

    In a batch to evaluate, "image_id" is the number of a part.
    """

    def __init__(self, annotations: Annotations, side: int):
        """Cuts the images into tiles of `side` pixels."""
        self.side, self.image_ids = side, annotations.image_ids
        cuts = [cut(height, width, side) for height, width in annotations.sizes.tolist()]
        self.windows = np.concatenate(cuts)
        self.counts = np.array([len(windows) for windows in cuts])  # of the parts of each image
        self.firsts = np.cumsum(self.counts) - self.counts

    def joined(self, outputs: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """`predict`'s row of each image [1, m, ...], from its outputs for all parts."""
        places = {
            number: (row, i) for row in outputs for i, number in enumerate(row["image_id"].tolist())
        }
        rows = []
        for image, (first, count) in enumerate(zip(self.firsts, self.counts, strict=True)):
            parts = [places[number] for number in range(first, first + count)]
            names = [name for name in _ARRAYS if name in parts[0][0]]
            stacked = {name: np.stack([row[name][i] for row, i in parts]) for name in names}
            found = join(stacked, self.windows[first : first + count])
            row = {name: values[None] for name, values in found.items()}
            rows.append(row | {"image_id": self.image_ids[image : image + 1]})
        return rows

    def batches(
        self, source: Any, uses: Boxes, kinds: int, batch_size: int, shard: int, num_shards: int
    ) -> Iterator[Batch]:
        """Every part once over all shards, as `Detector.eval_batches` yields images.

        `source` has the `shards` and the `image_ids` of the images. With two `kinds` of batches,
        upright parts come last. DataError names the record whose image cannot be used.
        """
        row_of = {image_id: row for row, image_id in enumerate(self.image_ids.tolist())}
        rows = np.array([row_of[image_id] for image_id in source.image_ids])
        counts = self.counts[rows]
        examples = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(examples)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = self.firsts[rows][examples] + within
        height, width = self.windows[numbers, 2:].T
        for kind in range(kinds):
            chosen = np.flatnonzero(((height > width) & (kinds > 1)) == kind)
            if len(chosen):
                slices = eval_slices(len(chosen), batch_size, shard, num_shards)
                # A host without parts reads one, too.
                end = max(slices[-1].stop, slices[0].start + 1)
                mine = chosen[slices[0].start : end]
                made = self._leaves(source.shards, uses, examples[mine], numbers[mine])
                yield from _batched(made, slices, batch_size // num_shards)

    def _leaves(
        self, shards: Any, uses: Boxes, examples: np.ndarray, numbers: np.ndarray
    ) -> Iterator[dict[str, np.ndarray]]:
        """The leaves of the parts `numbers` of the `examples`, which rise; all cores make them."""
        firsts = np.flatnonzero(np.diff(examples, prepend=-1))
        of_image = np.split(numbers, firsts[1:])
        shards = shards.only(np.isin(np.arange(shards.total), examples))

        def read(serialized: Any) -> dict[str, Any]:
            return records.read_image(serialized)._asdict()

        def parts(each: tuple[Batch, int, np.ndarray]) -> list[Callable[[], dict[str, Any]]]:
            record, example, wanted = each
            image = int(np.searchsorted(self.firsts, wanted[0], side="right")) - 1
            first = self.firsts[image]
            height, width = self.windows[first, 2:].tolist()
            try:
                made = uses.parts(record["encoded"][0], height, width, self.side)
            except DataError as error:
                where = shards.where(int(record["id"][0]))
                raise DataError(f"{where} cannot be used: {error}") from error
            return [functools.partial(numbered, made[n - first], example, n) for n in wanted]

        def numbered(make: Any, example: int, number: int) -> dict[str, Any]:
            return make() | {"id": np.int32(example), "image_id": np.int32(number)}

        # Other threads must not be the first to use an operation of TensorFlow.
        black = tensorflow().io.encode_jpeg(np.zeros((8, 8, 3), np.uint8))
        uses.inputs(black.numpy(), 8, 8)
        reader, ahead = Reader(shards, [read], lambda batch: None), pools.cores()
        progress = Progress(len(numbers))
        with pools.Threads(ahead) as pool:
            images = zip(reader.eval_batches(1, 0, 1), examples[firsts], of_image, strict=True)
            made = itertools.chain.from_iterable(pools.ordered(pool, parts, images, ahead))
            calls = pools.ordered(pool, lambda make: make(), made, 4 * ahead)
            for done, leaves in enumerate(calls, 1):
                progress.log(done, f"evaluating: {done:,} of {len(numbers):,} tiles and images")
                yield leaves


def _batched(
    leaves: Iterator[dict[str, np.ndarray]], slices: Sequence[range], rows: int
) -> Iterator[Batch]:
    """Batches of `rows` rows with `mask`, of the leaves of each slice."""
    some: list[dict[str, np.ndarray]] = []
    for part in slices:
        # Where a host has no more parts, the last ones again, all as padding.
        some = list(itertools.islice(leaves, len(part) or 1)) or some
        arrays = {name: np.stack([each[name] for each in some]) for name in some[0]}
        yield pad_batch(arrays, len(part), rows)
