"""What a trained NCF model can be used for: it recommends items, and its rankings are shown.

It is also exported, as a `Program`. The titles of items are MovieLens': movies.csv of ml-20m,
movies.dat of ml-1m, or either in the zip.
"""

from __future__ import annotations

import csv
import functools
import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.exhibits import csv_file
from benchmarks.ncf.models import TOP
from benchmarks.ncf.ratings import Interactions, locate
from benchmarks.uses import Bar, Exhibit, Uses
from common import limits
from common.data.order import even_groups
from common.data.shards import read_errors, tensorflow
from common.errors import CheckpointError, DataError, one_line
from common.portable import Arrays, Program
from common.text import csv_text, text_lines

_GROUPS = 10  # deciles
_TITLE_FILES = ("movies.csv", "movies.dat")
# The inputs and outputs of the program.
_MEANING = {
    "user": "ids of users, as in the file of ratings",
    "item": "ids of items, as in the file of ratings; items.csv lists them",
    "score": "the probability that the user rates the item; NaN for an unknown id",
}


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

    def check_files(self, manifest: Mapping[str, Any], source: str) -> None:
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

    def programs(self, params: Any, model_state: Any) -> dict[str, Program]:
        """The probabilities of pairs of a user and an item."""
        del model_state
        return {"": make_program(self._benchmark, params, self.titles)}

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
        return read_titles(self._benchmark.settings.data_dir)


def popularity(data: Interactions, columns: Mapping[str, np.ndarray]) -> Exhibit:
    """The hit rate by how often the held-out item was rated in training.

    `columns` float[users] are the outputs of `Ncf.predict`, of all users in their order.
    """
    ratings = np.bincount(data.items, minlength=data.num_items)[data.held_out]
    hit, gain = (columns[f"{name}_at_{TOP}"].astype(np.float64) for name in ("hr", "ndcg"))
    bars, table, mean = [], [], float(hit.mean())
    for users in even_groups(ratings, _GROUPS):
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
        files={"popularity.csv": csv_file(head, table)},
    )


def _position(ids: np.ndarray, number: int) -> int | None:
    """The index of a number in rising ids uint32[n]; None if it is not among them."""
    if number > np.iinfo(np.uint32).max:
        return None
    i = int(np.searchsorted(ids, number))
    return i if i < len(ids) and ids[i] == number else None


def make_program(benchmark: Any, params: Any, titles: Mapping[int, str]) -> Program:
    """The program of a model, for pairs of a user and an item.

    Args:
      benchmark: a `benchmarks.ncf.Ncf` with its ratings.
      params: NumPy arrays.
      titles: of items by their ids, as far as they are known.
    """
    params = jax.tree.map(jnp.asarray, params)
    users, items = benchmark.data.user_ids, benchmark.data.item_ids

    def compute(inputs: Arrays) -> Arrays:
        user, is_user = _find_rows(jnp.asarray(users), inputs["user"])
        item, is_item = _find_rows(jnp.asarray(items), inputs["item"])
        logits = benchmark.logits(params, user, item[:, None])[:, 0]
        return {"score": jnp.where(is_user & is_item, jax.nn.sigmoid(logits), jnp.nan)}

    def examples(pictures: Sequence[bytes]) -> Sequence[tuple[Arrays, None]]:
        del pictures
        draw = np.random.default_rng(0)
        pairs = {"user": draw.choice(users, 16), "item": draw.choice(items, 16)}
        return [(pairs, None), ({name: ids[:1] for name, ids in pairs.items()}, None)]

    rows = [(item, titles.get(item, "")) for item in items.tolist()]
    return Program(
        task="says how probably a user rates an item",
        compute=compute,
        inputs={"user": ("batch", np.uint32), "item": ("batch", np.uint32)},
        meaning=_MEANING,
        examples=examples,
        files={"items.csv": csv_text([("item", "title"), *rows]).encode()},
    )


def _find_rows(ids: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where `numbers` uint32[b] are in rising ids uint32[n]: int32[b], and bool[b], if they are."""
    rows = jnp.minimum(jnp.searchsorted(ids, numbers), len(ids) - 1)
    return rows, ids[rows] == numbers


def read_titles(data_dir: str) -> dict[int, str]:
    """The titles of items by their ids; {} if there is no list where the ratings are.

    Args:
      data_dir: see `ratings.locate`.

    Raises:
      DataError: the list cannot be read.
    """
    path = locate(data_dir)
    try:
        name, data = _find_titles(path)
    except (*read_errors(), zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"cannot read the titles beside {path}: {one_line(error)}") from error
    try:
        return _parse_titles(name, data) if name else {}
    except (ValueError, IndexError, csv.Error) as error:
        raise DataError(f"{name} of {path} is no list of titles: {one_line(error)}") from error


def _find_titles(path: str) -> tuple[str, bytes]:
    """The name and the bytes of the list that belongs to the ratings in `path`; ("", b"")."""
    gfile = tensorflow().io.gfile
    if path.endswith(".zip"):
        with gfile.GFile(path, "rb") as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.filename.endswith(_TITLE_FILES):
                    limits.check_size(member.filename, member.file_size, limits.TEXT_BYTES)
                    return member.filename, archive.read(member)
        return "", b""
    for name in _TITLE_FILES:
        beside = f"{path.rpartition('/')[0] or '.'}/{name}"
        if gfile.exists(beside):
            limits.check_file(beside)
            limits.check_size(beside, gfile.stat(beside).length, limits.TEXT_BYTES)
            with gfile.GFile(beside, "rb") as file:
                return name, file.read()
    return "", b""


def _parse_titles(name: str, data: bytes) -> dict[int, str]:
    """The titles in a list; ValueError or IndexError if it has another form."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:  # as in ml-1m
        text = data.decode("latin-1")
    rows: Any
    if name.endswith(".dat"):  # without a header
        rows = (line.split("::") for line in text_lines(text) if line)
    else:
        rows = csv.reader(io.StringIO(text, newline=""))
        next(rows, None)
    return {int(row[0]): row[1] for row in rows if row}
