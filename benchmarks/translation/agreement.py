"""Checks that records of sentence pairs and a vocabulary belong together.

The same subwords may have other ids in another file. MLPerf's reference for the Transformer is a
trap of this kind: its copy of tensor2tensor's vocabulary begins with '<pad>_' and '<EOS>_', its
loader puts '<pad>' and '<EOS>' in front, and all ids of its records are 2 higher than the lines.
"""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.translation import rows
from benchmarks.translation.vocabulary import Vocabulary, Words
from common.data import records
from common.data.shards import read_errors, read_fault, record_name, tensorflow
from common.errors import DataError, one_line

_PAIRS = 20  # that are looked at
_SHIFTS = {0: "", -2: "with all ids 2 lower", 2: "with all ids 2 higher"}
_TEXT = re.compile(r".*\.([a-z]{2,3}|lang[12])")
_BYTES = 16 << 20  # of a file of text; one to evaluate on has about 0.5 MB
_FIX = "give the vocabulary that they were made with as --config.vocabulary_file"
_LOWER = (
    "MLPerf's reference puts two entries in front of its file: sed '1i<pad>\\n<EOS>' {} > "
    "vocab.reference does so, too; give that file as --config.vocabulary_file (to prepare, as "
    "--vocabulary)"
)


def fault(vocabulary: Vocabulary, paths: Sequence[str], is_eval: bool) -> tuple[str, bool]:
    """What says that records were made with another vocabulary.

    The first 20 pairs are decoded, but for those with unknown text. The vocabulary is theirs if
    most are lines of the text that lies beside the records or, without such text, if encoding gives
    their ids again.

    Args:
      vocabulary: to decode the records with.
      paths: the files of a split, of single pairs or packed rows.
      is_eval: whether they are to evaluate on: text with as many lines as they have records is
        taken for theirs.

    Returns:
      (the fault in one line, or ""; whether it is certain).

    Raises:
      DataError: a file cannot be read, or has a record of another form.
    """
    if isinstance(vocabulary, Words):  # its text is tokenized, and not that of records
        return "", False
    first = [
        pair
        for pair in itertools.islice(_pairs(paths), _PAIRS)
        if not any(vocabulary.unknown in ids.tolist() for ids in pair)
    ]
    texts = list(_texts(os.path.dirname(paths[0])))
    half, most = len(first) / 2, 0.8 * len(first)

    def in_text(shift: int) -> int:
        keys = [[_key(vocabulary.decode(ids + shift)) for ids in pair] for pair in first]
        return max(
            (sum(any(k in text for k in pair) for pair in keys) for text, _ in texts), default=0
        )

    def again(shift: int) -> int:
        def same(ids: np.ndarray) -> bool:
            return vocabulary.encode(vocabulary.decode(ids + shift)) == (ids + shift).tolist()

        return sum(all(map(same, pair)) for pair in first)

    if not first or in_text(0) > half:
        return "", False
    lines, consistent = ({shift: test(shift) for shift in _SHIFTS} for test in (in_text, again))
    have_text = max(lines.values()) > half
    if is_eval and texts and not have_text:
        have_text = sum(1 for _ in _pairs(paths)) in [count for _, count in texts]
    if not have_text and consistent[0] >= most:
        return "", False
    found = lines if have_text else consistent
    test = (
        "are lines of the text beside them" if have_text else "have the same ids if encoded again"
    )
    best = max(found, key=lambda shift: found[shift])
    hint = f" ({_SHIFTS[best]}: {found[best]})" if best else ""
    fix = _LOWER.format(vocabulary.path) if best == -2 else _FIX
    return (
        f"{paths[0]} does not belong to the vocabulary {vocabulary.path}: decoded with it, "
        f"{found[0]} of the first {len(first)} pairs {test}{hint}; {fix}"
    ), have_text and (max(lines.values()) > half or consistent[0] < most)


def _pairs(paths: Sequence[str]) -> Iterator[list[np.ndarray]]:
    """The ids of both sides of each pair, without EOS."""
    for path in paths:
        try:
            for number, record in enumerate(records.read_shard(path)):
                for pair in rows.pairs(rows.of_record(record, record_name(path, number))):
                    yield [ids[:-1] for ids in pair]
        except read_errors() as error:
            raise DataError(f"cannot read {path}: {read_fault(error)}") from error


def _texts(folder: str) -> Iterator[tuple[set[str], int]]:
    """The keys of the lines of each small file of text in a folder, and their number."""
    gfile = tensorflow().io.gfile
    try:
        for name in filter(_TEXT.fullmatch, records.list_folder(folder)):
            path = f"{folder}/{name}"
            if not gfile.isdir(path) and gfile.stat(path).length <= _BYTES:
                with gfile.GFile(path, "rb") as file:
                    lines = file.read().removesuffix(b"\n").split(b"\n")
                yield {_key(line.decode(errors="replace")) for line in lines} - {""}, len(lines)
    except read_errors() as error:
        raise DataError(f"cannot read the text in {folder}: {one_line(error)}") from error


def _key(text: str) -> str:
    """A text as it can be compared: sentencepiece changes white space and forms of characters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
