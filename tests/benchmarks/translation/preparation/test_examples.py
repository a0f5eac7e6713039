"""Shards of text: who gets which pair, how full the rows are, the sample, a killed process."""

import hashlib
import os
import zlib

import numpy as np
import pytest

from benchmarks.translation.preparation import examples
from benchmarks.translation.schema import FEATURES, SIDES
from common.data import records
from common.errors import UserError
from common.tensorflow import tensorflow

LENGTH = 256
VOCABULARY = b"<pad>\n<EOS>\n" + b"\n".join(b"%c" % c for c in b"\\_u;0123456789")
# Of the seed 7: which of three shards get the pairs 0, 1, 2 and so on, and 3072, 3073, 3074.
FIRST = [[0, 2, 1], [1, 0, 2], [0, 1, 2], [0, 1, 2]]
LATER = [[0, 1, 2], [2, 0, 1], [1, 2, 0]]
SUMS = ["0175f0e2", "b18986dc", "352be31a"]  # of (seed, shard): (0, 0), (0, 1), (1, 0)


def make(pairs, seed=0, number=0):
    """The facts and rows of a shard of these pairs of ids, which the vocabulary gives back."""
    return examples.make_shard(VOCABULARY, LENGTH, 80, seed, (number, pairs))


@pytest.fixture(autouse=True)
def ids_are_text(monkeypatch):
    """Pairs of ids stand for those of text."""
    monkeypatch.setattr(
        examples, "encode", lambda pair, _: [[int(i) for i in side] for side in pair]
    )


def test_rows_are_as_full_as_promised():
    pairs = wmt_like(12_000)
    facts, rows = make(pairs)
    tokens = [sum(len(pair[side]) for pair in pairs) for side in (0, 1)]
    longest = max(len(side) for pair in pairs for side in pair)
    assert facts == {"pairs": len(pairs), "tokens": tokens, "long": 0, "longest": longest}
    shares = [count / (len(rows) * LENGTH) for count in tokens]
    assert sum(shares) / 2 >= 0.97 and max(shares) >= 0.98


def test_each_shard_gets_one_of_as_many_consecutive_pairs():
    """In an order that is drawn anew, also after 1,024 times as many pairs."""
    owners = examples.deal(3 * 1024 + 30, 3, 7)
    groups = owners.reshape(-1, 3)
    assert (np.sort(groups, 1) == [0, 1, 2]).all()
    assert groups[[0, 1, 2, 3]].tolist() == FIRST and groups[[1024, 1025, 1026]].tolist() == LATER
    assert len(examples.deal(3 * 1024 + 30, 4, 7)) == 3 * 1024 + 30


def test_the_sample_has_a_bounded_size_and_the_order_of_the_text(monkeypatch):
    texts = [f"{number:05}" for number in range(2000)]
    pairs = [(text, text) for text in texts]
    assert examples.sample(pairs, 0)[::2] == texts
    monkeypatch.setattr(examples, "_SAMPLE", 5000)
    sample = examples.sample(pairs, 0)[::2]
    assert 440 < len(sample) <= 500 and sample == sorted(sample) != examples.sample(pairs, 1)[::2]


def test_what_a_shard_holds():
    """Pairs of 80 tokens on a side are kept, pairs of 81 are not."""
    lengths = [(80, 3), (81, 2), (2, 81), (5, 80), (90, 90), (7, 9)]
    facts, rows = make([tuple(np.arange(2, 2 + n) for n in sides) for sides in lengths])
    assert facts == {"pairs": 3, "tokens": [92, 92], "long": 3, "longest": 90}
    assert sorted(len(pair[0]) for pair in rows[0]) == [5, 7, 80] and len(rows) == 1
    assert make([]) == ({"pairs": 0, "tokens": [0, 0], "long": 0, "longest": 0}, [])


def test_the_order_is_drawn_from_the_seed_and_the_shard():
    """And it does not drift."""
    for total, (seed, number) in zip(SUMS, ((0, 0), (0, 1), (1, 0)), strict=True):
        rows = make(wmt_like(60), seed, number)[1]
        features = (examples.row(pairs, LENGTH) for pairs in rows)
        data = b"".join(map(records.frame, map(examples.serialize_example, features)))
        assert hashlib.sha256(data).hexdigest()[:8] == total


def die(job):
    os._exit(1)


def test_processes_that_are_killed_take_one_line():
    with pytest.raises(UserError, match="one of --workers=2 processes was killed.* take fewer"):
        list(examples._made(die, iter([(0, []), (1, [])]), 2))


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
    rows = [examples.row(members, 96) for members in examples.pack(iter(pairs), 96, *open_rows)]
    assert all(row[name].shape == (96,) for row in rows for name in FEATURES)
    unpacked = [pair for row in rows for pair in unpack(row)]
    assert sorted(unpacked) == sorted((list(a), list(b)) for a, b in pairs)
    content = b"".join(row[name].astype("<i4").tobytes() for row in rows for name in row)
    assert (len(rows), zlib.crc32(content)) == (count, checksum)


def test_rows_come_as_soon_as_enough_pairs_are_there():
    """Of 4 ids each, 8 pairs fill the 8 rows that are open, and all of the rows are full."""
    pairs = iter([([5, 6, 7, 1], [1])] * 40)
    packed = examples.pack(pairs, 4, 8)
    for _ in range(8):
        next(packed)
    assert len(list(pairs)) == 32
    assert list(examples.pack([], 8)) == []


def test_serialized_as_tensorflow_reads_it_and_always_the_same():
    row = {"b": [2**40], "inputs": np.arange(300), "a": []}
    data = examples.serialize_example(row)
    feature = tensorflow().train.Example.FromString(data).features.feature
    lists = {name: list(feature[name].int64_list.value) for name in feature}
    assert lists == {name: list(values) for name, values in row.items()}
    assert hashlib.sha256(data).hexdigest()[:16] == "b9f6216d87069e94"
