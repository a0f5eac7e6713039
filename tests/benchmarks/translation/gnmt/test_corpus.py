"""Buckets: the rules of an epoch by a plain loop over random data, and exact repetition."""

import numpy as np
import pytest

from benchmarks.translation.gnmt.corpus import Buckets
from common.errors import DataError

BOUNDS = (4, 6, 9, 15)


def make(lengths, batch_size, seed=5, bounds=BOUNDS):
    return Buckets.make(np.asarray(lengths), bounds, seed, batch_size)


def epoch_of(buckets, epoch):
    steps = buckets.steps_per_epoch
    return [buckets.batch(epoch * steps + k) for k in range(steps)]


def expected_sizes(lengths, batch_size):
    """By the rules: the sizes of an epoch's batches, rising, and how many pairs are left."""
    sizes, moved, low = [], [], 0
    for bound in BOUNDS:
        pool = moved + [n for n in lengths if low < n <= bound]
        sizes += [bound] * (len(pool) // batch_size)
        moved = pool[len(pool) - len(pool) % batch_size :]
        low = bound
    return sizes, len(moved)


@pytest.mark.parametrize("trial", range(24))
def test_every_epoch_has_every_pair_at_most_once(trial):
    draw = np.random.default_rng(trial)
    batch_size = int(draw.integers(1, 13))
    count = int(draw.integers(batch_size, 120))
    lengths = draw.choice(draw.integers(1, BOUNDS[-1] + 1, draw.integers(1, 9)), count)
    buckets = make(lengths, batch_size, seed=trial)
    sizes, dropped = expected_sizes(lengths.tolist(), batch_size)
    assert buckets.steps_per_epoch == count // batch_size == len(sizes)
    for epoch in range(3):
        batches = epoch_of(buckets, epoch)
        assert sorted(batch.size for batch in batches) == sizes
        pairs = np.concatenate([batch.pairs for batch in batches])
        assert len(pairs) == len(set(pairs.tolist())) == count - dropped
        assert dropped == count % batch_size
        for size, pairs, seeds in batches:
            assert len(pairs) == len(seeds) == batch_size
            assert lengths[pairs].max() <= size


def test_steps_are_a_function_of_the_seed_and_the_step():
    lengths = np.random.default_rng(0).integers(1, 16, 500)
    one, two = make(lengths, 8), make(lengths, 8)
    for step in (200, 3, 61, 62, 124, 3):  # of several epochs, in any order
        for a, b in zip(one.batch(step), two.batch(step), strict=True):
            np.testing.assert_array_equal(a, b)
    golden = make([3] * 5 + [5] * 2 + [8] * 4, 4).batch(2)  # a change would reorder old runs
    assert (golden.size, golden.pairs.tolist()) == (9, [2, 6, 5, 9])
    assert golden.seeds.tolist() == [1787101423, 888976714, 1007537356, 53930126]
    other = make(lengths, 8, seed=6)
    assert one.batch(3).pairs.tolist() != other.batch(3).pairs.tolist()


def test_epochs_differ_in_batches_and_seeds():
    lengths = np.random.default_rng(0).integers(1, 16, 500)
    buckets = make(lengths, 8)
    first, second = epoch_of(buckets, 0), epoch_of(buckets, 1)
    assert [b.size for b in first] != [b.size for b in second]
    seeds = [
        {i: s for b in epoch for i, s in zip(b.pairs.tolist(), b.seeds.tolist(), strict=True)}
        for epoch in (first, second)
    ]
    assert sum(seeds[0][i] == seeds[1][i] for i in seeds[0] if i in seeds[1]) == 0
    assert len(set(seeds[0].values())) == len(seeds[0])
    assert first[0].seeds.dtype == np.int32 and min(seeds[0].values()) >= 0
    together = [{frozenset(b.pairs.tolist()) for b in epoch} for epoch in (first, second)]
    assert together[0].isdisjoint(together[1])


def test_each_pair_is_used_about_as_often_as_the_others():
    """The pairs that an epoch leaves out are others in the next; shorter pairs are never left."""
    lengths = np.array([3] * 16 + [12] * 21)
    used = np.zeros(len(lengths))
    for epoch in range(200):
        for batch in epoch_of(make(lengths, 8), epoch):
            used[batch.pairs] += 1
    assert (used[:16] == 200).all()
    share = 16 / 21  # of the long pairs are in an epoch
    deviation = np.sqrt(200 * share * (1 - share))
    assert (abs(used[16:] - 200 * share) < 5 * deviation).all()


def test_batches_of_one_size_are_spread_over_the_epoch():
    lengths = np.random.default_rng(0).integers(1, 16, 4000)
    sizes = [batch.size for batch in epoch_of(make(lengths, 8), 0)]
    halves = sizes[:250], sizes[250:]
    for bound in BOUNDS:
        assert abs(halves[0].count(bound) - halves[1].count(bound)) < 60


def test_too_little_data():
    with pytest.raises(DataError, match="config.train_batch_size=8: there are only 7 pairs"):
        make([3] * 7, 8)
    assert make([3] * 8, 8).steps_per_epoch == 1
