"""Packs pairs of sentences into rows of fixed length, which a model reads without waste."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from benchmarks.translation.schema import FEATURES, SIDES
from common.tensorflow import tensorflow

_FULL = 0.01  # a row with no more free positions than this share is full: no pair could use them
_AGAIN = 8  # one in so many rows is packed again with the next pairs

Pair = tuple[Sequence[int], Sequence[int]]


def pack(pairs: Iterable[Pair], length: int, open_rows: int = 256) -> Iterator[list[Pair]]:
    """Deals pairs of (source ids, target ids), with EOS, to rows; yields the pairs of each row.

    Pairs for `open_rows` rows are placed together, the longest first, each into the row in which it
    leaves the fewest positions free. The pairs of the emptiest rows are packed again with the next
    pairs. The order of the rows is not random. Each side has 1 to `length` ids, and a row `length`
    positions. More rows at a time fill better; 1,000 pairs take about 50 ms.
    """
    pool: list[Pair] = []
    size = 0  # the sum of the longer sides in the pool
    for pair in pairs:
        pool.append(pair)
        size += max(map(len, pair))
        if size >= open_rows * length:
            rows, pool = _split(pool, length, open_rows // _AGAIN)
            size = sum(max(map(len, pair)) for pair in pool)
            yield from rows
    yield from _split(pool, length, 0)[0]


def row(pairs: Sequence[Pair], length: int) -> dict[str, np.ndarray]:
    """One row of these pairs in this order.

    Returns:
      {"inputs", "inputs_segmentation", "inputs_position", and the same of "targets"}: int64[length]
      each. Segments count from 1, positions from 0 in each segment; 0 is padding.
    """
    features = {name: np.zeros(length, np.int64) for name in FEATURES}
    for which, side in enumerate(SIDES):
        begin = 0
        for segment, pair in enumerate(pairs, 1):
            ids = pair[which]
            end = begin + len(ids)
            features[side][begin:end] = ids
            features[f"{side}_segmentation"][begin:end] = segment
            features[f"{side}_position"][begin:end] = np.arange(len(ids))
            begin = end
    return features


def _split(pairs: list[Pair], length: int, most_again: int) -> tuple[list[list[Pair]], list[Pair]]:
    """The pairs of each finished row; the pairs of at most `most_again` rows to pack again."""
    sizes = np.array([[len(side) for side in pair] for pair in pairs]).reshape(-1, 2)
    where, free = _place(sizes, length)
    least = free.min(axis=1)
    emptiest = np.argsort(-least, kind="stable")[:most_again]
    again = set(emptiest[least[emptiest] > _FULL * length].tolist())
    rows: list[list[Pair]] = [[] for _ in free]
    for pair, number in zip(pairs, where.tolist(), strict=True):
        rows[number].append(pair)
    done = [members for number, members in enumerate(rows) if number not in again]
    return done, [pair for number in sorted(again) for pair in rows[number]]


def _place(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The row int64[n] of each pair of sizes int64[n, 2], and the free positions int64[rows, 2]."""
    where, count = np.zeros(len(sizes), np.int64), 0
    free = np.zeros((2, len(sizes)), np.int64)
    for pair in np.argsort(-sizes.max(axis=1), kind="stable"):
        rest = free[:, :count] - sizes[pair, :, None]
        # The side with more free positions decides, so that both sides of a row fill alike.
        waste = np.where(rest.min(axis=0) >= 0, rest.max(axis=0), 2 * length)
        best = int(waste.argmin()) if count else 0
        if not count or waste[best] == 2 * length:
            best, count = count, count + 1
            free[:, best] = length
        free[:, best] -= sizes[pair]
        where[pair] = best
    return where, free[:, :count].T


def serialize_example(features: Mapping[str, Sequence[int] | np.ndarray]) -> bytes:
    """The serialized tf.train.Example of lists of integers, in the order of their names.

    The order of protobuf's maps changes with its version.
    """
    train, entries = tensorflow().train, []
    for name in sorted(features):
        feature = train.Feature(int64_list=train.Int64List(value=features[name]))
        entries.append(train.Features(feature={name: feature}).SerializeToString())
    # An Example is one field of bytes, stored as that of a BytesList.
    return train.BytesList(value=[b"".join(entries)]).SerializeToString()
