"""Holds pairs of sentences in memory, as token ids."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from ops.shards import Shards


class Sentences(NamedTuple):
    """Sentences as ids, EOS included, one after the other.

    Attributes:
      ids: [tokens], of the type of `id_type`.
      lengths: int32[sentences], those of sentences without ids included.
    """

    ids: np.ndarray
    lengths: np.ndarray

    def cut(self, longest: int | None) -> Sentences:
        """Drops the ids, and not the lengths, of sentences of more than `longest` tokens."""
        if longest is None or (self.lengths <= longest).all():
            return self
        return Sentences(self.ids[np.repeat(self.lengths <= longest, self.lengths)], self.lengths)


def id_type(vocab_size: int) -> type[np.generic]:
    """The smallest of NumPy's integers, uint16 or int32, that holds all ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def join(parts: list[Sentences]) -> Sentences:
    """The sentences of all parts, of which there is at least one."""
    return Sentences(*map(np.concatenate, zip(*parts, strict=True)))


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Pairs of sentences; side 0 is the sources, side 1 their translations.

    Attributes:
      paths: the two files of text, or the files of records.
      counts: the records in each file; () of text.
      ids: uint16 or int32[tokens], every sentence with EOS at its end.
      lengths: int32[n, 2], tokens of each side, EOS included.
      starts: int64[n, 2], where each sentence begins in `ids`.
      numbers: int64[n], the line or record of each pair, counted from 0 before any were left out.
        The pairs of a packed row share its number.
    """

    paths: tuple[str, ...]
    counts: tuple[int, ...]
    ids: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    numbers: np.ndarray

    @classmethod
    def make(
        cls,
        paths: tuple[str, ...],
        counts: tuple[int, ...],
        numbers: np.ndarray,
        sides: tuple[Sentences, Sentences],
        longest: int | None,
    ) -> Corpus:
        """Joins both sides; `longest` is what `Sentences.cut` was called with."""
        most = np.inf if longest is None else longest
        sizes = [np.where(side.lengths > most, 0, side.lengths) for side in sides]
        starts = [np.cumsum(lengths, dtype=np.int64) - lengths for lengths in sizes]
        starts[1] += len(sides[0].ids)
        return cls(
            paths,
            counts,
            np.concatenate([side.ids for side in sides]),
            np.stack([side.lengths for side in sides], axis=1),
            np.stack(starts, axis=1),
            numbers,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for a in (self.ids, self.lengths, self.starts, self.numbers))

    def rows(self, which: np.ndarray, side: int, size: int) -> np.ndarray:
        """int32[m, size]: sentences of the pairs `which`, int64[m], padded with zeros.

        Raises:
          ValueError: a sentence has more than `size` tokens.
        """
        lengths = self.lengths[which, side]
        if lengths.max(initial=0) > size:
            raise ValueError(f"a sentence of {lengths.max()} tokens does not fit {size}")
        rows = np.zeros((len(which), size), np.int32)
        is_token = np.arange(size) < lengths[:, None]
        places = self.starts[which, side][:, None] + np.arange(size)
        rows[is_token] = self.ids[places[is_token]]
        return rows

    def describe(self, i: int) -> str:
        """Where a pair is in the data, in words; of text, where its source is."""
        number = int(self.numbers[i])
        if self.counts:
            return Shards(self.paths, self.counts).where(number)
        return f"{self.paths[0]}, line {number + 1}"

    def take(self, which: np.ndarray) -> Corpus:
        """The pairs `which`, int64[m], of the same `ids`."""
        arrays = {name: getattr(self, name)[which] for name in ("lengths", "starts", "numbers")}
        return dataclasses.replace(self, **arrays)
