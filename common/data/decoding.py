"""Decodes records to batches of arrays on all cores; an error names its file and its record.

Every host gets as many evaluation batches, of one shape: `eval_slices` and `pad_batch`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from common import pools
from common.data.order import Order, segments
from common.data.shards import Shards, read_problem, read_records, train_stream, unreadable
from common.errors import DataError
from common.progress import Progress
from common.tensorflow import read_errors, tensorflow

Batch = dict[str, np.ndarray]
Decode = Callable[..., dict[str, Any]]
IMAGE_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"GIF8")  # of images that TensorFlow decodes


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads `shards` in batches of the tensors, of fixed shapes, that `decoders` make of a record.

    The first decoder works until it meets a record that it cannot decode. From that batch on the
    next one works: a fast decoder for most records may stand before a general one. Every batch gets
    "id" int32[h] and "host_seconds" float32[h], the time that decoding took. `check` raises
    DataError for a batch with values that cannot be used. DataError also names a record that cannot
    be decoded.
    """

    shards: Shards
    decoders: Sequence[Decode]
    check: Callable[[Batch], None]

    def train_batches(
        self, order: Order, streams: range, start_step: int, numbered: bool = False
    ) -> Iterator[Batch]:
        """Endless training batches; decoders take (serialized, seeds int32[3]).

        With `numbered` they take the step int64[], counted from 0, as well.
        """
        host_batch = len(streams) * order.rows

        def gathering(decode: Decode) -> Decode:
            return lambda block, row, *rest: decode(tensorflow().gather(block, row), *rest)

        def records(batch: int) -> Any:
            dataset = train_stream(self.shards, order, streams, start_step + batch)
            if not numbered:
                return dataset
            counted = dataset.enumerate(host_batch * (start_step + batch))
            return counted.map(lambda number, example: (*example, number // host_batch))

        def reads(batch: int) -> np.ndarray:
            return order.reads(streams, start_step + batch)

        reader = dataclasses.replace(self, decoders=list(map(gathering, self.decoders)))
        return reader.batches(records, reads, host_batch)

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[Batch]:
        """Every example once over all hosts, padded; decoders take (serialized)."""
        rows, counts = batch_size // num_shards, self.shards.counts
        slices = eval_slices(self.shards.total, batch_size, shard, num_shards)
        in_order = np.arange(len(counts))
        end = max(slices[-1].stop, slices[0].start + 1)  # a host without examples reads one, too

        def records(batch: int) -> Any:
            ids = tensorflow().data.Dataset.range(slices[batch].start, end)
            parts = segments(counts, in_order, slices[batch].start, end)
            return tensorflow().data.Dataset.zip((read_records(self.shards, parts), ids))

        def reads(batch: int) -> np.ndarray:
            return segments(counts, in_order, slices[batch].start, slices[batch].start + rows)

        batches, batch = self.batches(records, reads, rows), {}
        for part in slices:
            batch = next(batches, batch)  # the last one again where the host has no more examples
            arrays = {name: values for name, values in batch.items() if name != "host_seconds"}
            yield pad_batch(arrays, len(part), rows)

    def decode_all(self) -> None:
        """Decodes every example once and shows how far it is; decoders take (serialized)."""
        total, rows = self.shards.total, 256
        progress = Progress(total)
        for k, _ in enumerate(self.eval_batches(rows, 0, 1) if total else ()):
            done = min((k + 1) * rows, total)
            progress.at(done, f"decoding records: {done:,} of {total:,}")

    def batches(
        self, records: Callable[[int], Any], reads: Callable[[int], np.ndarray], rows: int
    ) -> Iterator[Batch]:
        """Decodes in order, `rows` records to a batch.

        `records(k)` is tf.data from batch k on of (serialized, id, further arguments of the
        decoders ...); `reads(k)` are the segments int64[n, 3] that are read for batch k.
        """
        tf, number, decoders = tensorflow(), 0, list(self.decoders)

        # Conversion takes seconds; decoders use TensorFlow's own functions for branches.
        @tf.autograph.experimental.do_not_convert
        def start() -> Iterator[Batch]:
            dataset = records(number).map(_timed(decoders[0]), num_parallel_calls=pools.cores())
            return dataset.batch(rows).prefetch(2).with_options(fixed_options()).as_numpy_iterator()

        iterator = start()
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except read_errors() as error:
                undecoded = isinstance(error, (tf.errors.InvalidArgumentError, UnicodeError))
                if undecoded and len(decoders) > 1:
                    del decoders[0]
                    iterator = start()
                    continue
                problem = unreadable(self.shards, reads(number))
                problem = problem or _undecodable(records(number).take(rows), decoders[0])
                if not problem:  # the second attempt succeeded
                    raise DataError(f"reading the records failed: {read_problem(error)}") from error
                record = self.shards.where(problem[0])
                fix = "repair the file, then start the same command again"
                raise DataError(f"{record} cannot be used: {problem[1]}; {fix}") from error
            self.check(batch)
            yield batch
            number += 1


def fixed_options() -> Any:
    """tf.data.Options of a data set in one fixed order."""
    options = tensorflow().data.Options()
    options.deterministic = True
    options.autotune.enabled = False  # nothing to tune, and after an error it waits a minute
    return options


def _timed(decode: Decode) -> Callable[..., dict[str, Any]]:
    """`decode` of a record with an id; adds "id" and "host_seconds", its thread's time."""
    tf = tensorflow()

    def timed(serialized: Any, example: Any, *rest: Any) -> dict[str, Any]:
        begin = tf.timestamp()
        with tf.control_dependencies([begin]):
            row = decode(tf.identity(serialized), *rest)
        with tf.control_dependencies(list(row.values())):
            seconds = tf.maximum(tf.timestamp() - begin, 0.0)  # the clock may have been set back
        row["id"] = tf.cast(example, tf.int32)
        return row | {"host_seconds": tf.cast(seconds, tf.float32)}

    return timed


def _undecodable(records: Any, decode: Decode) -> tuple[int, str] | None:
    """The first example of `records` that cannot be decoded, and why."""
    for serialized, example, *rest in records:
        try:
            decode(serialized, *rest)
        except read_errors() as error:
            return int(example), read_problem(error)
    return None


def eval_slices(total: int, batch_size: int, shard: int, num_shards: int) -> list[range]:
    """The examples in each of a host's batches; every host has the same number of batches.

    Hosts take consecutive shares of `total` examples. A host's last slices may be short or empty.
    """
    rows, batches = batch_size // num_shards, -(-total // batch_size)
    begin, end = shard * total // num_shards, (shard + 1) * total // num_shards
    starts = range(begin, begin + batches * rows, rows)
    return [range(min(start, end), min(start + rows, end)) for start in starts]


def mask(real: int, rows: int) -> np.ndarray:
    """float32[rows]: 1 for the `real` examples at the front, 0 for the others."""
    return (np.arange(rows) < real).astype(np.float32)


def pad_batch(batch: dict[str, np.ndarray], real: int, rows: int) -> dict[str, np.ndarray]:
    """The arrays of `batch` with zeros appended up to `rows` rows, and their `mask`."""
    widths = {k: [(0, rows - len(v)), *[(0, 0)] * (v.ndim - 1)] for k, v in batch.items()}
    return {k: np.pad(v, widths[k]) for k, v in batch.items()} | {"mask": mask(real, rows)}
