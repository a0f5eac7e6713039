"""Reads TFRecord files with TensorFlow, in file order or in the training order of `order.Order`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from common.data.order import Order, example_numbers, first_examples
from common.errors import one_line
from common.tensorflow import tensorflow

GROUP = "image/group"  # which images belong together; `scripts.prepare --group` writes it
READ_BUFFER = 4 << 20  # bytes per open file; hides the latency of object stores
_TURN_BUFFER = 16 << 10  # where hundreds of files are read in turn; a start skips records faster


@dataclasses.dataclass(frozen=True)
class Shards:
    """TFRecord files and the number of examples in each; examples are numbered in file order.

    `left_out` holds, for each file, the sorted positions of records that are no examples; () if
    every record is one. The counts do not include them.
    """

    paths: tuple[str, ...]
    counts: tuple[int, ...]
    left_out: tuple[tuple[int, ...], ...] = ()

    @property
    def total(self) -> int:
        """Examples in all files."""
        return sum(self.counts)

    @classmethod
    def marked(cls, paths: tuple[str, ...], examples: Sequence[np.ndarray]) -> Self:
        """Files whose examples are the selected records, bool[records] for each file."""
        left_out = tuple(tuple(np.flatnonzero(~of_file).tolist()) for of_file in examples)
        return cls(paths, tuple(int(of_file.sum()) for of_file in examples), left_out)

    def only(self, kept: np.ndarray) -> Self:
        """The same files, in which only the examples of `kept`, bool[total], are left."""
        examples = []
        of_files = np.split(kept, np.cumsum(self.counts)[:-1])
        for file, of_file in enumerate(of_files):
            without = np.array(self.left_out[file] if self.left_out else (), np.int64)
            records = np.zeros(len(of_file) + len(without), bool)
            records[np.delete(np.arange(len(records)), without)] = of_file
            examples.append(records)
        return self.marked(self.paths, examples)

    def where(self, example: int) -> str:
        """The file and the record of an example, in words."""
        return record_name(*self.place(example))

    def place(self, example: int) -> tuple[str, int]:
        """The file of an example, and its record there, counted from 0."""
        first = first_examples(self.counts)
        file = int(np.searchsorted(first, example, side="right")) - 1
        record = int(example - first[file])
        for position in self.left_out[file] if self.left_out else ():
            record += position <= record
        return self.paths[file], record


def record_name(path: str, record: int) -> str:
    """A record in words, for messages."""
    return f"{path}, record {record} (counted from 0)"


def read_records(shards: Shards, segments: Any, buffer_size: int = READ_BUFFER) -> Any:
    """tf.data of the serialized records of `segments`, rows of (file, skip, take, ...).

    `segments` is int64[n, 3 or more], or such a tensor; `buffer_size` is in bytes. A file that
    holds fewer records than when it was counted raises an error.
    """
    tf = tensorflow()
    paths = tf.constant(shards.paths)

    def one(segment: Any) -> Any:
        file, skip, take = segment[0], segment[1], segment[2]
        records = tf.data.TFRecordDataset(tf.gather(paths, file), buffer_size=buffer_size)
        records = _examples(shards, file, records) if any(shards.left_out) else records
        records = records.skip(skip).take(take)
        return records.apply(tf.data.experimental.assert_cardinality(take))

    return tf.data.Dataset.from_tensor_slices(segments).flat_map(one)


def read_some(shards: Shards, examples: Sequence[int] | np.ndarray) -> list[bytes]:
    """The serialized records of single examples, in the order of `examples`."""
    if not len(examples):
        return []
    first = first_examples(shards.counts)
    numbers = np.asarray(examples, np.int64).reshape(-1)
    files = np.searchsorted(first, numbers, side="right") - 1
    segments = np.stack([files, numbers - first[files], np.ones_like(files)], axis=1)
    return list(read_records(shards, segments, _TURN_BUFFER).as_numpy_iterator())


def _examples(shards: Shards, file: Any, records: Any) -> Any:
    """The records of a file, by its number as a tensor, without those that are left out."""
    tf = tensorflow()
    sizes = [n + len(row) for n, row in zip(shards.counts, shards.left_out, strict=True)]
    first, is_example = first_examples(sizes), np.ones(sum(sizes), bool)
    for begin, row in zip(first, shards.left_out, strict=False):
        is_example[begin + np.array(row, np.int64)] = False
    begins, kept = tf.constant(first), tf.constant(is_example)
    examples = records.enumerate().filter(lambda n, record: kept[begins[file] + n])
    return examples.map(lambda n, record: record)


def train_stream(shards: Shards, order: Order, streams: range, start_step: int) -> Any:
    """Endless tf.data of (block, id, row, seeds int32[3]), `order.rows` from each stream in turn.

    The serialized example is row `row` of the string tensor `block`. The decoder copies it out of
    the block when it needs it.
    """
    tf = tensorflow()
    position = start_step * order.rows
    buffer_size = READ_BUFFER if order.interleaved == 1 else _TURN_BUFFER
    segment, seed = tf.TensorSpec([None, 4], tf.int64), tf.TensorSpec([None, 3], tf.int32)
    index = tf.TensorSpec([None], tf.int64)

    def epoch(segments: Any, slots: Any) -> Any:
        files = [
            read_records(shards, tf.boolean_mask(segments, segments[:, 3] == slot), buffer_size)
            for slot in range(order.interleaved)
        ]
        records = files[0]
        if len(files) > 1:
            choices = tf.data.Dataset.from_tensor_slices(slots)
            records = tf.data.Dataset.choose_from_datasets(files, choices)
        # Blocks never span two epochs, so each epoch is batched on its own.
        return records.batch(order.block)

    @tf.autograph.experimental.do_not_convert  # it cannot convert generators, and need not
    def one(stream: Any) -> Any:
        epochs = tf.data.Dataset.from_generator(
            lambda stream: order.epochs(int(stream), position),
            args=(stream,),
            output_signature=(segment, index),
        )
        records = epochs.flat_map(epoch)
        plan = tf.data.Dataset.from_generator(
            lambda stream: (block[1:] for block in order.blocks(int(stream), position)),
            args=(stream,),
            output_signature=(index, index, seed),
        )

        def examples(block: Any, plan: Any) -> Any:
            rows, ids, seeds = map(tf.data.Dataset.from_tensor_slices, plan)
            repeated = tf.data.Dataset.from_tensors(block).repeat()
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


def read_problem(error: Exception) -> str:
    """What is wrong with a record, in one line, for one of `common.tensorflow.read_errors`."""
    return "not a tf.train.Example" if isinstance(error, UnicodeDecodeError) else one_line(error)


def unreadable(shards: Shards, segments: np.ndarray) -> tuple[int, str] | None:
    """The first example of `segments` that cannot be read, and why."""
    count = 0
    try:
        for _ in read_records(shards, segments):
            count += 1
    except tensorflow().errors.OpError as error:
        problem = one_line(error)
        if "expected to contain" in problem:  # by assert_cardinality
            problem = "its file holds fewer records than when they were counted"
        return int(example_numbers(shards.counts, segments)[count]), problem
    return None
