"""Packing: every pair once, segments and positions, rows that never change, records in order."""

import hashlib
import zlib

import numpy as np
import pytest

from benchmarks.translation.preparation import packing
from benchmarks.translation.schema import FEATURES, SIDES
from common.tensorflow import tensorflow


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


@pytest.mark.parametrize(
    ("open_rows", "count", "checksum"),
    [((), 428, 2684217658), ((8,), 441, 2192401277), ((64,), 430, 2326276043)],
)
def test_every_pair_is_in_one_row_of_those_that_never_change(open_rows, count, checksum):
    """Whoever prepares the same text again gets the same records."""
    pairs = wmt_like(1500)
    rows = [packing.row(members, 96) for members in packing.pack(iter(pairs), 96, *open_rows)]
    assert all(row[name].shape == (96,) for row in rows for name in FEATURES)
    unpacked = [pair for row in rows for pair in unpack(row)]
    assert sorted(unpacked) == sorted((list(a), list(b)) for a, b in pairs)
    content = b"".join(row[name].astype("<i4").tobytes() for row in rows for name in row)
    assert (len(rows), zlib.crc32(content)) == (count, checksum)


def test_rows_come_as_soon_as_enough_pairs_are_there():
    """Of 4 ids each, 8 pairs fill the 8 rows that are open, and all of the rows are full."""
    pairs = iter([([5, 6, 7, 1], [1])] * 40)
    packed = packing.pack(pairs, 4, 8)
    for _ in range(8):
        next(packed)
    assert len(list(pairs)) == 32
    assert list(packing.pack([], 8)) == []


def test_serialized_as_tensorflow_reads_it_and_always_the_same():
    row = {"b": [2**40], "inputs": np.arange(300), "a": []}
    data = packing.serialize_example(row)
    feature = tensorflow().train.Example.FromString(data).features.feature
    lists = {name: list(feature[name].int64_list.value) for name in feature}
    assert lists == {name: list(values) for name, values in row.items()}
    assert hashlib.sha256(data).hexdigest()[:16] == "b9f6216d87069e94"
