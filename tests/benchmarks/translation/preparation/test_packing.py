"""Packing: every pair once, segments and positions, how full the rows are."""

import zlib

import numpy as np
import pytest

from benchmarks.translation.preparation import packing
from benchmarks.translation.rows import FEATURES, SIDES
from common.data.shards import tensorflow


def wmt_like(count, seed=0):
    """Pairs of ids with EOS whose lengths are spread like WMT's in 32,768 subwords, up to 80."""
    draw = np.random.default_rng(seed)
    base = draw.lognormal(3.15, 0.68, count)
    sizes = [np.round(base * share * draw.lognormal(0, 0.12, count)) + 1 for share in (1, 1.03)]
    pairs = []
    for number, pair in enumerate(np.stack(sizes, 1).astype(int)):
        if pair.max() <= 80:
            pairs.append(
                tuple([2 + number, *draw.integers(2, 99, n).tolist(), 1] for n in pair - 1)
            )
    return [pair for pair in pairs if max(map(len, pair)) <= 80]


def unpack(row):
    """The pairs of a row, by its segments; checks positions and padding."""
    pairs = []
    for side in SIDES:
        segments, parts = row[f"{side}_segmentation"], []
        used = segments > 0
        assert ((row[side] > 0) == used).all()
        assert not used[np.argmin(used) :].any() or used.all()  # padding is at the end
        assert (np.diff(segments[used]) >= 0).all()
        for segment in range(1, segments.max() + 1):
            where = segments == segment
            assert row[f"{side}_position"][where].tolist() == list(range(where.sum()))
            parts.append(row[side][where].tolist())
        assert not row[f"{side}_position"][~used].any()
        pairs.append(parts)
    return list(zip(*pairs, strict=True))


@pytest.mark.parametrize("open_rows", [1, 8, 64])
def test_every_pair_is_in_one_row(open_rows):
    pairs = wmt_like(1500)
    rows = list(packing.pack(iter(pairs), 96, open_rows))
    assert all(set(row) == set(FEATURES) for row in rows)
    assert all(values.shape == (96,) for row in rows for values in row.values())
    unpacked = [pair for row in rows for pair in unpack(row)]
    assert sorted(unpacked) == sorted((list(a), list(b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("open_rows", "rows", "checksum"),
    [((), 428, 2684217658), ((8,), 441, 2192401277), ((64,), 430, 2326276043)],
)
def test_the_rows_of_a_corpus_never_change(open_rows, rows, checksum):
    """Whoever prepares the same text again gets the same records."""
    packed = list(packing.pack(wmt_like(1500), 96, *open_rows))
    content = b"".join(row[name].astype("<i4").tobytes() for row in packed for name in row)
    assert (len(packed), zlib.crc32(content)) == (rows, checksum)


def test_rows_come_as_soon_as_enough_pairs_are_there():
    """Of 4 ids each, 8 pairs fill the 8 rows that are open, and all of the rows are full."""
    pairs = iter([([5, 6, 7, 1], [1])] * 40)
    packed = packing.pack(pairs, 4, 8)
    for _ in range(8):
        next(packed)
    assert len(list(pairs)) == 32


def test_nothing_gives_no_row():
    assert list(packing.pack([], 8)) == []


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([5] * 9, [1])])
def test_refuses_sides_that_do_not_fit(pair):
    sizes = f"{len(pair[0])} and {len(pair[1])}"
    with pytest.raises(ValueError, match=f"^a pair of {sizes} ids, length 8$"):
        list(packing.pack([pair], 8))


def test_serialized_as_tensorflow_does():
    train = tensorflow().train
    draw = np.random.default_rng(1)
    for size in (0, 1, 127, 300):
        for most in (1, 127, 128, 16_383, 16_384, 2**40):
            lists = {"inputs": draw.integers(0, most + 1, size), "b": np.array([most]), "a": []}
            feature = {
                name: train.Feature(int64_list=train.Int64List(value=values))
                for name, values in lists.items()
            }
            message = train.Example(features=train.Features(feature=feature))
            assert packing.serialize_example(lists) == message.SerializeToString(deterministic=True)
