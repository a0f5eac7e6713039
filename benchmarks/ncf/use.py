"""What a trained NCF model can be used for: it recommends items, and its rankings are shown."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ncf import program, titles
from benchmarks.ncf.interactions import Interactions
from benchmarks.ncf.models import TOP
from benchmarks.uses import Bar, Exhibit, Uses
from errors import CheckpointError, DataError
from ops import groups
from ops.tables import csv_text

_GROUPS = 10  # deciles

if TYPE_CHECKING:
    from ops.portable import Program


class NcfUses(Uses):
    """The uses of a model of users and items. Ids are those of the file of ratings."""

    answers = "items"
    at_once = 8  # users that a device scores at once, each with all items
    commands = {
        "recommend items to a user": "python predict.py --user=1 --top=10 --workdir={workdir}"
    }

    def __init__(self, benchmark: Any):
        """`benchmark` is a `benchmarks.ncf.Ncf`, which imports this module."""
        self._benchmark = benchmark

    def check_rows(self, manifest: Mapping[str, Any], source: str) -> None:
        """Opens the ratings, whose users and items number the rows of the model's tables.

        Args:
          manifest: of the checkpoint, which has the digest of its rows.
          source: the checkpoint, for messages.

        Raises:
          UserError: the ratings are missing, or have other users or items than the model.
        """
        try:
            digest = self._benchmark.data.rows_digest
        except DataError as error:
            raise DataError(f"{error}; --data_dir names another folder of the ratings") from error
        if digest != manifest["rows_digest"]:
            raise CheckpointError(
                f"the ratings in {self._benchmark.settings.data_dir} have other users or items "
                f"than {source}: give the --data_dir that the model was trained on"
            )

    def check_files(self, manifest: Mapping[str, Any], source: str) -> None:
        self.check_rows(manifest, source)

    def programs(self, params: Any, model_state: Any) -> dict[str, Program]:
        """The probabilities of pairs of a user and an item."""
        del model_state
        return {"": program.make(self._benchmark, params, self.titles)}

    def scores(self, params: Any, users: jax.Array) -> jax.Array:
        """The probabilities f32[b, items] that the users int32[b] (rows) rate each item."""
        items = jnp.arange(params["items"]["embedding"].shape[0])[None]
        return jax.nn.sigmoid(self._benchmark.logits(params, users, items))

    def row(self, user: int) -> int | None:
        """The row of the user with an id; None if the model does not have that user."""
        return _position(self._benchmark.data.user_ids, user)

    @property
    def item_ids(self) -> np.ndarray:
        """uint32[items], the id of each column of `scores`."""
        return self._benchmark.data.item_ids

    def rated(self, row: int) -> np.ndarray:
        """int32[n], the columns of the items that a user has rated, the held-out one included."""
        data = self._benchmark.data
        items = data.items[data.starts[row] : data.starts[row + 1]]
        return np.append(items, data.held_out[row])

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """How well items are ranked that few or many users have rated."""
        every = list(rows)
        columns = {name: np.concatenate([row[name] for row in every]) for name in every[0]}
        return [popularity(self._benchmark.data, columns)]

    @functools.cached_property
    def titles(self) -> Mapping[int, str]:
        """The titles of items by their ids, where MovieLens' list lies with the ratings.

        Raises:
          DataError: the list cannot be read.
        """
        return titles.read(self._benchmark.settings.data_dir)


def popularity(data: Interactions, columns: Mapping[str, np.ndarray]) -> Exhibit:
    """The hit rate by how often the held-out item was rated in training.

    `columns` float[users] are the outputs of `Ncf.predict`, of all users in their order.
    """
    ratings = np.bincount(data.items, minlength=data.num_items)[data.held_out]
    hit, gain = (columns[f"{name}_at_{TOP}"].astype(np.float64) for name in ("hr", "ndcg"))
    bars, table, mean = [], [], float(hit.mean())
    for users in groups.even(ratings, _GROUPS):
        least, most = int(ratings[users].min()), int(ratings[users].max())
        label = f"{least:,} to {most:,}" if most > least else f"{least:,}"
        bars.append(Bar(label, float(hit[users].mean()), mean, len(users)))
        items = len(np.unique(data.held_out[users]))
        scores = [f"{x[users].mean():.6f}" for x in (hit, gain)]
        table.append([least, most, items, len(users), *scores])
    head = ["least_ratings", "most_ratings", "items", "users", f"hr_at_{TOP}", f"ndcg_at_{TOP}"]
    return Exhibit(
        title="Popularity",
        text=f"The share of users whose held-out item is among the first {TOP}, by how many "
        "ratings of that item the model was trained on. Each bar has about a tenth of the users, "
        "whose number stands beside it. The mark is the share of all users.",
        bars=bars,
        files={"popularity.csv": csv_text([head, *table]).encode()},
    )


def _position(ids: np.ndarray, number: int) -> int | None:
    """The index of a number in rising ids uint32[n]; None if it is not among them."""
    if number > np.iinfo(np.uint32).max:
        return None
    i = int(np.searchsorted(ids, number))
    return i if i < len(ids) and ids[i] == number else None
