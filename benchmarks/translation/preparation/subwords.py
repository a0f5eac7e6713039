"""Learns the subwords of a text, as tensor2tensor 1.15.7's `SubwordTextEncoder` does."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping

from benchmarks.translation.subwords import ESCAPE_CHARACTERS, RESERVED, cut, escape

_ROUNDS = 4  # of refinement, as in tensor2tensor
_MOST_COUNT = 1000  # the largest minimum count that the search for a size tries
# Characters of a token that count. One of 5,000 would have 12 million subwords.
_LONGEST = 100
# Text without blanks, such as Chinese, has hardly a token twice. These bound what it takes to about
# a gigabyte; a sample of WMT has less than half as many.
_CHARACTERS = 3 << 20  # of different tokens; later ones do not count
_CANDIDATES = 1 << 21  # longer ones are not looked at beyond so many


def build(
    counts: Mapping[str, int], size: int, report: Callable[[str], None] = lambda text: None
) -> str:
    """Makes a vocabulary of about `size` subwords: the text of its file.

    As `SubwordTextEncoder.build_to_target_size(size, counts, 1, 1e3)`: a binary search for the
    least count of a subword, which ends within 1 % of the size. Of a token of 100 characters or
    more the first 100 count, and of text without blanks a part: there tensor2tensor differs.

    Args:
      counts: how often each token occurs; see `tokens`.
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
        self._tokens, room = [], _CHARACTERS
        for token, count in counts.items():
            escaped = escape(token[:_LONGEST], self._alphabet)[:_LONGEST]
            room -= len(escaped)
            if room < 0:
                break
            self._tokens.append((escaped, count))

    def build(self, least: int) -> list[str]:
        """The subwords for a minimum count, as `build_from_token_counts`."""
        subwords = self._select(self._candidates(self._alphabet, least), least)
        for _ in range(_ROUNDS - 1):
            subwords = self._select(self._candidates(set(subwords), least), least)
        return [escape(token, self._alphabet) for token in RESERVED] + subwords

    def _candidates(self, subwords: set[str], least: int) -> dict[str, int]:
        """How often each string begins where the present subwords begin.

        Strings of several characters that occur less than `least` times are left out: a string
        occurs no more often than its beginning, so no longer one needs to be counted.
        """
        occurrences: dict[str, int] = {}
        longest, rows = max(map(len, subwords)), []
        for escaped, count in self._tokens:
            ends = itertools.accumulate(map(len, cut(escaped, subwords, longest)))
            rows.append((escaped, count, [0, *ends][:-1]))
        for length in range(1, _LONGEST):
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
