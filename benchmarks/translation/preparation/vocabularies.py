"""The vocabulary of a preparation: a file of the user's, or one built from a sample of the text."""

import collections
import os
from typing import Any

import numpy as np

from benchmarks.translation import vocabulary as vocabularies
from benchmarks.translation.preparation import subwords as learning
from benchmarks.translation.subwords import tokens
from benchmarks.translation.vocabulary import Vocabulary
from errors import DataError, UserError
from ops.order import hash64
from ops.preparation import writing
from ops.shards import tensorflow

FILES = {"subwords": "vocab.subwords", "sentencepiece": "vocab.model"}  # names in OUT, by kind
_CHARACTERS = 8_000_000  # of the sample; tensor2tensor takes 6 million of WMT
_FACTS = "vocabulary.json"


class Sample:
    """A part of the training text, drawn by a hash of the pairs' numbers, of bounded size."""

    def __init__(self, seed: int, characters: int = _CHARACTERS):
        self._seed, self._characters, self._most = seed, characters, 1 << 64
        self._pairs: list[tuple[int, str, str]] = []
        self._draws: list[int] = []
        self._size = self._count = 0

    def add(self, source: str, target: str) -> None:
        """Offers the next pair."""
        if not self._draws:
            numbers = self._count + np.arange(4096)[::-1]
            self._draws = hash64(self._seed, 4, numbers).tolist()
        draw, self._count = self._draws.pop(), self._count + 1
        if draw >= self._most:
            return
        self._pairs.append((draw, source, target))
        self._size += len(source) + len(target)
        while self._size > self._characters and len(self._pairs) > 1:
            self._most = self._most * 9 // 10
            self._pairs = [pair for pair in self._pairs if pair[0] < self._most]
            self._size = sum(len(pair[1]) + len(pair[2]) for pair in self._pairs)

    def counts(self) -> collections.Counter[str]:
        """How often each token occurs in the sample."""
        counts: collections.Counter[str] = collections.Counter()
        for _, *pair in self._pairs:
            for text in pair:
                counts.update(tokens(text))
        return counts


def existing(state: writing.State, plan: dict[str, Any], source: str) -> Vocabulary | None:
    """The vocabulary of the file `source`, or that of an interrupted run of the same plan.

    Raises:
        DataError: the file is no vocabulary, or one of words.
    """
    if source:
        vocabulary = vocabularies.load(source)
        if vocabulary.kind not in FILES:
            raise DataError(
                f"{source} is a vocabulary of tokenized text, which the benchmark gnmt reads as it "
                "is; to prepare plain text, give subwords of tensor2tensor or a sentencepiece model"
            )
        with tensorflow().io.gfile.GFile(source, "rb") as file:
            _save(state.out, FILES[vocabulary.kind], file.read())
        return vocabulary
    path, saved = os.path.join(state.out, FILES["subwords"]), state.read(_FACTS)
    if saved and saved["plan"] == plan and tensorflow().io.gfile.exists(path):
        vocabulary = vocabularies.load(path)
        if vocabulary.digest == saved["sha256"]:
            return vocabulary
    return None


def build(state: writing.State, plan: dict[str, Any], sample: Sample, size: int) -> Vocabulary:
    """Builds a vocabulary of subwords and writes it to the output folder.

    Raises:
        UserError: the characters of the text alone are many more than `size`.
    """
    print(f"building a vocabulary of about {size:,} subwords", flush=True)
    counts = sample.counts()
    data = learning.build(counts, size, lambda text: print(f"  {text}", flush=True)).encode()
    path = os.path.join(state.out, FILES["subwords"])
    vocabulary = vocabularies.parse(data, path)
    if vocabulary.size > 2 * size:
        least = len({c for token in counts for c in token})
        raise UserError(
            f"--vocabulary_size={size} is too small for text of {least:,} different characters: "
            f"the smallest vocabulary has {vocabulary.size:,} subwords"
        )
    _save(state.out, FILES["subwords"], data)
    state.write(_FACTS, {"plan": plan, "sha256": vocabulary.digest})
    return vocabulary


def path_of(out: str, vocabulary: Vocabulary) -> str:
    """Where the output folder has its vocabulary."""
    return os.path.join(out, FILES[vocabulary.kind])


def _save(out: str, name: str, data: bytes) -> None:
    """Writes the vocabulary, and deletes one of another kind that an earlier preparation made."""
    gfile = tensorflow().io.gfile
    for other in FILES.values():
        if other != name and gfile.exists(path := os.path.join(out, other)):
            gfile.remove(path)
    writing.save(out, name, data)
