"""The vectors that NCF gives to search engines, against NumPy."""

from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
from benchmarks.ncf import use
from common.errors import CheckpointError
from configs import ncf
from tests.conftest import opened

WIDTH, FACTORS = 5, 3


@pytest.fixture
def trained(tiny_ratings):
    """(uses, parameters, logits f64[users, items] by NumPy) of a NeuMF of random weights."""
    config = ncf.get_config()
    config.update({"data_dir": tiny_ratings, "min_ratings": 2, "eval_negatives": 10})
    config.update({"gmf_dim": FACTORS, "mlp_layers": (4, 6, 2)})
    benchmark: Any = opened(benchmarks.load(config.lock(), ""))
    shapes, _ = jax.eval_shape(benchmark.init, jax.random.key(0))
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)
    w = jax.tree.map(np.float64, params)
    users, items = w["users"]["embedding"][:, None], w["items"]["embedding"][None]
    users, items = np.broadcast_arrays(users, items)
    hidden = np.concatenate([users[..., FACTORS:], items[..., FACTORS:]], -1)
    for layer in ("mlp_0", "mlp_1"):
        hidden = np.maximum(hidden @ w[layer]["kernel"] + w[layer]["bias"], 0)
    both = np.concatenate([users[..., :FACTORS] * items[..., :FACTORS], hidden], -1)
    return benchmark.uses, params, (both @ w["logit"]["kernel"] + w["logit"]["bias"])[..., 0]


@pytest.mark.parametrize("most", [100, 10])
def test_search_vectors_are_the_least_squares_fit_of_the_logits(trained, most, monkeypatch):
    """Of at most 10 of the 23 users, which is each third one."""
    monkeypatch.setattr(use, "_FITTED", most)
    uses, params, logits = trained
    items, matrix = uses.search_vectors(params)
    own = np.insert(np.float64(params["users"]["embedding"]), WIDTH, 1, axis=1)
    chosen = slice(None, None, 1 if most == 100 else 3)
    solution, *_ = np.linalg.lstsq(own[chosen], logits[chosen])
    users = own @ matrix
    np.testing.assert_allclose(users @ items.T, own @ solution, rtol=1e-4, atol=1e-4)
    covariance = np.cov(users[chosen, :-1].T, bias=True)
    np.testing.assert_allclose(covariance, np.eye(WIDTH), atol=1e-5)
    np.testing.assert_allclose(users[:, -1], 1, rtol=1e-6)
    directions = items[:, :-1] / np.linalg.norm(items[:, :-1], axis=1, keepdims=True)
    correlations = np.corrcoef((own @ solution)[chosen].T)
    np.testing.assert_allclose(directions @ directions.T, correlations, atol=1e-4)


def test_a_table_whose_users_are_alike_has_fewer_numbers(trained):
    uses, params, logits = trained
    table = np.outer(np.arange(23), np.ones(WIDTH)).astype(np.float32)
    items, matrix = uses.search_vectors({**params, "users": {"embedding": table}})
    assert items.shape == (12, 2) and matrix.shape == (WIDTH + 1, 2) and len(logits) == 23


def test_a_diverged_model_has_no_vectors(trained):
    uses, params, _ = trained
    table = np.full((23, WIDTH), np.nan, np.float32)
    with pytest.raises(CheckpointError, match="not finite"):
        uses.search_vectors({**params, "users": {"embedding": table}})
