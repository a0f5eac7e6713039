"""Full ranking: its scores against loops over a sorted list, its batches, all items' logits."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from benchmarks.base import BATCH_AXES
from benchmarks.ncf import models, ranking
from configs import ncf
from engine import sharding
from engine.step import make_predict_step
from tests.conftest import opened


def brute_force(scores, chosen, relevant, cut):
    """The scores of one ranking, by a walk down the sorted list; ties and nan come first."""
    order = sorted(
        set(range(len(scores))) - chosen,
        key=lambda i: (-math.inf if math.isnan(scores[i]) else -scores[i], i in relevant),
    )
    lost = {i for i in relevant if math.isnan(scores[i]) or scores[i] == -math.inf}
    found = [item in relevant - lost for item in order if item not in lost][:cut]
    places = [place for place, hit in enumerate(found, 1) if hit]
    ideal = min(len(relevant), cut)
    return {
        "hr": float(bool(places)),
        "ndcg": sum(1 / math.log2(p + 1) for p in places)
        / sum(1 / math.log2(p + 1) for p in range(1, ideal + 1)),
        "recall": len(places) / len(relevant),
        "mrr": max((1 / p for p in places), default=0.0),
        "map": sum(k / p for k, p in enumerate(places, 1)) / ideal,
    }


@pytest.mark.parametrize("items", [3, 19, 20, 64, 301])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_full_ranking_is_a_walk_down_the_list(items, levels):
    """Few levels make many ties, also at the end of the list; a user may have all but one item."""
    draw = np.random.default_rng((items, levels))
    rank = jax.jit(jax.vmap(ranking.full_ranking))
    users = 60
    scores = draw.integers(0, levels, (users, items)).astype(np.float32)
    scores[draw.random(scores.shape) < 0.02] = np.nan
    kinds = draw.choice(3, scores.shape, p=[0.5, 0.3, 0.2])  # neither, chosen, relevant
    kinds[:, 0] = 2  # everybody has one
    bits = [np.packbits(kinds == kind, axis=1) for kind in (1, 2)]
    actual = rank(scores, *bits)
    for u in range(users):
        chosen, relevant = ({*np.flatnonzero(kinds[u] == kind).tolist()} for kind in (1, 2))
        for cut in ranking.CUTS:
            expected = brute_force(scores[u].tolist(), chosen, relevant, cut)
            for kind, value in expected.items():
                got = float(actual[f"{kind}_at_{cut}"][u])
                assert got == pytest.approx(value, abs=1e-6), (u, kind, cut)
        top = [i for i in actual["top"][u].tolist() if i >= 0]
        assert len({*top}) == len(top) and not chosen & {*top}


def test_a_model_that_gives_all_items_one_score_hits_nothing():
    bits = jnp.packbits(jnp.arange(100) == 99)
    actual = ranking.full_ranking(jnp.zeros(100), jnp.zeros_like(bits), bits)
    assert float(actual["hr_at_20"]) == 0


def test_coverage_and_the_share_of_popular_items():
    top = np.array([[0, 1, 2, 3, 4, *range(5, 20)], [0, 1, 7, 8, 9, *[-1] * 15]])
    counts = np.array([9, 8, *[1] * 8, *[0] * 15])  # of 25 items, 5 are popular
    actual = ranking.breadth(top, counts)
    assert actual["coverage_at_5"] == 8 / 25 and actual["coverage_at_20"] == 20 / 25
    assert actual["popular_share_at_5"] == (5 + 2) / 10
    assert actual["popular_share_at_20"] == (5 + 2) / 25


@pytest.mark.parametrize("layers", [(6,), (8, 5), (8, 16, 4)])
def test_the_logits_of_all_items_are_those_of_pairs(layers):
    model = models.NeuMF(7, 11, 3, layers)
    pairs = np.arange(7)[:, None], np.arange(11)[None]
    shapes = jax.eval_shape(model.init, jax.random.key(0), *pairs)["params"]
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)
    actual = jax.vmap(model.of_all_items(params))(params["users"]["embedding"])
    expected: Any = model.apply({"params": params}, *pairs)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def write_log(folder, least):
    """Ratings of 23 users, each of `least` to 19 of 40 items."""
    draw = np.random.default_rng(5)
    rows = [
        (user, item, 1, 10 * user + draw.integers(200))
        for user in range(1, 24)
        for item in draw.choice(40, draw.integers(least, 20), replace=False)
    ]
    text = "".join(f"{','.join(map(str, row))}\n" for row in rows)
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + text)


@pytest.mark.parametrize("holdout", ["latest", "40%"])
def test_an_evaluation_ranks_each_user_once(holdout, tmp_path):
    """Whatever the batch and the number of hosts; scores are those of a loop over users."""
    write_log(tmp_path, least=2)
    config = ncf.get_config()
    config.update({"data_dir": str(tmp_path), "min_ratings": 2, "eval_negatives": "all"})
    config.update({"eval_holdout": holdout, "gmf_dim": 4, "mlp_layers": (8, 8)})
    benchmark: Any = opened(benchmarks.load(config.lock(), ""))
    data = benchmark.complete
    params, _ = benchmark.init(jax.random.key(1))
    devices = sharding.make(BATCH_AXES, 1, jax.devices())
    predict = make_predict_step(benchmark.predict, devices)  # as a run has it, on 8 devices
    results = []
    for size, hosts in ((32, 1), (4, 1), (8, 2)):
        out = []
        for host in range(hosts):
            for batch in benchmark.eval_batches(size, host, hosts):
                (spec,) = benchmark.batch_spec("eval", size // hosts)
                assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
                    k: (v.shape, v.dtype) for k, v in spec.items()
                }
                if size // hosts == 32:
                    output = predict(params, {}, batch)
                else:
                    output = benchmark.predict(params, {}, batch)
                out.append({k: np.asarray(v)[batch["mask"] > 0] for k, v in output.items()})
        users = np.concatenate([row["user"] for row in out])
        assert sorted(users.tolist()) == data.evaluated.tolist()
        results.append(benchmark.score(iter(out)))
    assert set(results[0]) >= set(benchmark.score_names)
    expected = []
    for u in data.evaluated.tolist():
        scores = benchmark.logits(params, np.array([u]), np.arange(data.num_items)[None])[0]
        chosen = {*data.items[data.starts[u] : data.starts[u + 1]].tolist()}
        relevant = {*data.held_out[data.held_starts[u] : data.held_starts[u + 1]].tolist()}
        expected.append(brute_force(scores.tolist(), chosen, relevant, 10))
    for kind in ("hr", "ndcg", "recall", "mrr", "map"):
        mean = np.mean([each[kind] for each in expected])
        for result in results:
            assert result[f"{kind}_at_10"] == pytest.approx(mean, abs=1e-6)
    assert len({result["coverage_at_10"] for result in results}) == 1
