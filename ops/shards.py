"""TFRecord shards, and a training order of their examples that is made from integers alone.

The order of training examples is a function of (seed, position) and of the four numbers of
`Order`; no iterator state is ever saved. A run stopped at any step continues with exactly the
examples it would have seen, on any number of hosts that divides the number of streams:

* The global batch is made of S streams of m = batch_size / S rows each, stream-major. A host
  reads a contiguous range of streams.
* In epoch e the shards are put in an order drawn from (seed, e). Stream s takes positions
  [s*N/S, (s+1)*N/S) of that sequence, so that every example occurs once per epoch.
* A stream is cut into blocks of `block` examples; within a block the order is drawn from
  (seed, e, example). Only one block is read again when a run resumes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from errors import DataError, one_line

_READ_BUFFER = 4 << 20  # bytes per open file; hides the latency of object stores


@functools.cache
def tensorflow() -> Any:
    """Imports TensorFlow, which only reads data here, and keeps it off every accelerator."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise DataError(
            f"reading records needs TensorFlow ({error}): pip install -r requirements.txt"
        ) from error
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf


def hash64(*words: Any) -> np.ndarray:
    """Mixes integers or integer arrays (broadcast) into uint64: splitmix64's finaliser, chained.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. Written
    out because the order of a run must not change with a library's version.
    """
    mixed = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            z = (mixed ^ np.asarray(word).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = z ^ (z >> np.uint64(31))
    return mixed


@dataclasses.dataclass(frozen=True)
class Shards:
    """TFRecord files and the number of examples in each; examples are numbered in file order."""

    paths: tuple[str, ...]
    counts: tuple[int, ...]

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """int64[files + 1]: the number of the first example of each file, then the total."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    @property
    def total(self) -> int:
        """Examples in all files."""
        return int(self.starts[-1])

    def place(self, example: int) -> tuple[str, int]:
        """(path, record in that file counted from 0) of an example."""
        file = int(np.searchsorted(self.starts, example, side="right")) - 1
        return self.paths[file], int(example - self.starts[file])

    def segments(self, order: np.ndarray, begin: int, end: int) -> np.ndarray:
        """int64[n, 3] rows (file, skip, take) for positions [begin, end) of files in `order`."""
        ends = np.cumsum(np.asarray(self.counts, np.int64)[order])
        rows, position = [], begin
        for i in range(int(np.searchsorted(ends, begin, side="right")), len(order)):
            if position >= end:
                break
            skip = position - (int(ends[i - 1]) if i else 0)
            take = min(int(ends[i]), end) - position
            if take:  # an empty file has no segment
                rows.append((int(order[i]), skip, take))
            position += take
        return np.asarray(rows, np.int64).reshape(-1, 3)

    def ids(self, segments: np.ndarray) -> np.ndarray:
        """int64[k]: the examples that segments hold, in reading order."""
        runs = [np.arange(take) + self.starts[file] + skip for file, skip, take in segments]
        return np.concatenate([np.zeros(0, np.int64), *runs])


@dataclasses.dataclass(frozen=True)
class Order:
    """The training order of `shards` (see the module's docstring), `rows` per stream and step."""

    shards: Shards
    seed: int
    streams: int
    rows: int
    block: int
    fixed: bool = False  # whether a stream has the same examples in every epoch

    @classmethod
    def make(
        cls, shards: Shards, seed: int, batch_size: int, max_streams: int, buffer_size: int | None
    ) -> Order:
        """Cuts `batch_size` into as many streams as divide both it and `max_streams`.

        Args:
          shards: the training examples.
          seed: draws the order.
          batch_size: the global batch.
          max_streams: a multiple of every number of hosts that will ever share the run.
          buffer_size: examples that all streams together hold for shuffling. None: each stream
            holds all of its examples, which are then the same in every epoch.
        """
        common = math.gcd(batch_size, max_streams)
        most = min(common, shards.total)  # every stream holds an example
        streams = max(n for n in range(1, most + 1) if common % n == 0)
        fixed = buffer_size is None
        block = -(-shards.total // streams) if buffer_size is None else buffer_size // streams
        return cls(shards, seed, streams, batch_size // streams, max(1, block), fixed)

    def bounds(self, stream: int) -> tuple[int, int]:
        """The positions of an epoch that a stream takes."""
        total = self.shards.total
        return stream * total // self.streams, (stream + 1) * total // self.streams

    def files(self, epoch: int) -> np.ndarray:
        """The order of the files in an epoch."""
        number, epoch = np.arange(len(self.shards.paths)), 0 if self.fixed else epoch
        return np.argsort(hash64(self.seed, 1, epoch, number), kind="stable")

    def epochs(self, stream: int, position: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Endless (epoch, offset, segments) from the block that holds a stream's `position`.

        `offset` is where in the stream's epoch the segments begin: the start of a block.
        """
        begin, end = self.bounds(stream)
        epoch, offset = divmod(position, end - begin)
        offset -= offset % self.block
        while True:
            yield epoch, offset, self.shards.segments(self.files(epoch), begin + offset, end)
            epoch, offset = epoch + 1, 0

    def blocks(
        self, stream: int, position: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Endless (rows, ids, seeds) of blocks, of which the first begins at `position`.

        `rows` picks the block's records in training order, `ids` numbers them, and `seeds`
        int32[n, 3] are for stateless augmentation: two for a crop, one bit for a flip.
        """
        begin, end = self.bounds(stream)
        drop = position % (end - begin) % self.block
        for epoch, _, segments in self.epochs(stream, position):
            ids = self.shards.ids(segments)
            for start in range(0, len(ids), self.block):
                chunk = ids[start : start + self.block]
                rows = np.argsort(hash64(self.seed, 2, epoch, chunk), kind="stable")[drop:]
                drop = 0
                draws = hash64(self.seed, 3, epoch, chunk[rows][:, None], np.arange(3))
                yield rows, chunk[rows], (draws >> np.uint64(33)).astype(np.int32)

    def reads(self, stream: int, step: int) -> np.ndarray:
        """int64[n, 3]: segments of the whole blocks that hold a stream's rows of a step."""
        begin, end = self.bounds(stream)
        length, found = end - begin, []
        first, last = step * self.rows, (step + 1) * self.rows - 1
        for epoch in range(first // length, last // length + 1):
            low = max(first - epoch * length, 0) // self.block * self.block
            high = (min(last - epoch * length, length - 1) // self.block + 1) * self.block
            span = begin + low, begin + min(high, length)
            found.append(self.shards.segments(self.files(epoch), *span))
        return np.concatenate(found)

    def batch_ids(self, step: int) -> np.ndarray:
        """int64[streams * rows]: the examples of the global batch of a step."""
        parts = []
        for stream in range(self.streams):
            missing = self.rows
            for _, ids, _ in self.blocks(stream, step * self.rows):
                parts.append(ids[:missing])
                missing -= len(parts[-1])
                if not missing:
                    break
        return np.concatenate(parts)


def read(shards: Shards, segments: Any, at_once: int = 1) -> Any:
    """tf.data of (serialized, id) for int64[n, 3] rows (file, skip, take), which may be a tensor.

    With `at_once` above 1, so many segments are read at the same time, an example of each in turn.
    A file that holds fewer records than it did when it was counted ends in an error.
    """
    tf = tensorflow()
    paths, starts = tf.constant(shards.paths), tf.constant(shards.starts)

    def one(segment: Any) -> Any:
        file, skip, take = segment[0], segment[1], segment[2]
        records = tf.data.TFRecordDataset(tf.gather(paths, file), buffer_size=_READ_BUFFER)
        records = records.skip(skip).take(take)
        records = records.apply(tf.data.experimental.assert_cardinality(take))
        first = tf.gather(starts, file) + skip
        return tf.data.Dataset.zip((records, tf.data.Dataset.range(first, first + take)))

    found = tf.data.Dataset.from_tensor_slices(segments)
    if at_once == 1:
        return found.flat_map(one)
    return found.interleave(
        one, cycle_length=at_once, num_parallel_calls=at_once, deterministic=True
    )


def read_errors() -> tuple[type[Exception], ...]:
    """What faulty records raise; UnicodeDecodeError where TensorFlow's message quotes bytes."""
    return tensorflow().errors.OpError, UnicodeDecodeError


def unreadable(shards: Shards, segments: np.ndarray) -> tuple[int, str] | None:
    """The first example of `segments` that cannot be read, and why."""
    count = 0
    try:
        for _ in read(shards, segments):
            count += 1
    except tensorflow().errors.OpError as error:
        fault = one_line(error)
        if "expected to contain" in fault:  # by assert_cardinality
            fault = "its file holds fewer records than when they were counted"
        return int(shards.ids(segments)[count]), fault
    return None


def train_stream(order: Order, streams: range, start_step: int) -> Any:
    """Endless tf.data of (block, id, row, seeds int32[3]), `rows` from each stream in turn.

    The serialized example is row `row` of the string tensor `block`, which others share: whoever
    decodes it copies it out, at the moment at which the copy is of use.
    """
    tf = tensorflow()
    position = start_step * order.rows

    @tf.autograph.experimental.do_not_convert  # it cannot convert generators, and need not
    def one(stream: Any) -> Any:
        def epochs(stream: int) -> Iterator[np.ndarray]:
            for _, _, segments in order.epochs(int(stream), position):
                yield segments

        def blocks(stream: int) -> Iterator[Any]:
            return order.blocks(int(stream), position)

        segments = tf.data.Dataset.from_generator(
            epochs, args=(stream,), output_signature=tf.TensorSpec([None, 3], tf.int64)
        )
        # Blocks never span two epochs, so each epoch is batched on its own.
        records = segments.flat_map(lambda s: read(order.shards, s).batch(order.block))
        plan = tf.data.Dataset.from_generator(
            blocks,
            args=(stream,),
            output_signature=(
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None, 3], tf.int32),
            ),
        )

        def examples(block: Any, plan: Any) -> Any:
            rows, ids, seeds = map(tf.data.Dataset.from_tensor_slices, plan)
            repeated = tf.data.Dataset.from_tensors(block[0]).repeat()
            return tf.data.Dataset.zip((repeated, ids, rows, seeds))

        # The next block is read while this one is used.
        return tf.data.Dataset.zip((records, plan)).prefetch(1).flat_map(examples)

    dataset = tf.data.Dataset.range(streams.start, streams.stop)
    return dataset.interleave(
        one,
        cycle_length=len(streams),
        block_length=order.rows,
        num_parallel_calls=len(streams),
        deterministic=True,
    )


def read_fault(error: Exception) -> str:
    """What was wrong with a record, in one line, from one of `read_errors`."""
    return "not a tf.train.Example" if isinstance(error, UnicodeDecodeError) else one_line(error)
