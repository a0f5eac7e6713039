"""Reads all pairs of sentences in TFRecords into memory, from single pairs or packed rows.

The schemas are those of `benchmarks.translation.records`. A packed row is cut into its pairs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.translation import rows
from benchmarks.translation.gnmt.lines import Sentences, id_type, join
from benchmarks.translation.packing import FEATURES, SIDES
from benchmarks.translation.records import SCHEMA
from benchmarks.translation.vocabulary import EOS
from errors import DataError
from ops import files, scanning
from ops.order import starts
from ops.progress import Progress
from ops.shards import record_name, tensorflow

_Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (values, splits) of a chunk's rows


class Pairs(NamedTuple):
    """The pairs of some files of records.

    Attributes:
      paths: the files that hold them.
      counts: the records in each file.
      numbers: int64[pairs], the record of each pair, counted over all files from 0.
      inputs: the sources.
      targets: their translations.
    """

    paths: tuple[str, ...]
    counts: tuple[int, ...]
    numbers: np.ndarray
    inputs: Sentences
    targets: Sentences


@dataclasses.dataclass(frozen=True)
class _File:
    """As `Pairs`, of one file; `packed` is None if it is empty."""

    path: str
    count: int
    packed: bool | None
    records: np.ndarray  # int64[pairs], counted in the file
    sides: tuple[Sentences, Sentences]


def read(paths: Sequence[str], split: str, vocab_size: int, longest: int | None) -> Pairs:
    """Reads and checks all records.

    Args:
      paths: the files.
      split: "train" or "eval". To evaluate, single pairs alone are read where packed rows lie
        beside them.
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
    kept = _of_one_kind(results, split)
    first = starts([file.count for file in kept])
    numbers = [file.records + start for file, start in zip(kept, first, strict=False)]
    inputs, targets = (join([file.sides[side] for file in kept]) for side in range(2))
    return Pairs(
        tuple(file.path for file in kept),
        tuple(file.count for file in kept),
        np.concatenate(numbers),
        inputs,
        targets,
    )


def _of_one_kind(results: list[_File], split: str) -> list[_File]:
    """The files to use; DataError if their records are of the wrong kind."""
    kinds = {file.packed: file.path for file in results}
    packed, single = kinds.get(True), kinds.get(False)
    if split == "eval" and packed and not single:
        raise DataError(
            f"{packed} holds packed rows; an evaluation needs one sentence per record: set "
            "--config.eval_files to the unpacked records (*-dev*)"
        )
    if split == "train" and packed and single:
        raise DataError(
            f"{packed} holds packed rows and {single} single pairs; name one kind with "
            "--config.train_files"
        )
    return [file for file in results if split == "train" or not file.packed]


def _read_file(path: str, vocab_size: int, longest: int | None) -> _File:
    """All pairs of a file; DataError names its first fault."""
    tf, dtype = tensorflow(), id_type(vocab_size)
    features = {name: tf.io.RaggedFeature(tf.int64) for name in FEATURES}
    empty = Sentences(np.zeros(0, dtype), np.zeros(0, np.int32))
    records, sides, kinds = [np.zeros(0, np.int64)], ([empty], [empty]), list[bool]()

    def add(chunk: Any, first: int) -> None:
        parsed = tf.io.parse_example(chunk, features)
        columns = {k: (v.values.numpy(), v.row_splits.numpy()) for k, v in parsed.items()}
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

    count = scanning.scan(path, add, SCHEMA)
    joined = join(sides[0]), join(sides[1])
    return _File(path, count, kinds[0] if kinds else None, np.concatenate(records), joined)


def _cut(columns: _Columns, packed: bool, vocab_size: int) -> tuple[np.ndarray, list[Any]] | None:
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


def _fault(path: str, first: int, columns: _Columns, vocab_size: int) -> DataError:
    """The error for the first faulty row of a chunk."""
    split = {name: np.split(values, splits[1:-1]) for name, (values, splits) in columns.items()}
    for i in range(len(split["inputs"])):
        row = {name: values[i] for name, values in split.items()}
        packed = bool(len(row["targets_segmentation"]))
        wrong = rows.fault(row, packed, vocab_size)
        wrong = wrong or (rows.segment_fault(row) if packed else "")
        if not packed and not all(row[side].all() for side in SIDES):
            wrong = wrong or "it has the id 0 (padding) inside of a sentence; write it again"
        if wrong:
            return DataError(f"{record_name(path, first + i)}: {wrong}")
    return DataError(f"{record_name(path, first)} or one of the next: its segments are damaged")
