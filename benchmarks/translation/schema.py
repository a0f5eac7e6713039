"""Records of sentence pairs, packed or one pair each: their form, errors, vocabulary and manifest.

A record is a tf.train.Example with lists of int64. One pair has `inputs`, the source, and
`targets`, its translation, each with EOS at its end. A packed row has several pairs one after the
other on each side, and two more lists per side: the segmentation numbers the pairs from 1, the
positions count from 0 in each pair; 0 is padding.

The schemas are tensor2tensor's (`translate_ende_wmt32k_packed-*`, `translate_ende_wmt32k-*`), which
`preparation.text` writes too, and MLPerf's reference's (`wmt32k-encoded-*`). In manifest.json
`preparation.text` describes the records that it wrote.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from benchmarks.translation.vocabulary import EOS, Vocabulary, Words
from common.data import data_manifest, records
from common.data.shards import read_problem
from common.errors import DataError, parse_json
from common.tensorflow import read_errors, tensorflow

SIDES = ("inputs", "targets")
FEATURES = tuple(f"{side}{part}" for side in SIDES for part in ("", "_segmentation", "_position"))
_MANIFEST_KIND = "translation"
SCHEMA = "the schema of translation (lists of int64: inputs, targets)"
_CHUNK = 1000  # records that are parsed at once
_PAIRS = 20  # pairs that are compared with the vocabulary
_SAME = 0.8  # the smallest share of them with the same ids

Row = dict[str, np.ndarray]  # int64[n] by the names of FEATURES; [0] where a record has none


def features() -> dict[str, Any]:
    """The features of a record, for TensorFlow's parsers."""
    tf = tensorflow()
    return {name: tf.io.RaggedFeature(tf.int64) for name in FEATURES}


def parse(serialized: Any) -> list[Row]:
    """The rows of serialized records."""
    parsed = tensorflow().io.parse_example(serialized, features())
    parts = [np.split(x.values.numpy(), x.row_splits.numpy()[1:-1]) for x in parsed.values()]
    return [dict(zip(parsed, row, strict=True)) for row in zip(*parts, strict=True)]


def is_packed(row: Row) -> bool:
    """Whether a record is a row of several pairs."""
    return len(row["targets_segmentation"]) > 0


def pairs(row: Row) -> Iterator[list[np.ndarray]]:
    """The ids of both sides, with EOS, of each pair of a correct record."""
    if not is_packed(row):
        yield [row[side] for side in SIDES]
        return
    for segment in range(1, int(row["targets_segmentation"].max()) + 1):
        yield [row[side][row[f"{side}_segmentation"] == segment] for side in SIDES]


def usable(paths: Sequence[str], packed: Sequence[bool | None], split: str) -> list[int]:
    """The indices of the files to read: all to train, files of single pairs to evaluate.

    `packed` is whether the records of each file are packed, or None for an empty file.
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
    return [i for i, is_packed in enumerate(packed) if split == "train" or not is_packed]


def error(row: Row, vocab_size: int) -> str:
    """What is wrong with a record, and how to fix it; "" if nothing is."""
    packed = is_packed(row)
    for side in SIDES:
        ids = row[side]
        if not len(ids):
            return f"it has no {side}; correct the record"
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            return (
                f"{side} has the id {wrong}, and the vocabulary {vocab_size:,} entries: the "
                "records were made with another vocabulary, see docs/transformer.md"
            )
        if not packed:
            if ids[-1] != EOS:
                return f"{side} does not end with {EOS} (EOS); write the records again"
            if not ids.all():
                return f"{side} has the id 0 (padding) inside of the sentence; write it again"
            continue
        segments, positions = row[f"{side}_segmentation"], row[f"{side}_position"]
        if not len(ids) == len(segments) == len(positions):
            return f"{side}, its segmentation and its positions differ in length"
        if ((segments > 0) != (ids > 0)).any():
            return f"the segmentation of {side} is not positive exactly where there are tokens"
    if packed and row["inputs_segmentation"].max() != row["targets_segmentation"].max():
        return "inputs and targets have different numbers of segments"
    return ""


def vocabulary_error(vocabulary: Vocabulary, paths: Sequence[str]) -> tuple[str, bool]:
    """Detects records that were made with another vocabulary.

    The same subwords may have other ids in another file. MLPerf's reference for the Transformer is
    a trap of this kind: its copy of tensor2tensor's vocabulary begins with '<pad>_' and '<EOS>_',
    its loader puts '<pad>' and '<EOS>' in front, and all ids of its records are 2 higher than the
    lines. So the first 20 pairs without unknown text are decoded and encoded: the ids must be the
    same again. If they are the same with all ids 2 lower, the message says so. `paths` are the
    files of a split. Returns (the error in one line, or ""; whether it is certain).
    """
    if isinstance(vocabulary, Words):  # its text is tokenized, which that of records is not
        return "", False
    first = []
    for pair in itertools.islice(read_pairs(paths, _PAIRS), _PAIRS):
        if not any(vocabulary.unknown in ids.tolist() for ids in pair):
            first.append(pair)

    def count_same(shift: int) -> int:
        def is_same(ids: np.ndarray, encode: Callable[[str], list[int]]) -> bool:
            return encode(vocabulary.decode(ids + shift)) == (ids + shift).tolist()

        encoders = vocabulary.encode, vocabulary.encode_target
        return sum(all(map(is_same, pair, encoders)) for pair in first)

    same, enough = count_same(0), _SAME * len(first)
    if same >= enough:
        return "", False
    text = (
        f"{paths[0]} does not belong to the vocabulary {vocabulary.path}: decoded with it, {same} "
        f"of the first {len(first)} pairs have the same ids if encoded again"
    )
    if count_same(-2) < enough:
        return f"{text}; give the vocabulary of the records as --config.vocabulary_file", False
    return (
        f"{text}, and {count_same(-2)} with all ids 2 lower; MLPerf's reference puts two entries "
        f"in front of its file: sed '1i<pad>\\n<EOS>' {vocabulary.path} > vocab.reference does "
        "so, too; give that file as --config.vocabulary_file"
    ), True


def read_pairs(paths: Sequence[str], max_records: int | None = None) -> Iterator[list[np.ndarray]]:
    """The ids of both sides of the pairs, without EOS, of each file's first `max_records`."""
    for path in paths:
        try:
            serialized = itertools.islice(records.read_shard(path), max_records)
            while chunk := [*itertools.islice(serialized, _CHUNK)]:
                for row in parse(chunk):
                    for pair in pairs(row):
                        yield [ids[:-1] for ids in pair]
        except read_errors() as error:
            raise DataError(f"cannot read {path}: {read_problem(error)}") from error


class ManifestShard(NamedTuple):
    """One file of records."""

    examples: int
    pairs: int
    tokens: tuple[int, int]  # tokens of inputs, tokens of targets


@dataclasses.dataclass(frozen=True)
class TextManifest:
    """What the manifest says: `shards` by file name, and the `length` of packed rows."""

    length: int
    vocabulary_file: str
    vocabulary_digest: str
    shards: dict[str, ManifestShard]
    languages: tuple[str, str] = ("", "")  # of the sources and the targets; "" where unknown


def load_text_manifest(data_dir: str) -> TextManifest | None:
    """The data manifest of a folder, local or gs://; None if there is none for translation."""
    data = data_manifest.read_bytes(data_dir)
    if data is None:
        return None
    try:
        content = parse_json(data)
        if content.get("kind") != _MANIFEST_KIND:
            return None
        vocabulary, shards = content["vocabulary"], {}
        for part in content["splits"].values():
            for row in part["shards"]:
                inputs, targets = map(int, row["tokens"])
                shards[row["name"]] = ManifestShard(
                    int(row["examples"]), int(row["pairs"]), (inputs, targets)
                )
        return TextManifest(
            int(content["length"]),
            str(vocabulary["file"]),
            str(vocabulary["sha256"]),
            shards,
            tuple(content.get("languages", ("", ""))),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise data_manifest.form_error(
            str(epath.Path(data_dir) / data_manifest.FILE_NAME), error
        ) from error


def check_vocabulary(data_dir: str, vocabulary: Vocabulary, path: str) -> None:
    """Raises DataError if the folder's manifest says that its records have another vocabulary.

    `path` is the file of the vocabulary, for the message. Folders without a manifest pass.
    """
    content = load_text_manifest(data_dir)
    if content and content.vocabulary_digest != vocabulary.digest:
        raise DataError(
            f"{path} is not the vocabulary of the records in {data_dir} (SHA-256 "
            f"{vocabulary.digest[:12]}, in manifest.json {content.vocabulary_digest[:12]}): use "
            f"{data_dir.rstrip('/')}/{content.vocabulary_file}, or prepare the records again"
        )
