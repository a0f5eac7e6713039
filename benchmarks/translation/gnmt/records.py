"""Reads all pairs of sentences in TFRecords into memory, from single pairs or packed rows.

`benchmarks.translation.rows` defines the records. A packed row is cut into its pairs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.translation import rows
from benchmarks.translation.gnmt.corpus import Corpus, Sentences, id_type, join
from benchmarks.translation.rows import SIDES, Columns
from benchmarks.translation.vocabulary import EOS
from errors import DataError
from ops import counting, files
from ops.order import starts
from ops.progress import Progress
from ops.shards import record_name


@dataclasses.dataclass(frozen=True)
class _File:
    """The pairs of one file; `packed` is None if it is empty."""

    count: int
    packed: bool | None
    records: np.ndarray  # int64[pairs], the record of each pair, counted in the file
    sides: tuple[Sentences, Sentences]


def read(paths: Sequence[str], split: str, vocab_size: int, longest: int | None) -> Corpus:
    """Reads and checks all records.

    Args:
      paths: the files.
      split: "train" or "eval". To evaluate, single pairs alone are read where packed rows lie
        in the same folder.
      vocab_size: ids are below it.
      longest: see `Sentences.cut`.

    Raises:
      DataError: a record is damaged, of another schema or has an id outside of the vocabulary;
        packed and single records lie together (to train) or all are packed (to evaluate).
    """
    lengths, results = files.sizes(paths), []
    progress = Progress(sum(lengths))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:

        def one(path: str) -> _File:
            return _read_file(path, vocab_size, longest)

        # The first file alone: TensorFlow may crash if an operation is first used by two threads.
        with files.reading(lambda: list(paths[len(results) :])):
            for result in itertools.chain([one(paths[0])], pool.map(one, paths[1:])):
                results.append(result)
                text = f"reading pairs, once per workdir: {len(results)} of {len(paths)} files"
                progress.at(sum(lengths[: len(results)]), text)
    indices = rows.usable(paths, [file.packed for file in results], split)
    paths, results = tuple(paths[i] for i in indices), [results[i] for i in indices]
    counts = tuple(file.count for file in results)
    numbers = [file.records + first for file, first in zip(results, starts(counts), strict=False)]
    sources, targets = (join([file.sides[side] for file in results]) for side in range(2))
    return Corpus.make(paths, counts, np.concatenate(numbers), (sources, targets), longest)


def _read_file(path: str, vocab_size: int, longest: int | None) -> _File:
    """All pairs of a file; DataError names its first fault."""
    dtype = id_type(vocab_size)
    empty = Sentences(np.zeros(0, dtype), np.zeros(0, np.int32))
    records, sides, kinds = [np.zeros(0, np.int64)], ([empty], [empty]), list[bool]()

    def add(chunk: Any, first: int) -> None:
        columns = rows.columns(chunk)
        packed_rows = np.diff(columns["targets_segmentation"][1]) > 0
        kinds.append(bool(packed_rows[0]))
        if (other := packed_rows != kinds[0]).any():
            record = record_name(path, first + int(other.argmax()))
            raise DataError(f"{record}: packed rows and single pairs are mixed in this file")
        cut = _cut(columns, kinds[0], vocab_size)
        if cut is None:
            raise _fault(path, first, columns, vocab_size)
        records.append(first + cut[0])
        for parts, (ids, lengths) in zip(sides, cut[1], strict=True):
            part = Sentences(ids.astype(dtype), lengths.astype(np.int32))
            parts.append(part.cut(longest))

    count = counting.scan(path, add, rows.SCHEMA)
    joined = join(sides[0]), join(sides[1])
    return _File(count, kinds[0] if kinds else None, np.concatenate(records), joined)


def _cut(columns: Columns, packed: bool, vocab_size: int) -> tuple[np.ndarray, list[Any]] | None:
    """The row of each pair of a chunk, and (ids, lengths) of each side; None if there is a fault.

    It only finds that there is one: `_fault` looks at the rows one by one.
    """
    keys, sides = [], []
    for side in SIDES:
        ids, splits = columns[side]
        segments, others = (
            columns[f"{side}_segmentation"] if packed else (np.ones_like(ids), splits)
        )
        if not np.array_equal(splits, others) or (np.diff(splits) == 0).any():
            return None
        if ((ids > 0) != (segments > 0)).any() or ids.min() < 0 or ids.max() >= vocab_size:
            return None
        row = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
        key = ((row << 32) + segments)[ids > 0]  # rises from pair to pair
        ids = ids[ids > 0]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        lengths = np.diff(first, append=len(ids))
        if (np.diff(key[first]) < 0).any() or (ids[first + lengths - 1] != EOS).any():
            return None
        keys.append(key[first])
        sides.append((ids, lengths))
    return (keys[0] >> 32, sides) if np.array_equal(*keys) else None


def _fault(path: str, first: int, columns: Columns, vocab_size: int) -> DataError:
    """The error for the first faulty row of a chunk."""
    for i, row in enumerate(rows.split(columns), first):
        wrong = rows.any_fault(row, vocab_size)
        if not wrong and not rows.is_packed(row) and not all(row[side].all() for side in SIDES):
            wrong = "it has the id 0 (padding) inside of a sentence; write it again"
        if wrong:
            return DataError(f"{record_name(path, i)}: {wrong}")
    return DataError(f"{record_name(path, first)} or one of the next: its segments are damaged")
