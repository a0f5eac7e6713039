"""Steps of two groups: shares, order, resumption and small groups."""

import itertools

import numpy as np
import pytest

from benchmarks.detection.mask_rcnn.aspect_ratio_groups import GroupedOrder
from common.data.order import Order

COUNTS = ((30, 31, 12), (0, 20, 7))  # 73 and 27 examples


def dealt(grouped, start, steps):
    return list(itertools.islice(grouped.steps(start), steps))


def test_shares_are_those_of_the_sizes():
    grouped = GroupedOrder(COUNTS, 3, 4, 4, 40)
    groups = np.array([group for group, _ in dealt(grouped, 0, 1000)])
    for steps in (25, 75, 1000):  # whole rounds of 100 / 4 steps
        assert abs(np.sum(groups[:steps] == 0) - 0.73 * steps) < 1
    rounds = groups.reshape(-1, 25)
    assert len({row.tobytes() for row in rounds}) > 35  # each in an order of its own
    assert len({bytes(GroupedOrder(COUNTS, seed, 4, 4, 40)._groups(0)) for seed in range(9)}) > 7


def test_a_pool_takes_its_own_steps_in_turn():
    steps = dealt(GroupedOrder(COUNTS, 3, 4, 4, 40), 0, 300)
    for group in (0, 1):
        assert [k for p, k in steps if p == group] == [*range(sum(p == group for p, _ in steps))]


@pytest.mark.parametrize("start", [1, 24, 25, 26, 140])
def test_steps_from_any_step_on(start):
    grouped = GroupedOrder(COUNTS, 3, 4, 4, 40)
    assert dealt(grouped, start, 60) == dealt(grouped, 0, start + 60)[start:]


def test_every_example_once_in_an_epoch():
    grouped = GroupedOrder(((40,), (20, 20)), 3, 4, 4, 40)
    epochs = [np.concatenate([grouped.batch_ids(20 * e + k) for k in range(20)]) for e in range(3)]
    assert all(sorted(epoch) == [*range(80)] for epoch in epochs)
    assert len({epoch.tobytes() for epoch in epochs}) == 3
    for step in range(20):
        assert len({number < 40 for number in grouped.batch_ids(step)}) == 1


def test_one_group_is_its_order():
    grouped, order = GroupedOrder(COUNTS[:1], 3, 4, 4, 40), Order.make(COUNTS[0], 3, 4, 4, 40)
    for step in (0, 7, 90):
        np.testing.assert_array_equal(grouped.batch_ids(step), order.batch_ids(step))


@pytest.mark.parametrize("counts", [((73,), (0,)), ((0, 0), (20, 7)), ((5,), (3,))])
def test_empty_and_small_groups(counts):
    grouped = GroupedOrder(counts, 3, 16, 8, 40)
    totals = [sum(own) for own in counts]
    seen = np.concatenate([grouped.batch_ids(step) for step in range(40)])
    assert set(seen) == set(range(sum(totals)))
    for order in grouped.orders.values():  # the hosts can share any group
        assert order.streams == 8


def test_rounds_of_fewer_examples_than_a_batch_have_one_step():
    """After k steps the first group has had 5 * k // 8."""
    grouped = GroupedOrder(((5,), (3,)), 3, 16, 8, 40)
    groups, steps = zip(*dealt(grouped, 0, 9), strict=True)
    assert (groups, steps) == ((1, 0, 1, 0, 0, 1, 0, 0, 1), (0, 0, 1, 1, 2, 2, 3, 4, 3))


def test_the_order_of_a_seed_never_changes():
    """A change would reorder the runs that are under way."""
    grouped = GroupedOrder(COUNTS, 3, 4, 4, 40)
    assert "".join(str(group) for group, _ in dealt(grouped, 25, 25)) == "0000001001000110000100011"
    assert grouped.batch_ids(26).tolist() == [31, 50, 69, 15]
    assert grouped.batch_ids(31).tolist() == [73, 80, 86, 93]
