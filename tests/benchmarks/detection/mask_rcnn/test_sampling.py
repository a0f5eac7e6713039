"""Random samples: how many, of which, and that devices do not matter."""

import jax
import numpy as np
import pytest

from benchmarks.detection.mask_rcnn import sampling

DRAW, FOLD = jax.jit(sampling.draw), jax.jit(sampling.fold)
BALANCED = jax.jit(sampling.balanced, static_argnums=2)


def keys(rng: np.random.Generator, count: int) -> np.ndarray:
    """int32[count], negative ones among them."""
    return rng.integers(-(2**31), 2**31, count).astype(np.int32)


def test_as_many_are_drawn_as_asked_for_and_only_eligible_ones():
    rng = np.random.default_rng(0)
    eligible = rng.random((200, 70)) < rng.choice([0, 0.1, 0.5, 1], (200, 1))
    k = rng.integers(0, 80, 200).astype(np.int32)
    marks = np.asarray(DRAW(eligible, k, keys(rng, 200)))
    assert not (marks & ~eligible).any()
    np.testing.assert_array_equal(marks.sum(1), np.minimum(k, eligible.sum(1)))


def test_each_eligible_position_is_drawn_equally_often():
    """Also with keys that follow each other, as the numbers of examples do."""
    eligible = np.broadcast_to(np.arange(50) % 2 == 0, (4000, 50))
    counts = np.asarray(DRAW(eligible, np.int32(5), np.arange(4000, dtype=np.int32))).sum(0)
    expected, freedom = 4000 * 5 / 25, 24
    chi2 = ((counts[::2] - expected) ** 2 / expected).sum() / (1 - 5 / 25)
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5, counts


def test_a_draw_depends_on_the_key_alone():
    """Whichever rows are beside it; and another number gives another draw."""
    rng = np.random.default_rng(1)
    eligible, key = rng.random((16, 300)) < 0.8, keys(rng, 16)
    together = np.asarray(DRAW(eligible, 20, key))
    order = rng.permutation(16)
    np.testing.assert_array_equal(DRAW(eligible[order], 20, key[order]), together[order])
    np.testing.assert_array_equal(DRAW(eligible[3:4], 20, key[3:4]), together[3:4])
    folded = [np.asarray(FOLD(key, number)) for number in (0, 1)]
    assert folded[0].dtype == np.int32 and len({*key, *folded[0], *folded[1]}) == 48
    drawn = [together, *(np.asarray(DRAW(eligible, 20, each)) for each in folded)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (drawn[a] & drawn[b]).sum() < 16 * 20 / 4  # by chance it is 1 of 12


@pytest.mark.parametrize(("total", "share"), [(256, 0.5), (32, 0.25), (7, 0.0), (9, 1.0)])
def test_negatives_take_the_place_of_missing_positives(total, share):
    rng = np.random.default_rng(total)
    kind = rng.random((60, 400))
    positive = kind < rng.choice([0, 0.01, 0.3], (60, 1))
    negative = kind > rng.choice([0.4, 0.99], (60, 1))
    rule = sampling.Sampling(total, share, 0.5, 0.5)
    drawn, others = map(np.asarray, BALANCED(positive, negative, rule, keys(rng, 60)))
    assert not (drawn & ~positive).any() and not (others & ~negative).any()
    first = np.minimum(positive.sum(1), int(total * share))
    np.testing.assert_array_equal(drawn.sum(1), first)
    np.testing.assert_array_equal(others.sum(1), np.minimum(negative.sum(1), total - first))
