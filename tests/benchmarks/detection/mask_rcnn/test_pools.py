"""Steps of two pools: shares, order, resumption and small pools."""

import itertools

import numpy as np
import pytest

from benchmarks.detection.mask_rcnn.pools import Mix
from common.data.order import Order

COUNTS = ((30, 31, 12), (0, 20, 7))  # 73 and 27 examples


def dealt(mix, start, steps):
    return list(itertools.islice(mix.steps(start), steps))


def test_shares_are_those_of_the_sizes():
    mix = Mix(COUNTS, 3, 4, 4, 40)
    pools = np.array([pool for pool, _ in dealt(mix, 0, 1000)])
    for steps in (25, 75, 1000):  # whole rounds of 100 / 4 steps
        assert abs(np.sum(pools[:steps] == 0) - 0.73 * steps) < 1
    rounds = pools.reshape(-1, 25)
    assert len({row.tobytes() for row in rounds}) > 35  # each in an order of its own
    assert len({bytes(Mix(COUNTS, seed, 4, 4, 40)._pools(0)) for seed in range(9)}) > 7


def test_a_pool_takes_its_own_steps_in_turn():
    steps = dealt(Mix(COUNTS, 3, 4, 4, 40), 0, 300)
    for pool in (0, 1):
        assert [k for p, k in steps if p == pool] == [*range(sum(p == pool for p, _ in steps))]


@pytest.mark.parametrize("start", [1, 24, 25, 26, 140])
def test_steps_from_any_step_on(start):
    mix = Mix(COUNTS, 3, 4, 4, 40)
    assert dealt(mix, start, 60) == dealt(mix, 0, start + 60)[start:]


def test_every_example_once_in_an_epoch():
    mix = Mix(((40,), (20, 20)), 3, 4, 4, 40)
    epochs = [np.concatenate([mix.batch_ids(20 * e + k) for k in range(20)]) for e in range(3)]
    assert all(sorted(epoch) == [*range(80)] for epoch in epochs)
    assert len({epoch.tobytes() for epoch in epochs}) == 3
    for step in range(20):
        assert len({number < 40 for number in mix.batch_ids(step)}) == 1


def test_one_pool_is_its_order():
    mix, order = Mix(COUNTS[:1], 3, 4, 4, 40), Order.make(COUNTS[0], 3, 4, 4, 40)
    for step in (0, 7, 90):
        np.testing.assert_array_equal(mix.batch_ids(step), order.batch_ids(step))


@pytest.mark.parametrize("counts", [((73,), (0,)), ((0, 0), (20, 7)), ((5,), (3,))])
def test_empty_and_small_pools(counts):
    mix = Mix(counts, 3, 16, 8, 40)
    totals = [sum(own) for own in counts]
    seen = np.concatenate([mix.batch_ids(step) for step in range(40)])
    assert set(seen) == set(range(sum(totals)))
    for order in mix.orders.values():  # the hosts can share any pool
        assert order.streams == 8


def test_rounds_of_fewer_examples_than_a_batch_have_one_step():
    """After k steps the first pool has had 5 * k // 8."""
    mix = Mix(((5,), (3,)), 3, 16, 8, 40)
    pools, steps = zip(*dealt(mix, 0, 9), strict=True)
    assert (pools, steps) == ((1, 0, 1, 0, 0, 1, 0, 0, 1), (0, 0, 1, 1, 2, 2, 3, 4, 3))


def test_the_order_of_a_seed_never_changes():
    """A change would reorder the runs that are under way."""
    mix = Mix(COUNTS, 3, 4, 4, 40)
    assert "".join(str(pool) for pool, _ in dealt(mix, 25, 25)) == "0000001001000110000100011"
    assert mix.batch_ids(26).tolist() == [31, 50, 69, 15]
    assert mix.batch_ids(31).tolist() == [73, 80, 86, 93]
