"""The vocabulary of a preparation: a file of the user's, or one built from a sample of the text.

Subwords are learned as tensor2tensor 1.15.7's `SubwordTextEncoder` does.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.translation.vocabulary import (
    ESCAPE_CHARACTERS,
    RESERVED,
    Vocabulary,
    cut_token,
    escape_token,
    load_vocabulary,
    parse_vocabulary,
    split_tokens,
)
from common.data.order import hash64
from common.data.shards import tensorflow
from common.errors import DataError, UserError
from common.preparation import writing

FILES = {"subwords": "vocab.subwords", "sentencepiece": "vocab.model"}  # names in OUT, by kind
_SAMPLE_CHARACTERS = 8_000_000  # of the sample; tensor2tensor takes 6 million of WMT
_FACTS = "vocabulary.json"
_ROUNDS = 4  # of refinement, as in tensor2tensor
_MOST_COUNT = 1000  # the largest minimum count that the search for a size tries
# Characters of a token that count. One of 5,000 would have 12 million subwords.
_LONGEST_TOKEN = 100
# Text without blanks, such as Chinese, has hardly a token twice. These bound what it takes to about
# a gigabyte; a sample of WMT has less than half as many.
_CHARACTERS = 3 << 20  # of different tokens; later ones do not count
_CANDIDATES = 1 << 21  # longer ones are not looked at beyond so many


class Sample:
    """A part of the training text, drawn by a hash of the pairs' numbers, of bounded size."""

    def __init__(self, seed: int, characters: int = _SAMPLE_CHARACTERS):
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
                counts.update(split_tokens(text))
        return counts


def find(state: writing.State, plan: dict[str, Any], source: str) -> Vocabulary | None:
    """The vocabulary of the file `source`, or that of an interrupted run of the same plan.

    Raises:
        DataError: the file is no vocabulary, or one of words.
    """
    if source:
        vocabulary = load_vocabulary(source)
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
        vocabulary = load_vocabulary(path)
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
    data = learn_subwords(counts, size, lambda text: print(f"  {text}", flush=True)).encode()
    path = os.path.join(state.out, FILES["subwords"])
    vocabulary = parse_vocabulary(data, path)
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


def learn_subwords(
    counts: Mapping[str, int], size: int, report: Callable[[str], None] = lambda text: None
) -> str:
    """Makes a vocabulary of about `size` subwords: the text of its file.

    As `SubwordTextEncoder.build_to_target_size(size, counts, 1, 1e3)`: a binary search for the
    least count of a subword, which ends within 1 % of the size. Of a token of 100 characters or
    more the first 100 count, and of text without blanks a part: there tensor2tensor differs.

    Args:
      counts: how often each token occurs; see `split_tokens`.
      size: the number of subwords, the reserved ones included; small alphabets may give fewer.
      report: is called with the progress in words.
    """
    corpus = _Corpus(counts)

    def distance(subwords: list[str]) -> int:
        return abs(len(subwords) - size)

    def search(least: int, most: int) -> list[str]:
        middle = (least + most) // 2
        report(f"subwords that occur at least {middle} times ...")
        subwords = corpus.build(middle)
        report(f"subwords that occur at least {middle} times: {len(subwords):,} of {size:,}")
        if distance(subwords) * 100 < size or least >= most or middle < 2:
            return subwords
        larger = len(subwords) > size
        other = search(middle + 1, most) if larger else search(least, middle - 1)
        return other if distance(other) < distance(subwords) else subwords

    return "".join(f"'{subword}'\n" for subword in search(1, _MOST_COUNT))


class _Corpus:
    """The tokens of a text with their counts, to build vocabularies from."""

    def __init__(self, counts: Mapping[str, int]):
        characters = {c for token in (*counts, *RESERVED) for c in token}
        self._alphabet = characters | ESCAPE_CHARACTERS
        self._tokens, rest = [], _CHARACTERS
        for token, count in counts.items():
            escaped = escape_token(token[:_LONGEST_TOKEN], self._alphabet)[:_LONGEST_TOKEN]
            rest -= len(escaped)
            if rest < 0:
                break
            self._tokens.append((escaped, count))

    def build(self, least: int) -> list[str]:
        """The subwords for a minimum count, as `build_from_token_counts`."""
        subwords = self._select(self._candidates(self._alphabet, least), least)
        for _ in range(_ROUNDS - 1):
            subwords = self._select(self._candidates(set(subwords), least), least)
        return [escape_token(token, self._alphabet) for token in RESERVED] + subwords

    def _candidates(self, subwords: set[str], least: int) -> dict[str, int]:
        """How often each string begins where the present subwords begin.

        Strings of several characters that occur less than `least` times are left out: a string
        occurs no more often than its beginning, so no longer one needs to be counted.
        """
        occurrences: dict[str, int] = {}
        longest, rows = max(map(len, subwords)), []
        for escaped, count in self._tokens:
            ends = itertools.accumulate(map(len, cut_token(escaped, subwords, longest)))
            rows.append((escaped, count, [0, *ends][:-1]))
        for length in range(1, _LONGEST_TOKEN):
            counts: dict[str, int] = collections.defaultdict(int)
            for escaped, count, starts in rows:
                for start in starts:
                    counts[escaped[start : start + length]] += count
            often = {string: n for string, n in counts.items() if n >= least}
            occurrences |= counts if length == 1 else often
            if len(occurrences) > _CANDIDATES:
                break
            rows = [
                (escaped, count, kept)
                for escaped, count, starts in rows
                if (
                    kept := [
                        start
                        for start in starts
                        if start + length < len(escaped)
                        and escaped[start : start + length] in often
                    ]
                )
            ]
        return occurrences

    def _select(self, occurrences: dict[str, int], least: int) -> list[str]:
        """The candidates that occur often enough, and the alphabet, the most frequent first.

        Each subword that is taken no longer counts for its beginnings.
        """
        by_length = collections.defaultdict(list)
        for candidate, count in occurrences.items():
            if count >= least:
                by_length[len(candidate)].append(candidate)
        taken = []
        for length in sorted(by_length, reverse=True):
            for candidate in by_length[length]:
                count = occurrences[candidate]
                if count >= least:
                    if candidate not in self._alphabet:
                        taken.append((count, candidate))
                    for end in range(1, length):
                        occurrences[candidate[:end]] -= count
        taken += [(occurrences.get(c, 0), c) for c in self._alphabet]
        return [subword for _, subword in sorted(taken, reverse=True)]
