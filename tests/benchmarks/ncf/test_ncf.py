"""NCF's model, metric and facts against NumPy, and its refusals."""

import collections
import csv
import io
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from mlperf_compliance import tags

import benchmarks
from benchmarks import mlperf
from benchmarks.ncf import ranking, use
from common.errors import ConfigError, DataError
from configs import ncf
from tests.conftest import opened
from tests.helpers.mlperf_fixture import mlperf_config, write_run

SMALL: dict[str, Any] = {
    "num_users": 7,
    "num_items": 5,
    "num_ratings": 40,
    "gmf_dim": 3,
    "mlp_layers": (4, 6, 2),
}


def configuration(**overrides: Any) -> ConfigDict:
    config = ncf.get_config()
    config.update(overrides)
    return config.lock()


def load(**overrides):
    return benchmarks.load(configuration(**overrides), "")


# --- The model.


def test_parameters_on_ml_20m():
    """138,493 + 26,744 rows of 64 + 128; 256 -> 256 -> 128 -> 64; 64 + 64 -> 1."""
    shapes, state = jax.eval_shape(load().init, jax.random.key(0))
    tables = (138_493 + 26_744) * 192
    dense = 256 * 256 + 256 + 256 * 128 + 128 + 128 * 64 + 64 + 128 + 1
    assert sum(x.size for x in jax.tree.leaves(shapes)) == tables + dense == 31_832_577
    assert state == {} and {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


@pytest.mark.long
def test_initial_weights_are_glorots_and_the_last_lecuns():
    params, _ = load(num_users=500, num_items=300, num_ratings=9000).init(jax.random.key(0))
    for name, fans in {"users": (500, 192), "items": (300, 192), "mlp_1": (256, 128)}.items():
        leaf = params[name]["embedding" if "mlp" not in name else "kernel"]
        limit = (6 / sum(fans)) ** 0.5
        assert 0.98 * limit < np.abs(leaf).max() <= limit
        assert np.std(leaf) == pytest.approx(limit / 3**0.5, rel=0.02)
    assert 0.9 * (3 / 128) ** 0.5 < np.abs(params["logit"]["kernel"]).max() <= (3 / 128) ** 0.5


@pytest.fixture(scope="module")
def weights():
    shapes, _ = jax.eval_shape(load(**SMALL).init, jax.random.key(0))
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)


def logit(weights, user, item):
    """NeuMF of one pair, in float64."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
    u, i = w["users"]["embedding"][user], w["items"]["embedding"][item]
    hidden = np.concatenate([u[3:], i[3:]])
    for layer in ("mlp_0", "mlp_1"):
        hidden = np.maximum(hidden @ w[layer]["kernel"] + w[layer]["bias"], 0)
    both = np.concatenate([u[:3] * i[:3], hidden])
    return float((both @ w["logit"]["kernel"] + w["logit"]["bias"])[0])


def test_loss_is_the_cross_entropy_of_numpys_neumf(weights):
    users, items = (x.ravel() for x in np.indices((7, 5), np.int32))
    labels = (users + items) % 3 == 0
    batch = {"user": users, "item": items, "label": labels}
    terms, metrics, state = load(**SMALL).loss(weights, {}, batch, jax.random.key(0))
    expected = []
    for user, item, label in zip(users, items, labels, strict=True):
        yes = 1 / (1 + np.exp(-logit(weights, user, item)))
        expected.append(-np.log(yes if label else 1 - yes))
    ((value, weight),) = terms.values()
    assert float(value) == pytest.approx(sum(expected), rel=1e-5)
    assert (weight, metrics, state) == (35, {}, {})


def test_prediction_ranks_by_numpys_neumf(weights):
    benchmark = load(**SMALL, eval_negatives=12)
    draw = np.random.default_rng(1)
    users = np.arange(7, dtype=np.int32)
    items = draw.integers(0, 5, (7, 13)).astype(np.int32)
    batch: Any = {"user": users, "items": items}
    actual = benchmark.predict(weights, {}, batch)
    for u in range(7):
        others = set(items[u].tolist()) - {int(items[u, 0])}
        own = logit(weights, u, items[u, 0])
        rank = sum(logit(weights, u, item) >= own for item in others)
        assert float(actual["hr_at_10"][u]) == 1  # of at most 4 others
        assert float(actual["ndcg_at_10"][u]) == pytest.approx(1 / np.log2(rank + 2), rel=1e-6)


# --- The metric.


def brute_rank(scores, items):
    """The rank of the first item, by a walk through the others."""
    seen, entries = {int(items[0])}, []
    for score, item in zip(scores[1:].tolist(), items[1:].tolist(), strict=True):
        if item not in seen:
            seen.add(item)
            entries.append(score)
    # A tie, or nan on either side, is not beaten.
    return sum(not score < scores[0] for score in entries)


@pytest.mark.parametrize("levels", [3, 50, 10_000])
@pytest.mark.parametrize("kinds", [8, 40, 5000])
def test_ranks_are_those_of_brute_force(levels, kinds):
    """Few levels: many ties. Few kinds: many items that come again, with the score they had."""
    draw = np.random.default_rng(levels + kinds)
    of_item = draw.integers(0, levels, kinds).astype(np.float32)
    items = draw.integers(0, kinds, (64, 100)).astype(np.int32)
    scores = of_item[items]
    actual = np.asarray(ranking.ranks(jnp.asarray(scores), jnp.asarray(items)))
    expected = [brute_rank(s, i) for s, i in zip(scores, items, strict=True)]
    assert actual.tolist() == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize(
    ("scores", "items", "rank"),
    [
        ([5, 1, 2], [0, 1, 2], 0),
        ([5, 7, 2], [0, 1, 2], 1),
        ([5, 5, 5], [0, 1, 2], 2),  # ties are lost
        ([5, 7, 7, 7], [0, 3, 3, 3], 1),  # once for each item
        ([5, 5, 5, 9], [0, 0, 3, 0], 1),  # and the item is not before itself
        ([np.nan, 1, 2], [0, 1, 2], 2),
        ([5, np.nan, 2], [0, 1, 2], 1),
        ([-np.inf, -np.inf, 2], [0, 1, 2], 2),
    ],
)
def test_the_rule_for_ties_and_duplicates(scores, items, rank):
    actual = ranking.ranks(jnp.array([scores], jnp.float32), jnp.array([items]))
    assert actual.tolist() == [rank]


def test_hits_and_gains():
    hit, gain = ranking.hr_and_ndcg(jnp.array([0, 1, 2, 9, 10, 500]))
    assert hit.tolist() == [1, 1, 1, 1, 0, 0]
    expected = [1, 1 / np.log2(3), 0.5, 1 / np.log2(11), 0, 0]
    np.testing.assert_allclose(gain, expected, rtol=1e-6)


def test_scores_are_means_over_users():
    def row(*hits: float) -> dict[str, np.ndarray]:
        users, hit = np.arange(len(hits), dtype=np.int32), np.array(hits, np.float32)
        return {"user": users, "hr_at_10": hit, "ndcg_at_10": hit / 2}

    benchmark: Any = load(**SMALL)
    actual = benchmark.own_scores(iter([row(1, 0, 0), row(1)]))
    assert actual == {"hr_at_10": 0.5, "ndcg_at_10": 0.25}


def test_the_groups_are_quarters_of_the_users_by_their_ratings():
    """Of all training ratings, whatever part a model is trained on; equal numbers stay together."""
    benchmark: Any = load(**SMALL)
    draw = np.random.default_rng(4)
    ratings = np.minimum(draw.geometric(0.08, 203), 40)
    hits = (draw.random(203) < 0.3 + ratings / 80).astype(np.float32)
    benchmark.complete = types.SimpleNamespace(starts=np.append(0, np.cumsum(ratings)))
    users = draw.permutation(203).astype(np.int32)  # two hosts give them in another order
    parts = [users[:70], users[70:]]
    rows = [{"user": some, "hr_at_10": hits[some], "ndcg_at_10": 0 * hits[some]} for some in parts]
    groups, seen = benchmark.group_scores(iter(rows)), []
    for name, (score, count) in groups.items():
        least, most = (int(word) for word in re.findall(r"\d+", name))
        some = [u for u in range(203) if least <= ratings[u] <= most]
        assert name == f"users with {least} to {most} ratings" and count == len(some)
        assert {least, most} <= set(ratings[some]) and score == pytest.approx(np.mean(hits[some]))
        seen += some
    assert len(groups) == 4 and sorted(seen) == list(range(203))


def test_the_ratings_of_a_user_without_the_one_held_out(tiny_ratings):
    benchmark: Any = load(data_dir=tiny_ratings, min_ratings=2)
    benchmark.open("eval")
    row = {"user": np.arange(23), "hr_at_10": np.arange(23) % 2}
    assert benchmark.group_scores(iter([row])) == {"users with 1 rating": (11 / 23, 23)}


# --- Facts and refusals.


def test_sizes_are_as_declared_or_ml_20ms():
    nominal, declared = load(), load(**SMALL)
    assert [nominal.declared_examples(split) for split in ("train", "eval")] == [0, 0]
    # 20,000,263 ratings without one for each of 138,493 users, each with 4 negatives.
    assert nominal.nominal_examples("train") == 19_861_770 * 5
    assert nominal.nominal_examples("eval") == 138_493
    for ask in (declared.declared_examples, declared.nominal_examples):
        assert [ask("train"), ask("eval")] == [33 * 5, 7]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"mlp_layers": (7, 6, 2)}, "config.mlp_layers=(7, 6, 2): the first width must be even"),
        ({"num_users": 9, "num_items": 9, "num_ratings": 9}, "config.num_ratings=9: must be more"),
        ({"num_users": 5}, "config.num_users=5, config.num_items=0"),
        ({"eval_holdout": "newest"}, "config.eval_holdout='newest': must be latest, random, none"),
        ({"eval_holdout": "date"}, "--config.eval_negatives=all"),
        ({"eval_negatives": "some"}, "config.eval_negatives='some'"),
    ],
)
def test_values_that_cannot_work_are_refused(overrides, says):
    with pytest.raises(ConfigError) as caught:
        load(**overrides)
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("key", ["num_users", "num_items", "num_ratings"])
def test_other_data_than_declared(key, tiny_ratings):
    right = {"num_users": 23, "num_items": 12, "num_ratings": 46}
    benchmark = load(data_dir=tiny_ratings, min_ratings=2, **{**right, key: right[key] + 1})
    with pytest.raises(DataError) as caught:
        benchmark.open("train")
    message = str(caught.value)
    assert f"config.{key}={right[key] + 1}, but {tiny_ratings} holds {right[key]}" in message
    assert "--config.num_users=23 --config.num_items=12 --config.num_ratings=46" in message


def test_the_sizes_of_the_data_and_of_batches(tiny_ratings):
    benchmark: Any = load(data_dir=tiny_ratings, min_ratings=2, eval_negatives=10)
    assert [benchmark.open(split) for split in ("train", "eval")] == [23 * 5, 23]
    assert benchmark.metadata["num_users"] == 23 and benchmark.metadata["num_items"] == 12
    batch = next(benchmark.train_batches(8, 0, 1, 2))
    assert benchmark.train_ids(8, 2) == batch["id"].tolist()
    del batch["host_seconds"]
    for split, some in (("train", batch), ("eval", next(benchmark.eval_batches(8, 0, 1)))):
        (spec,) = benchmark.batch_spec(split, 8)
        assert {k: v.shape for k, v in spec.items()} == {k: v.shape for k, v in some.items()}
    for split, keys in (("train", ("train_batch_size",)), ("eval", ("eval_batch_size",))):
        index, batches = benchmark._samplers[split].host_bytes(split, 4)
        keys += ("eval_negatives",) if split == "eval" else ()
        assert benchmark.host_bytes(split, 8, 2) == {(): index, keys: batches}


def test_the_most_examples_that_int32_can_number(tiny_ratings, monkeypatch):
    keys = {"data_dir": tiny_ratings, "min_ratings": 2}
    monkeypatch.setattr(np, "iinfo", lambda dtype: types.SimpleNamespace(max=23 * 5))
    assert load(**keys, train_negatives=4).open("train") == 23 * 5
    with pytest.raises(DataError, match=r"makes 138 examples per epoch.*--config\.train_negatives"):
        load(**keys, train_negatives=5).open("train")


ML_20M = {"num_users": 138_493, "num_items": 26_744, "num_ratings": 20_000_263}
V05 = {"format": "v0.5"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"mlperf": {"format": "mllog"}}, r"format='mllog'.*'v0\.5'"),
        ({"optimizer": "sgd"}, r"optimizer='sgd'"),
        ({"eval_holdout": "random"}, r"eval_holdout='random'.*'latest'"),
        ({"eval_negatives": "all"}, r"eval_negatives='all'"),
    ],
)
def test_logs_that_mlperf_has_not(overrides, words, tmp_path, clock):
    config = mlperf_config("ncf", **ML_20M, **{"mlperf": V05, **overrides})
    with pytest.raises(ConfigError, match=words):
        write_run(config, str(tmp_path), [], clock)


def test_what_the_log_of_an_mlperf_run_says(tmp_path, clock):
    config = mlperf_config("ncf", **ML_20M, mlperf=V05)
    write_run(config, str(tmp_path), [0.61, 0.64], clock)
    text = (tmp_path / "mlperf.log").read_text()
    used = {tag for tag in tags.NCF_TAGS if f" {tag}: " in text or f" {tag}\n" in text}
    assert set(tags.NCF_TAGS) - used == {"run_clear_caches", "input_shard"}
    for line in (
        *("opt_learning_rate: 0.0005", "opt_hp_Adam_epsilon: 1e-08", "input_size: 99308850"),
        *("eval_hp_num_users: 138493", "model_hp_mlp_layer_sizes: [256, 256, 128, 64]"),
        *("preproc_hp_num_eval: 999", "eval_target: 0.635", "model_hp_mf_dim: 64"),
    ):
        assert f" {line}\n" in text, line
    entry = mlperf.entry("ncf")
    assert (entry.name, entry.targets) == ("ncf", {"v0.5": {"hr_at_10": 0.635}})


# --- The report.


def test_the_hit_rate_by_popularity():
    """Against counts one by one; users whose items have as many ratings stay in one group."""
    draw = np.random.default_rng(2)
    items = np.minimum(draw.geometric(0.08, 900) - 1, 49).astype(np.int32)
    held_out = np.minimum(draw.geometric(0.08, 200) - 1, 49).astype(np.int32)
    data: Any = types.SimpleNamespace(items=items, num_items=50, held_out=held_out)
    data.num_users, data.held_starts, data.held_users = 200, np.arange(201), np.arange(200)
    columns = {"hr_at_10": draw.integers(0, 2, 200).astype(np.float32)}
    columns["ndcg_at_10"] = columns["hr_at_10"] * draw.random(200).astype(np.float32)
    users = draw.permutation(200)  # two hosts give the users in another order
    row = {"user": users, **{name: values[users] for name, values in columns.items()}}
    shown = use.popularity(data, use.by_user([row]))
    times = collections.Counter(items.tolist())
    rows = list(csv.DictReader(io.StringIO(shown.files["popularity.csv"].decode())))
    assert 5 < len(rows) <= 10 and sum(int(row["users"]) for row in rows) == 200
    least = [int(row["least_ratings"]) for row in rows]
    assert least == sorted(set(least))
    for row, bar in zip(rows, shown.bars, strict=True):
        bounds = int(row["least_ratings"]), int(row["most_ratings"])
        users = [u for u, i in enumerate(held_out) if bounds[0] <= times[i] <= bounds[1]]
        assert int(row["users"]) == bar.count == len(users)
        for name, values in columns.items():
            assert float(row[name]) == pytest.approx(np.mean(values[users]), abs=1e-6)
        assert bar.value == pytest.approx(columns["hr_at_10"][users].mean())
        assert int(row["items"]) == len({held_out[u] for u in users})
    for bar in shown.bars:
        assert bar.ideal == pytest.approx(columns["hr_at_10"].mean())


def test_a_part_has_a_share_of_each_users_ratings(tmp_path):
    """And at least one of each; the items to rank are those of the complete ratings."""
    draw = np.random.default_rng(0)
    rows = [
        f"{user},{item},5,{item}"
        for user, count in enumerate((2, 9, 17, 41), 1)
        for item in sorted(draw.choice(60, count, replace=False).tolist())
    ]
    (tmp_path / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *rows]))

    def make(fraction: float) -> Any:
        rules = {"min_ratings": 2, "eval_negatives": 10, "train_fraction": fraction}
        return opened(load(data_dir=str(tmp_path), **rules))

    complete, part = make(1.0), make(0.25)
    assert np.diff(part.data.starts).tolist() == [1, 2, 4, 10]
    for user in range(4):
        of_part, of_all = (
            x.data.items[slice(*x.data.starts[user : user + 2])] for x in (part, complete)
        )
        assert set(of_part) <= set(of_all) and (np.diff(of_part) > 0).all()
    assert part.num_examples("train") == 17 * 5 and part.collected(17 * 5) == (17, "ratings")
    for mine, theirs in zip(
        part.eval_batches(4, 0, 1), complete.eval_batches(4, 0, 1), strict=True
    ):
        for name in theirs:
            np.testing.assert_array_equal(mine[name], theirs[name])
    assert part.identity("eval") == complete.identity("eval")
