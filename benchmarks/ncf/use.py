"""Uses a trained NCF model: recommends items, shows its rankings, exports it as a `Program`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.base import span
from benchmarks.exhibits import csv_file, even_groups
from benchmarks.ncf.baselines import NEIGHBOURS
from benchmarks.ncf.models import NeuMF
from benchmarks.ncf.names import NAMES, TITLES, Finder, read_names
from benchmarks.ncf.ranking import TOP
from benchmarks.ncf.ratings import Interactions
from benchmarks.uses import Bar, Exhibit, Items
from common.errors import CheckpointError, DataError
from common.exportable import Arrays, ExportableProgram
from common.progress import report_progress

if TYPE_CHECKING:
    from benchmarks.ncf import Ncf

_log = logging.getLogger("tpu_suite")
_GROUPS = 10  # deciles
_ROWS = "rows_digest", "names_digest"  # an earlier version has not the second one
# Training of a new user's vector; docs/ncf.md has measurements.
_NEIGHBOURS = 10  # known users of whom it is the mean at first
_STEPS, _RATE = 30, 0.01
_POSITIVES = 64  # items in a step; four times as many negatives, as in training
_AT_ONCE, _FEWER = 256, 32  # of many new users, with items that do as well in half the time
_FITTED = 2048  # users to whose logits the items' search vectors are fitted, at most
# The inputs and outputs of the program.
_MEANING = {
    "user": "ids of users, as in the file of ratings; users.csv, if any, lists them",
    "item": "ids of items, as in the file of ratings; items.csv lists them",
    "score": "the probability that the user rates the item; NaN for an unknown id, and for a user "
    "whose items are all held out",
}


class NcfUses(Items):
    """The uses of a model of users and items, with the ids in the file of ratings."""

    commands = {
        "recommend items to a user": "python predict.py --user=1 --top=10 --workdir={workdir}"
    }

    def __init__(self, benchmark: Ncf):
        self._benchmark = benchmark
        self._fit = jax.jit(functools.partial(fit_vector, benchmark.logits))

    def check_files(self, manifest: Mapping[str, Any], source: str) -> None:
        """Refuses ratings with other users or items, which number the rows of the tables."""
        try:
            self._benchmark.open("train")
        except DataError as error:
            raise DataError(f"{error}; --data_dir names another folder of the ratings") from error
        metadata = self._benchmark.metadata
        if any(manifest.get(key, metadata[key]) != metadata[key] for key in _ROWS):
            raise CheckpointError(
                f"the ratings in {self._benchmark.settings.data_dir} have other users or items "
                f"than {source}: give the --data_dir that the model was trained on"
            )

    def programs(self, params: Any, model_state: Any) -> dict[str, ExportableProgram]:
        """The probabilities of pairs of a user and an item."""
        folder = self._benchmark.settings.data_dir
        names, titles = (read_names(folder, lists) for lists in (NAMES, TITLES))
        return {"": make_program(self._benchmark, params, names, titles)}

    def scores(self, params: Any, vectors: jax.Array) -> jax.Array:
        model = self._benchmark.model
        logits = jax.lax.map(model.of_all_items(params), vectors, batch_size=model.users_at_once)
        return jax.nn.sigmoid(logits)

    def search_vectors(self, params: Any) -> tuple[np.ndarray, np.ndarray]:
        """The linear function of the user's vector that is nearest to the logits of known users.

        A logit of NeuMF is no inner product, but nearly linear in the user's vector; docs/ncf.md
        has measurements. The numbers of users have a mean of 0 and a variance of 1, and no
        correlation: so the cosine of two items is the correlation of their fitted logits.
        """
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(params)):
            raise CheckpointError("the model's weights are not finite: its run has diverged")
        trained = np.flatnonzero(np.diff(self._benchmark.data.starts))
        vectors = params["users"]["embedding"][trained[:: -(-len(trained) // _FITTED)]]
        mean, root = vectors.mean(0), len(vectors) ** 0.5
        left, sizes, right = np.linalg.svd(vectors - mean, full_matrices=False)
        rank = int((sizes > 1e-5 * sizes[0]).sum())
        matrix = np.zeros((len(mean) + 1, rank + 1), np.float32)
        matrix[:-1, :rank] = root * right[:rank].T / sizes[:rank]
        matrix[-1] = np.append(-mean @ matrix[:-1, :rank], 1)
        users = np.insert(root * left[:, :rank], rank, 1, axis=1)
        items = jax.jit(functools.partial(fit_items, self._benchmark.model))(params, vectors, users)
        return np.asarray(items), matrix

    def is_trained(self) -> np.ndarray:
        data = self._benchmark.data
        return np.bincount(data.items, minlength=data.num_items) > 0

    def finder(self, kind: Literal["user", "item"]) -> Finder:
        data, settings = self._benchmark.data, self._benchmark.settings
        ids, lists = (data.user_ids, NAMES) if kind == "user" else (data.item_ids, TITLES)
        try:
            return Finder(kind, ids, read_names(settings.data_dir, lists))
        except DataError as error:
            _log.info("NOTE the %ss have no names: %s", kind, error)
            return Finder(kind, ids, {})

    def vector(self, params: Any, user: int) -> np.ndarray | None:
        starts = self._benchmark.data.starts
        return params["users"]["embedding"][user] if starts[user] < starts[user + 1] else None

    @functools.cached_property
    def _raters(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts int64[items + 1], users int32[positives]): those who train on each item."""
        data = self._benchmark.data
        order = np.argsort(data.items, kind="stable")
        starts = np.searchsorted(data.items[order], np.arange(data.num_items + 1))
        return starts, data.users[order]

    def newcomer(self, params: Any, history: Sequence[int]) -> np.ndarray | None:
        """The vector begins as the mean of the users with the most similar items.

        They are weighted by the cosine of the two sets of items. It then learns from the history;
        the rest of the model stays.
        """
        data = self._benchmark.data
        starts, raters = self._raters
        of_items = [raters[starts[i] : starts[i + 1]] for i in {*history}]
        if not any(map(len, of_items)):
            return None
        shared = np.bincount(np.concatenate(of_items), minlength=data.num_users)
        cosine = shared / np.sqrt(np.maximum(np.diff(data.starts), 1))  # up to a factor
        nearest = np.argsort(-cosine, kind="stable")[:_NEIGHBOURS]
        weights = np.float32(cosine[nearest])
        vector = weights @ params["users"]["embedding"][nearest] / weights.sum()
        draw = np.random.default_rng(0)
        positives = draw.choice(history, (_STEPS, _POSITIVES))
        negatives = draw.integers(0, data.num_items, (_STEPS, 4 * _POSITIVES))
        items = np.concatenate([positives, negatives], axis=1)
        return np.asarray(self._fit(params, vector, items, np.isin(items, history)))

    def rated(self, user: int) -> np.ndarray:
        """The rows of the rated items, the held-out one included."""
        data = self._benchmark.complete
        items = data.items[data.starts[user] : data.starts[user + 1]]
        held_out = data.held_out[data.held_starts[user] : data.held_starts[user + 1]]
        return np.append(items, held_out)

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """The model beside the baselines, and how it ranks items that few or many have rated."""
        benchmark, every = self._benchmark, list(rows)
        shown = [popularity(benchmark.data, by_user(every))]
        if benchmark.baselines:
            own = {"model": benchmark.own_scores(iter(every))}
            shown.insert(0, comparison({**own, **benchmark.baselines}))
        return shown


def fit_items(model: NeuMF, params: Any, vectors: jax.Array, users: jax.Array) -> jax.Array:
    """f32[items, n] whose products with `users` are nearest, by squares, to the users' logits.

    The users have the vectors f32[b, w]; the columns of `users` f32[b, n] are orthogonal, with a
    mean square of 1.
    """
    logits = model.of_all_items(params)

    def add(items: jax.Array, user: Any) -> tuple[jax.Array, None]:
        vector, numbers = user
        return items + jnp.outer(logits(vector), numbers / len(users)), None

    return jax.lax.scan(add, jnp.zeros((model.num_items, users.shape[1])), (vectors, users))[0]


def fit_vector(
    logits: Callable[..., jax.Array],
    params: Any,
    vector: jax.Array,
    items: jax.Array,
    labels: jax.Array,
) -> jax.Array:
    """Trains the vector f32[w] of one user with Adam; nothing else changes.

    `logits` is `Ncf.logits`; a step has the items int[steps, b], and the labels bool[steps, b] say
    whether the user has them.
    """
    rule = optax.adam(_RATE)

    def loss(vector: jax.Array, items: jax.Array, labels: jax.Array) -> jax.Array:
        user = {**params, "users": {"embedding": vector[None]}}
        scores = logits(user, jnp.zeros(1, jnp.int32), items[None])[0]
        return optax.sigmoid_binary_cross_entropy(scores, labels.astype(scores.dtype)).mean()

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        vector, memory = state
        change, memory = rule.update(jax.grad(loss)(vector, *batch), memory)
        return (optax.apply_updates(vector, change), memory), None

    (vector, _), _ = jax.lax.scan(step, (vector, rule.init(vector)), (items, labels))
    return vector


def fit_vectors(
    logits: Callable[..., jax.Array], params: Any, users: np.ndarray, data: Interactions
) -> np.ndarray:
    """The table of users f32[n, w], where the rows `users` int64[k] have learnt from their items.

    Each of them has items in `data`, and learns as by `fit_vector`.
    """
    fit = jax.jit(jax.vmap(functools.partial(fit_vector, logits, params)))
    table, draw = np.array(params["users"]["embedding"]), np.random.default_rng(0)
    chosen = data.users * np.int64(data.num_items) + data.items  # rising
    for first in range(0, len(users), _AT_ONCE):
        report_progress(f"fitting new users, {first:,} of {len(users):,}")
        rows = np.resize(users[first : first + _AT_ONCE], (_AT_ONCE, 1, 1))  # one program for all
        counts = np.diff(data.starts)[rows]
        places = data.starts[rows] + draw.integers(0, counts, (_AT_ONCE, _STEPS, _FEWER))
        others = draw.integers(0, data.num_items, (_AT_ONCE, _STEPS, 4 * _FEWER))
        items = np.concatenate([data.items[places], others], axis=2)
        pairs = rows * data.num_items + items
        labels = chosen[np.searchsorted(chosen[:-1], pairs)] == pairs
        table[rows.ravel()] = fit(table[rows.ravel()], items.astype(np.int32), labels)
    return table


def by_user(rows: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The outputs of `Ncf.predict` for all ranked users, in their order in the data.

    The order of `rows` depends on the number of hosts.
    """
    every = list(rows)
    columns = {name: np.concatenate([row[name] for row in every]) for name in every[0]}
    order = np.argsort(columns["user"])
    return {name: values[order] for name, values in columns.items()}


def activity_scores(
    activity: np.ndarray, rows: Iterable[Mapping[str, np.ndarray]]
) -> dict[str, tuple[float, int]]:
    """`Ncf.group_scores` of users with so many training ratings, int64[users]."""
    columns, scores = by_user(rows), {}
    hit, activity = columns[f"hr_at_{TOP}"].astype(np.float64), activity[columns["user"]]
    for users in even_groups(activity, 4):
        name = f"users with {span(activity[users], 'rating')}"
        scores[name] = float(hit[users].mean()), len(users)
    return scores


def comparison(scores: Mapping[str, Mapping[str, float]]) -> Exhibit:
    """All scores of the model and the baselines, by their names."""
    (first, *_), columns = scores.values(), ["score", *scores]
    rows = [[name, *(f"{x[name]:.4f}" for x in scores.values())] for name in first]
    return Exhibit(
        title="Is it better than something simple?",
        text="The same rankings by popularity, the number of users who chose an item, and by an "
        f"item-kNN: of the {NEIGHBOURS} items most similar to an item, those of the user count.",
        columns=[name.replace("_", " ") for name in columns],
        rows=[[name.replace("_", " "), *values] for name, *values in rows],
        files={"baselines.csv": csv_file(columns, rows)},
    )


def popularity(data: Interactions, columns: Mapping[str, np.ndarray]) -> Exhibit:
    """The hit rate by how often the held-out item was rated in training; of several, the mean.

    `columns` are those of `by_user`.
    """
    ranked, counts = columns["user"], np.diff(data.held_starts)
    per_item = np.bincount(data.items, minlength=data.num_items)[data.held_out]
    owners = data.held_users
    sums = np.bincount(owners, per_item, data.num_users)[ranked]
    ratings = (sums / counts[ranked]).astype(np.int64)
    hit, gain = (columns[f"{name}_at_{TOP}"].astype(np.float64) for name in ("hr", "ndcg"))
    bars, table, mean = [], [], float(hit.mean())
    for users in even_groups(ratings, _GROUPS):
        low, high = int(ratings[users].min()), int(ratings[users].max())
        label = f"{low:,} to {high:,}" if high > low else f"{low:,}"
        bars.append(Bar(label, float(hit[users].mean()), mean, len(users)))
        items = len(np.unique(data.held_out[np.isin(owners, ranked[users])]))
        scores = [f"{x[users].mean():.6f}" for x in (hit, gain)]
        table.append([low, high, items, len(users), *scores])
    head = ["least_ratings", "most_ratings", "items", "users", f"hr_at_{TOP}", f"ndcg_at_{TOP}"]
    return Exhibit(
        title="Popularity",
        text=f"The share of users whose held-out item is among the first {TOP}, by how many "
        "ratings of that item the model was trained on. Each bar has about a tenth of the users, "
        "whose number stands beside it. The mark is the share of all users.",
        bars=bars,
        files={"popularity.csv": csv_file(head, table)},
    )


def make_program(
    benchmark: Ncf, params: Any, names: Mapping[int, str], titles: Mapping[int, str]
) -> ExportableProgram:
    """The program of a model, for pairs of a user and an item; `params` are NumPy arrays.

    `names` has the users' names by id, `titles` the items'; both may be incomplete. Without names
    no list of users is written.
    """
    params = jax.tree.map(jnp.asarray, params)
    users, items = benchmark.data.user_ids, benchmark.data.item_ids
    is_trained = jnp.asarray(np.diff(benchmark.data.starts) > 0)

    def compute(inputs: Arrays) -> Arrays:
        user, is_user = _find_rows(jnp.asarray(users), inputs["user"])
        item, is_item = _find_rows(jnp.asarray(items), inputs["item"])
        logits = benchmark.logits(params, user, item[:, None])[:, 0]
        return {
            "score": jnp.where(
                is_user & is_item & is_trained[user], jax.nn.sigmoid(logits), jnp.nan
            )
        }

    def examples(pictures: Sequence[bytes]) -> Sequence[tuple[Arrays, None]]:
        draw = np.random.default_rng(0)
        pairs = {"user": draw.choice(users, 16), "item": draw.choice(items, 16)}
        return [(pairs, None), ({name: ids[:1] for name, ids in pairs.items()}, None)]

    titled = ((i, titles.get(i, "")) for i in items.tolist())
    files = {"items.csv": csv_file(("item", "title"), titled)}
    if names:
        named = ((u, names.get(u, "")) for u in users.tolist())
        files["users.csv"] = csv_file(("user", "name"), named)
    return ExportableProgram(
        task="says how probably a user rates an item",
        compute=compute,
        inputs={"user": ("batch", np.uint32), "item": ("batch", np.uint32)},
        meaning=_MEANING,
        examples=examples,
        files=files,
    )


def _find_rows(ids: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The positions int32[b] of `numbers` uint32[b] in rising ids uint32[n]; bool[b], if found."""
    rows = jnp.minimum(jnp.searchsorted(ids, numbers), len(ids) - 1)
    return rows, ids[rows] == numbers
