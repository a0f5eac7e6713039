"""Small objects in large pictures: a detector looks at overlapping tiles and at the whole picture.

The tiles are those of SAHI (Akyon et al. 2022, arXiv:2202.06934): squares that overlap by a fifth,
the last of a row or column moved back to the border. Each part, a tile or the whole, is resized as
a picture of its own. `join` then suppresses detections of one class that different parts share.
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

    A detection goes if a better one of its class, of another part, shares `_SHARED` of the smaller
    one's area. An object that a tile cuts gives a box inside the complete one, so the IoU may be
    small. Detections of one part stay, as the detector has suppressed among them.

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
    found["boxes"] = found["boxes"] + np.tile(windows[part, :2], 2).astype(np.float32)
    corners, kept = found["boxes"].astype(np.float64), np.ones(len(part), bool)
    areas = np.prod(np.maximum(corners[:, 2:] - corners[:, :2], 0), axis=1)
    for number in np.unique(found["class"]):
        left = np.flatnonzero(found["class"] == number)
        while len(left) > 1:
            first, left = left[0], left[1:]
            low = np.maximum(corners[first, :2], corners[left, :2])
            high = np.minimum(corners[first, 2:], corners[left, 2:])
            shared = np.prod(np.maximum(high - low, 0), axis=1)
            smaller = np.minimum(areas[first], areas[left])
            same = (shared >= _SHARED * smaller) & (shared > 0) & (part[left] != part[first])
            kept[left[same]] = False
            left = left[~same]
    return {name: values[kept] for name, values in found.items()}


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
