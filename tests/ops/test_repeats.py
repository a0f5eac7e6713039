"""Repeated augmentation in the order of training examples, against the plain order."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from ops.order import Order

COUNTS = (9, 30, 7, 25, 31)


def rows(order: Order, stream: int, start: int, steps: int) -> list[list[tuple[int, ...]]]:
    """(id, seeds) of a stream's rows at each step."""
    batches = itertools.islice(order.steps(range(stream, stream + 1), start), steps)
    return [[(int(i), *map(int, s)) for i, s in zip(*batch, strict=True)] for batch in batches]


@pytest.mark.parametrize("interleaved", [1, 2])
@pytest.mark.parametrize(("size", "repeats"), [(12, 3), (8, 3), (4, 5)])
def test_each_example_fills_so_many_rows_in_turn(size, repeats, interleaved):
    """Over three epochs of the examples; 12 rows of a step are 4 whole examples, 8 are not."""
    once = Order(COUNTS, 5, 2, 1, 10, interleaved=interleaved)
    order = dataclasses.replace(once, rows=size, repeats=repeats)
    for stream in range(2):
        steps = -(-3 * 51 * repeats // size)
        examples = [row for (row,) in rows(once, stream, 0, steps * size // repeats + 1)]
        seen: dict[int, list[tuple[int, ...]]] = collections.defaultdict(list)
        for number, batch in enumerate(rows(order, stream, 0, steps)):
            places = [place // repeats for place in range(number * size, (number + 1) * size)]
            assert sorted(row[0] for row in batch) == sorted(examples[p][0] for p in places)
            for id_, *seeds in batch:
                seen[id_].append(tuple(seeds))
        assert all(len(set(seeds)) == len(seeds) for seeds in seen.values())
        plain = {(id_, tuple(seeds)) for id_, *seeds in examples[: 3 * 51]}
        assert plain <= {(id_, s) for id_, every in seen.items() for s in every}


def test_neighbours_are_different_examples():
    """So that mixing an image with its neighbour mixes two images. 8 examples are 2 steps."""
    order = Order((16, 32), 5, 1, 12, 8, repeats=3)
    for batch in rows(order, 0, 0, 20):
        ids = [row[0] for row in batch]
        assert ids == ids[:4] * 3 and len(set(ids)) == 4


@pytest.mark.parametrize("start", [1, 7, 20])
def test_a_stream_goes_on_at_any_step(start):
    order = Order(COUNTS, 5, 2, 8, 10, repeats=3)
    whole = rows(order, 1, 0, 40)
    assert rows(order, 1, start, 40 - start) == whole[start:]
    assert order.batch_ids(start).tolist()[8:] == [row[0] for row in whole[start]]


def test_streams_have_rows_for_all_copies_of_an_example():
    """24 rows of 12 streams would be 2 each."""
    streams = {r: Order.make(COUNTS, 0, 24, 12, 48, r).streams for r in (1, 2, 3, 5, 24, 100)}
    assert streams == {1: 12, 2: 12, 3: 6, 5: 4, 24: 1, 100: 1}
    one, other = (Order.make(COUNTS, 0, 24, 12, 48, *r).batch_ids(3) for r in ((), (1,)))
    np.testing.assert_array_equal(one, other)
