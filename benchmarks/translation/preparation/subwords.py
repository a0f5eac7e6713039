"""Learns the subwords of a text, as tensor2tensor 1.15.7's `SubwordTextEncoder` does."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

from benchmarks.translation.subwords import ESCAPE_CHARACTERS, RESERVED, cut, escape

_ROUNDS = 4  # of refinement, as in tensor2tensor
_MOST_COUNT = 1000  # the largest minimum count that the search for a size tries
_LONGEST = 100  # characters; a token of 5,000 would have 12 million subwords


def build(
    counts: Mapping[str, int], size: int, report: Callable[[str], None] = lambda text: None
) -> str:
    """Makes a vocabulary of about `size` subwords: the text of its file.

    As `SubwordTextEncoder.build_to_target_size(size, counts, 1, 1e3)`: a binary search for the
    least count of a subword, which ends within 1 % of the size. Subwords are shorter than 100
    characters, with which tensor2tensor differs only for longer tokens.

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
        self._tokens = [(escape(token, self._alphabet), n) for token, n in counts.items()]
        self._first = self._candidates(self._alphabet)  # the same for every minimum count

    def build(self, least: int) -> list[str]:
        """The subwords for a minimum count, as `build_from_token_counts`."""
        subwords = self._select(dict(self._first), least)
        for _ in range(_ROUNDS - 1):
            subwords = self._select(self._candidates(set(subwords)), least)
        return [escape(token, self._alphabet) for token in RESERVED] + subwords

    def _candidates(self, subwords: set[str]) -> dict[str, int]:
        """How often each string begins where the present subwords begin."""
        occurrences: dict[str, int] = collections.defaultdict(int)
        longest = max(map(len, subwords))
        for escaped, count in self._tokens:
            start, length = 0, len(escaped)
            for piece in cut(escaped, subwords, longest):
                for end in range(start + 1, min(length + 1, start + _LONGEST)):
                    occurrences[escaped[start:end]] += count
                start += len(piece)
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
