"""NCF's training examples and rankings against brute force: their order, and the items drawn."""

import collections
import random

import numpy as np
import pytest

from benchmarks.ncf.input_pipeline import NegativeSampler
from benchmarks.ncf.ratings import Ratings, index_ratings
from common import pools

NEGATIVES, EVAL_NEGATIVES = 4, 60


def ratings(seed=0, users=40, items=25):
    """Some users have rated almost every item, so that draws seldom have a choice."""
    draw = random.Random(seed)
    rows = [
        (user, item, draw.randint(0, 99))
        for user in range(users)
        for item in draw.sample(range(items), draw.choice([2, 3, 10, items - 2, items - 1]))
    ]
    return Ratings(*(np.array(column, np.uint32) for column in zip(*rows, strict=True)))


@pytest.fixture(scope="module")
def data():
    return index_ratings(ratings(), 2, "a test")


def positives(data):
    """[{item, ...}] of each user, to train on."""
    return [
        set(data.items[a:b].tolist())
        for a, b in zip(data.starts[:-1], data.starts[1:], strict=True)
    ]


# --- Training.


def epoch(sampler, number):
    return sampler.train(np.arange(sampler.epoch_size) + number * sampler.epoch_size)


def test_an_epoch_has_each_positive_once_and_negatives_beside_it(data):
    sampler, own = NegativeSampler(data, 0, NEGATIVES, EVAL_NEGATIVES), positives(data)
    assert sampler.epoch_size == sum(map(len, own)) * (1 + NEGATIVES)
    for number in (0, 3):
        batch = epoch(sampler, number)
        rows = list(zip(batch["user"].tolist(), batch["item"].tolist(), strict=True))
        yes = collections.Counter(rows[i] for i in np.flatnonzero(batch["label"]))
        assert yes == {(user, item): 1 for user, items in enumerate(own) for item in items}
        no = [rows[i] for i in np.flatnonzero(~batch["label"])]
        assert all(item not in own[user] for user, item in no)
        drawn = collections.Counter(user for user, _ in no)
        assert drawn == {user: NEGATIVES * len(items) for user, items in enumerate(own)}
        assert sorted(batch["id"].tolist()) == list(range(sampler.epoch_size))


def test_negatives_are_drawn_evenly_from_the_items_a_user_does_not_train_on(data):
    """The held-out item may be drawn, too: training does not know it."""
    sampler, own = NegativeSampler(data, 0, NEGATIVES, EVAL_NEGATIVES), positives(data)
    counts = collections.Counter()
    for number in range(200):
        batch = epoch(sampler, number)
        no = ~batch["label"]
        counts.update(zip(batch["user"][no].tolist(), batch["item"][no].tolist(), strict=True))
    chi2 = freedom = 0
    for user, items in enumerate(own):
        free = [item for item in range(data.num_items) if item not in items]
        expected = 200 * NEGATIVES * len(items) / len(free)
        assert counts[user, int(data.held_out[user])] > 0
        chi2 += sum((counts[user, item] - expected) ** 2 / expected for item in free)
        freedom += len(free) - 1
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5


def test_epochs_and_seeds_draw_anew(data):
    sampler = NegativeSampler(data, 0, NEGATIVES, EVAL_NEGATIVES)
    other = NegativeSampler(data, 1, NEGATIVES, EVAL_NEGATIVES)
    one = epoch(sampler, 0)
    for batch in (epoch(sampler, 1), epoch(other, 0)):
        assert not np.array_equal(batch["id"], one["id"])
        a, b = (x["item"][np.argsort(x["id"])] for x in (one, batch))
        same = (a == b) & (np.arange(len(a)) % (1 + NEGATIVES) > 0)
        assert same.mean() < 0.5


def test_any_step_is_computed_alone_and_across_epochs(data):
    sampler = NegativeSampler(data, 5, NEGATIVES, EVAL_NEGATIVES)
    size = sampler.epoch_size
    expected = [epoch(sampler, k) for k in range(3)]
    joined = {k: np.concatenate([batch[k] for batch in expected]) for k in expected[0]}
    for first, count in ((0, 7), (size - 3, 10), (2 * size - 1, 1), (size // 2, 2 * size)):
        actual = NegativeSampler(data, 5, NEGATIVES, EVAL_NEGATIVES).train(
            np.arange(first, first + count)
        )
        for name in ("user", "item", "label", "id"):
            assert np.array_equal(actual[name], joined[name][first : first + count]), name


@pytest.mark.parametrize(("cores", "threads"), [(6, 8), (1, 3)])
def test_bytes_of_the_index_and_of_the_batches_being_drawn(cores, threads, data, monkeypatch):
    monkeypatch.setattr(pools, "cores", lambda: cores)
    sampler = NegativeSampler(data, 0, NEGATIVES, EVAL_NEGATIVES)
    index = data.nbytes + 4 * (2 * data.num_positives + 40)  # int32 of examples and users
    assert sampler.host_bytes("train", 10) == (index, threads * 6_553_600)
    assert sampler.host_bytes("train", 100_000) == (index, threads * 10_000_000)
    assert sampler.host_bytes("eval", 10) == (index, threads * 10 * 61 * 4)
    ranked = NegativeSampler(data, 0, NEGATIVES, 0).host_bytes("eval", 10)
    assert ranked == (index, threads * 10 * data.num_items * 2)


def test_examples_are_described_with_the_ids_of_the_file():
    raw = ratings(users=3, items=25)
    data = index_ratings(Ratings(raw.users * 11 + 5, raw.items + 100, raw.times), 2, "a test")
    sampler = NegativeSampler(data, 0, NEGATIVES, EVAL_NEGATIVES)
    user, item = data.user_ids[0], data.item_ids[data.items[0]]
    assert sampler.describe(0) == f"user {user}, item {item}"
    assert sampler.describe(1) == f"a negative drawn beside user {user}, item {item}"


# --- Evaluation.


def test_candidates_are_the_held_out_item_and_items_the_user_has_not_rated(data):
    users = np.arange(data.num_users, dtype=np.int32)
    actual = NegativeSampler(data, 0, NEGATIVES, EVAL_NEGATIVES).candidates(users)
    assert actual.shape == (data.num_users, 1 + EVAL_NEGATIVES) and actual.dtype == np.int32
    assert np.array_equal(actual[:, 0], data.held_out)
    for user, own in enumerate(positives(data)):
        own |= {int(data.held_out[user])}
        free = set(range(data.num_items)) - own
        assert set(actual[user, 1:].tolist()) <= free
        if len(free) < 3:  # 60 draws of one or two
            assert set(actual[user, 1:].tolist()) == free


def test_candidates_are_drawn_evenly(data):
    users = np.arange(data.num_users, dtype=np.int32)
    items = NegativeSampler(data, 0, NEGATIVES, 2000).candidates(users)
    chi2 = freedom = 0
    for user, own in enumerate(positives(data)):
        free = sorted(set(range(data.num_items)) - own - {int(data.held_out[user])})
        counts = np.bincount(items[user, 1:], minlength=data.num_items)[free]
        chi2 += ((counts - 2000 / len(free)) ** 2 * len(free) / 2000).sum()
        freedom += len(free) - 1
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5


def test_candidates_are_a_function_of_seed_and_user(data):
    users = np.arange(data.num_users, dtype=np.int32)
    expected = NegativeSampler(data, 2, NEGATIVES, EVAL_NEGATIVES).candidates(users)
    assert np.array_equal(
        NegativeSampler(data, 2, 1, EVAL_NEGATIVES).candidates(users[7:9]), expected[7:9]
    )
    assert not np.array_equal(
        NegativeSampler(data, 3, NEGATIVES, EVAL_NEGATIVES).candidates(users), expected
    )


def test_lookups_in_pieces_are_the_same(data, monkeypatch):
    users = np.arange(data.num_users, dtype=np.int32)
    expected = NegativeSampler(data, 2, NEGATIVES, EVAL_NEGATIVES).candidates(users)
    monkeypatch.setattr("benchmarks.ncf.input_pipeline._PIECE", 7)
    assert np.array_equal(
        NegativeSampler(data, 2, NEGATIVES, EVAL_NEGATIVES).candidates(users), expected
    )
