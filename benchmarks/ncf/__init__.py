"""Neural collaborative filtering on MovieLens (He et al. 2017, arXiv:1708.05031), MLPerf v0.5.

Glue between the protocol and what is in this folder: `ratings` reads files, `interactions` indexes
them, `sampling` makes batches, `model` is NeuMF, `metric` ranks.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.base import (
    Benchmark,
    HostBatch,
    Spec,
    Target,
    Terms,
    mean_scores,
)
from benchmarks.ncf import input_pipeline as sampling
from benchmarks.ncf import interactions, metric
from benchmarks.ncf import models as model
from errors import ConfigError
from ops import padding, parallel
from ops.shards import DataError

ML_20M = {"num_users": 138_493, "num_items": 26_744, "num_ratings": 20_000_263}
_TOGETHER = 65_536  # examples that one call draws, for several steps: short calls hold locks


def make(config: Any, cache_dir: str) -> Ncf:
    """See `benchmarks.load`.

    Raises:
      ConfigError: a value cannot work.
    """
    for key, least in (
        ("train_negatives", 1),
        ("eval_negatives", 10),  # fewer, and everybody is among the first 10
        ("min_ratings", 2),  # one to learn from, one to ask for
        ("gmf_dim", 1),
        ("num_users", 0),
        ("num_items", 0),
        ("num_ratings", 0),
    ):
        if config[key] < least:
            raise ConfigError(f"config.{key}={config[key]}: must be at least {least}")
    layers = config.mlp_layers
    if not layers or min(layers) < 1 or layers[0] % 2:
        raise ConfigError(
            f"config.mlp_layers={layers}: widths from the input on, of which the first must be "
            "even, as half of it is the user's"
        )
    if len({bool(config[key]) for key in ML_20M}) > 1:
        given = ", ".join(f"config.{key}={config[key]}" for key in ML_20M)
        raise ConfigError(f"{given}: give all three, or leave all at 0, which takes what is there")
    return Ncf(config, cache_dir)


class Ncf(Benchmark):
    """The benchmark protocol for NeuMF; an example is (user, item, 0 or 1), or a user to rank for.

    An epoch has each positive once, with `train_negatives` items drawn anew for it.
    """

    unit = "examples"

    def __init__(self, config: Any, cache_dir: str):
        self.targets = (Target(f"hr_at_{metric.TOP}", config.target),)
        self._config, self._cache = config, cache_dir

    @functools.cached_property
    def _model(self) -> model.NeuMF:
        config = self._config
        if config.num_users or not config.data_dir:  # without data: as declared, else ml-20m's
            users, items = (config[key] or ML_20M[key] for key in ("num_users", "num_items"))
        else:
            users, items = self._data.num_users, self._data.num_items
        return model.NeuMF(users, items, config.gmf_dim, tuple(config.mlp_layers))

    # Data.

    @functools.cached_property
    def _data(self) -> interactions.Interactions:
        config = self._config
        cache = f"{self._cache}/interactions" if self._cache else ""
        found = interactions.load(config.data_dir, config.min_ratings, cache)
        held = {"num_users": found.num_users, "num_items": found.num_items}
        held |= {"num_ratings": found.num_positives + found.num_users}
        for key in ("num_users", "num_items", "num_ratings"):
            if config[key] not in (0, held[key]):
                given = " ".join(f"--config.{k}={v}" for k, v in held.items())
                raise DataError(
                    f"config.{key}={config[key]}, but {config.data_dir} holds {held[key]}: is it "
                    f"the right set? If so: {given}, or 0 for each"
                )
        if self._count(found.num_positives) > np.iinfo(np.int32).max:
            raise DataError(
                f"{config.data_dir} makes {self._count(found.num_positives):,} examples, more than "
                "2^31: set a smaller --config.train_negatives"
            )
        return found

    def _count(self, positives: int) -> int:
        """Training examples in an epoch."""
        return positives * (1 + self._config.train_negatives)

    @functools.cached_property
    def _sampler(self) -> sampling.Sampler:
        config = self._config
        return sampling.Sampler(
            self._data, config.seed, config.train_negatives, config.eval_negatives
        )

    def num_examples(self, split: str) -> int:
        if split == "eval":
            return self._data.num_users
        return self._count(self._data.num_positives)

    def declared_examples(self, split: str) -> int:
        config = self._config
        return self._examples(split, config.num_users, config.num_ratings)

    def nominal_examples(self, split: str) -> int:
        declared = self.declared_examples(split)
        return declared or self._examples(split, ML_20M["num_users"], ML_20M["num_ratings"])

    def _examples(self, split: str, users: int, ratings: int) -> int:
        return users if split == "eval" else self._count(ratings - users)

    @property
    def metadata(self) -> dict[str, Any]:
        users, items = self._model.num_users, self._model.num_items
        return {
            "num_users": users,
            "num_items": items,
            "rows_of_tables": "users with enough ratings, and the items they rated, by id",
        }

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        if split == "train":
            shapes = {"user": ((), np.int32), "item": ((), np.int32)}
            shapes |= {"label": ((), np.bool_), "id": ((), np.int32)}
        else:
            items = (1 + self._config.eval_negatives,)
            shapes = {"user": ((), np.int32), "items": (items, np.int32), "mask": ((), np.float32)}
        return ({k: jax.ShapeDtypeStruct((batch_size, *s), d) for k, (s, d) in shapes.items()},)

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        share, sampler = batch_size // num_shards, self._sampler
        together = max(1, min(_TOGETHER, sampler.epoch_size) // share)
        rows = np.arange(together)[:, None] * batch_size + shard * share + np.arange(share)

        def work(step: int) -> HostBatch:
            return sampler.train(step * batch_size + rows.ravel())

        for made in parallel.in_order(work, itertools.count(start_step, together)):
            for first in range(0, rows.size, share):
                yield {name: values[first : first + share] for name, values in made.items()}

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        positions = np.arange(step * batch_size, (step + 1) * batch_size)
        return self._sampler.examples(positions)[1].tolist()

    def describe(self, ids: list[int]) -> list[str]:
        return [self._sampler.where(i) for i in ids]

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        total, share, sampler = self.num_examples("eval"), batch_size // num_shards, self._sampler

        def work(rows: range) -> HostBatch:
            users = np.asarray(rows, np.int32)
            batch = {"user": users, "items": sampler.candidates(users)}
            return padding.pad(batch, len(rows), share)

        return parallel.in_order(work, padding.slices(total, batch_size, shard, num_shards))

    def host_bytes(self, batch_size: int, num_shards: int) -> int:
        """The index, which each host holds whole, and what its threads are drawing."""
        asked = self._config.eval_batch_size // num_shards * (1 + self._config.eval_negatives)
        drawn = max(_TOGETHER, batch_size // num_shards)
        ahead = (os.cpu_count() or 1) + 2
        return self._sampler.nbytes + ahead * max(100 * drawn, 4 * asked)

    # Forward pass, loss and score.

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        row = np.zeros((1, 1), np.int32)
        return self._model.init(rng, row, row)["params"], {}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Binary cross-entropy of "has this user rated this item"; `rng` is not used."""
        del rng
        logits = self._logits(params, batch["user"], batch["item"][:, None])[:, 0]
        entropy = optax.sigmoid_binary_cross_entropy(logits, batch["label"].astype(logits.dtype))
        return {"cross_entropy": (entropy.sum(), jnp.float32(len(entropy)))}, {}, model_state

    def _logits(self, params: Any, user: jax.Array, items: jax.Array) -> jax.Array:
        """f32[b, n] for i32[b] and i32[b, n]."""
        found: Any = self._model.apply({"params": params}, user[:, None], items)
        return found

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Whether the held-out item is among the first 10, and its gain there, for each user."""
        del model_state
        scores = self._logits(params, batch["user"], batch["items"])
        hit, gain = metric.hits(metric.ranks(scores, batch["items"]))
        return {f"hr_at_{metric.TOP}": hit, f"ndcg_at_{metric.TOP}": gain}

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        return mean_scores(rows)
