"""A trained NCF model as a function for other programs, see `ops.portable.Program`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ops.portable import Arrays, Program
from ops.tables import csv_text

_MEANING = {
    "user": "ids of users, as in the file of ratings",
    "item": "ids of items, as in the file of ratings; items.csv lists them",
    "score": "the probability that the user rates the item; NaN for an unknown id",
}


def make(benchmark: Any, params: Any, titles: Mapping[int, str]) -> Program:
    """The program of a model, for pairs of a user and an item.

    Args:
      benchmark: a `benchmarks.ncf.Ncf` with its ratings.
      params: NumPy arrays.
      titles: of items by their ids, as far as they are known.
    """
    params = jax.tree.map(jnp.asarray, params)
    users, items = benchmark.data.user_ids, benchmark.data.item_ids

    def compute(inputs: Arrays) -> Arrays:
        user, is_user = _row(jnp.asarray(users), inputs["user"])
        item, is_item = _row(jnp.asarray(items), inputs["item"])
        logits = benchmark.logits(params, user, item[:, None])[:, 0]
        return {"score": jnp.where(is_user & is_item, jax.nn.sigmoid(logits), jnp.nan)}

    def examples(pictures: Sequence[bytes]) -> Sequence[Arrays]:
        del pictures
        draw = np.random.default_rng(0)
        pairs = {"user": draw.choice(users, 16), "item": draw.choice(items, 16)}
        return [pairs, {name: ids[:1] for name, ids in pairs.items()}]

    rows = [(item, titles.get(item, "")) for item in items.tolist()]
    return Program(
        task="says how probably a user rates an item",
        compute=compute,
        inputs={"user": ("batch", np.uint32), "item": ("batch", np.uint32)},
        meaning=_MEANING,
        examples=examples,
        files={"items.csv": csv_text([("item", "title"), *rows]).encode()},
    )


def _row(ids: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where `numbers` uint32[b] are in rising ids uint32[n]: int32[b], and bool[b], if they are."""
    rows = jnp.minimum(jnp.searchsorted(ids, numbers), len(ids) - 1)
    return rows, ids[rows] == numbers
