"""Records of sentence pairs, packed or one pair each: their form, their faults, their manifest.

A record is a tf.train.Example with lists of int64. One pair has `inputs`, the source, and
`targets`, its translation, each with EOS at its end. A packed row has several pairs one after the
other on each side, and two more lists per side: the segmentation numbers the pairs from 1, the
positions count from 0 in each pair; 0 is padding.

The schemas are tensor2tensor's (`translate_ende_wmt32k_packed-*`, `translate_ende_wmt32k-*`), which
`preparation.text` writes too, and MLPerf's reference's (`wmt32k-encoded-*`). In manifest.json
`preparation.text` describes the records that it wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from benchmarks.translation.vocabulary import EOS, Vocabulary
from common.data import files
from common.data.shards import tensorflow
from common.errors import DataError, parse_json

SIDES = ("inputs", "targets")
FEATURES = tuple(f"{side}{part}" for side in SIDES for part in ("", "_segmentation", "_position"))
_MANIFEST_KIND = "translation"
SCHEMA = "the schema of translation (lists of int64: inputs, targets)"

Row = dict[str, np.ndarray]  # int64[n] by the names of FEATURES; [0] where a record has none
Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (values, splits) of several records


def features() -> dict[str, Any]:
    """The features of a record, for TensorFlow's parsers."""
    tf = tensorflow()
    return {name: tf.io.RaggedFeature(tf.int64) for name in FEATURES}


def columns(serialized: Any) -> Columns:
    """Parses serialized records: record i has values[splits[i] : splits[i + 1]] of each name."""
    parsed = tensorflow().io.parse_example(serialized, features())
    return {name: (v.values.numpy(), v.row_splits.numpy()) for name, v in parsed.items()}


def split(columns: Columns) -> list[Row]:
    """The rows of several records."""
    parts = [np.split(values, splits[1:-1]) for values, splits in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*parts, strict=True)]


def is_packed(row: Row) -> bool:
    """Whether a record is a row of several pairs."""
    return len(row["targets_segmentation"]) > 0


def of_record(record: bytes, name: str) -> Row:
    """The row of a serialized tf.train.Example; DataError, with its name, if it is none."""
    try:
        feature = tensorflow().train.Example.FromString(record).features.feature
    except Exception as error:  # the module of protobuf's DecodeError depends on its version
        raise DataError(f"{name} is no tf.train.Example") from error
    return {
        name: np.array(feature[name].int64_list.value if name in feature else [], np.int64)
        for name in FEATURES
    }


def pairs(row: Row) -> Iterator[list[np.ndarray]]:
    """The ids of both sides, with EOS, of each pair of a record without a fault."""
    if not is_packed(row):
        yield [row[side] for side in SIDES]
        return
    for segment in range(1, int(row["targets_segmentation"].max()) + 1):
        yield [row[side][row[f"{side}_segmentation"] == segment] for side in SIDES]


def usable(paths: Sequence[str], packed: Sequence[bool | None], split: str) -> list[int]:
    """The indices of the files to read: all to train, those of single pairs to evaluate.

    Args:
      paths: the files.
      packed: whether the records of each file are packed; None of an empty file.
      split: "train" or "eval".

    Raises:
      DataError: packed and single records lie together (to train), or all are packed (to
        evaluate).
    """
    example = dict(zip(packed, paths, strict=True))  # a file of each kind
    if split == "eval" and True in example and False not in example:
        raise DataError(
            f"{example[True]} holds packed rows; an evaluation needs one sentence per record: set "
            "--config.eval_files to the unpacked records (*-dev*)"
        )
    if split == "train" and True in example and False in example:
        raise DataError(
            f"{example[True]} holds packed rows and {example[False]} single pairs; name one kind "
            "with --config.train_files"
        )
    return [i for i, kind in enumerate(packed) if split == "train" or not kind]


def fault(row: Row, packed: bool, vocab_size: int) -> str:
    """The first fault of a record, and how to fix it; "" if it has none."""
    for side in SIDES:
        ids = row[side]
        if not len(ids):
            return f"it has no {side}; mend the record"
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            return (
                f"{side} has the id {wrong}, and the vocabulary {vocab_size:,} entries: the "
                "records were made with another vocabulary, see docs/transformer.md"
            )
        if not packed and ids[-1] != EOS:
            return f"{side} does not end with {EOS} (EOS); write the records again"
        if not packed:
            continue
        segments, positions = row[f"{side}_segmentation"], row[f"{side}_position"]
        if not len(ids) == len(segments) == len(positions):
            return f"{side}, its segmentation and its positions differ in length"
        if ((segments > 0) != (ids > 0)).any():
            return f"the segmentation of {side} is not positive exactly where there are tokens"
    if packed and row["inputs_segmentation"].max() != row["targets_segmentation"].max():
        return "inputs and targets have different numbers of segments"
    return ""


def order_fault(row: Row) -> str:
    """The first fault of the segments and positions of a packed row; "" if it has none."""
    for side in SIDES:
        segments, positions = row[f"{side}_segmentation"], row[f"{side}_position"]
        numbers = segments[np.flatnonzero(np.diff(segments, prepend=0) != 0)]
        if numbers[numbers > 0].tolist() != list(range(1, segments.max() + 1)):
            return f"the segments of {side} do not count from 1 in order"
        for number in range(1, int(segments.max()) + 1):
            positions_here = positions[segments == number]
            if (positions_here != np.arange(len(positions_here))).any():
                return f"the positions of segment {number} of {side} do not count from 0"
    return ""


def any_fault(row: Row, vocab_size: int) -> str:
    """As `fault`; the order of segments and positions and the ends of segments are checked too."""
    packed = is_packed(row)
    if wrong := fault(row, packed, vocab_size) or (order_fault(row) if packed else ""):
        return wrong
    for side in SIDES if packed else ():
        for number in range(1, int(row[f"{side}_segmentation"].max()) + 1):
            ids = row[side][row[f"{side}_segmentation"] == number]
            if ids[-1] != EOS or (ids[:-1] == EOS).any():
                return f"segment {number} of {side} has no {EOS} (EOS) at its end, or one before"
    return ""


class ManifestShard(NamedTuple):
    """One file of records."""

    examples: int
    bytes: int
    sha256: str
    pairs: int
    tokens: tuple[int, int]  # of inputs and of targets


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """What the manifest says; `shards` are by name, `length` is that of packed rows."""

    length: int
    vocabulary_file: str
    vocabulary_digest: str
    vocab_size: int
    shards: dict[str, ManifestShard]

    def describe(self, data_dir: str, paths: Sequence[str]) -> list[ManifestShard] | None:
        """The facts of each file; None if a file is not listed or has another size."""
        return files.listed_rows(self.shards, data_dir, paths, lambda row: row.bytes)


def load_manifest(data_dir: str) -> DataManifest | None:
    """The data manifest of a folder, local or gs://; None if it has none for translation.

    Raises:
      DataError: the manifest cannot be read or is of another form.
    """
    data = files.read_manifest(data_dir)
    if data is None:
        return None
    try:
        content = parse_json(data)
        if content.get("kind") != _MANIFEST_KIND:
            return None
        vocabulary, splits = content["vocabulary"], content["splits"]
        rows = [row for split in splits.values() for row in split["shards"]]
        return DataManifest(
            int(content["length"]),
            str(vocabulary["file"]),
            str(vocabulary["sha256"]),
            int(vocabulary["size"]),
            {row["name"]: _manifest_shard(row) for row in rows},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise files.foreign_manifest(str(epath.Path(data_dir) / files.MANIFEST), error) from error


def check_vocabulary(data_dir: str, vocabulary: Vocabulary, path: str) -> None:
    """Raises DataError if the folder's manifest says that its records have another vocabulary.

    path: of the vocabulary, for the message. Folders without a manifest pass.
    """
    content = load_manifest(data_dir)
    if content and content.vocabulary_digest != vocabulary.digest:
        raise DataError(
            f"{path} is not the vocabulary of the records in {data_dir} (SHA-256 "
            f"{vocabulary.digest[:12]}, in manifest.json {content.vocabulary_digest[:12]}): use "
            f"{data_dir.rstrip('/')}/{content.vocabulary_file}, or prepare the records again"
        )


def _manifest_shard(row: dict) -> ManifestShard:
    inputs, targets = map(int, row["tokens"])
    numbers = {key: int(row[key]) for key in ("examples", "bytes", "pairs")}
    return ManifestShard(**numbers, sha256=str(row["sha256"]), tokens=(inputs, targets))
