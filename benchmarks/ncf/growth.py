"""A model of an earlier table in a table that has grown: its rows are matched by their names.

A name is the log's own where `python -m scripts.prepare` has given ids, because these shift when a
name is added; else it is the id. A run keeps the names in data_index of its workdir.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pyarrow
import pyarrow.compute
from etils import epath
from pyarrow import csv
from scipy import sparse

from benchmarks.base import distinct
from benchmarks.ncf.baselines import choices, neighbours
from benchmarks.ncf.ratings import Interactions, locate
from common.data import caches, data_manifest, storage
from common.errors import CheckpointError, DataError, one_line, parse_json, some

pc: Any = pyarrow.compute  # its functions are made when it is imported
_log = logging.getLogger("tpu_suite")
_NEIGHBOURS = 10  # known rows of which a new one is the mean, as of a newcomer in `use`
_COMPARED = 20_000  # at most so many known rows with each new one: 500 new ones in a second


def row_names(data_dir: str, data: Interactions) -> bytes:
    """The names of the rows of the tables, JSON: {"users": [...], "items": [...]}."""
    folder, is_prepared = os.path.dirname(locate(data_dir)), False
    with contextlib.suppress(AttributeError, ValueError):  # a manifest of another form
        manifest = parse_json(data_manifest.read_bytes(folder) or b"{}")
        is_prepared = manifest.get("kind") == "recommendation"
    names = {}
    for side, ids in (("users", data.user_ids), ("items", data.item_ids)):
        texts = _listed(os.path.join(folder, f"{side}.csv"), ids) if is_prepared else map(str, ids)
        names[side] = [*texts]
    return json.dumps(names).encode()


def _listed(path: str, ids: np.ndarray) -> list[str]:
    """The names of ids in a list of the preparation, in its last column."""
    try:
        kinds = csv.ConvertOptions(column_types=dict.fromkeys(("name", "title"), pyarrow.string()))
        file = pyarrow.BufferReader(storage.read(path) or b"")
        listed = csv.read_csv(file, None, csv.ParseOptions(newlines_in_values=True), kinds)
        rows = pc.index_in(pyarrow.array(ids, listed[0].type), value_set=listed[0])
        names = listed[listed.num_columns - 1].take(rows).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a list of names: {one_line(error)}") from error
    # Titles of an earlier preparation may come again.
    return distinct([(i, n or str(i)) for i, n in zip(ids.tolist(), names, strict=True)])


def digest(names: bytes) -> str:
    """A digest of `row_names`, for the checkpoint's manifest and the name of their file."""
    return hashlib.sha256(names).hexdigest()[:16]


def keep(names: bytes, folder: str) -> None:
    """Writes `row_names` into data_index of a workdir, unless they are there."""
    if not epath.Path(path := f"{folder}/rows-{digest(names)}.json").exists():
        storage.write(path, [names])


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """Which row of the other model each row of a table is, and what new rows begin with."""

    rows: np.ndarray  # int64[now]; -1 for a new one
    means: np.ndarray  # int64[k], the new rows that begin as a mean
    near: np.ndarray  # int64[n], the known rows of which they are
    weights: Any  # csr f32[k, n], whose rows add up to 1

    def grow(self, initial: Any, table: Any) -> Any:
        """The table f32[now, w] of an `initial` one and the other model's, f32[then, w]."""
        if np.array_equal(self.rows, np.arange(len(table))):
            return table
        if isinstance(initial, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(initial.shape, initial.dtype)
        known, grown = self.rows >= 0, np.array(initial)
        grown[known] = table[self.rows[known]]
        grown[self.means] = self.weights @ grown[self.near]
        return grown


def match(
    source: str, manifest: Mapping[str, Any], names: bytes, data: Interactions
) -> dict[str, Match]:
    """Matches the rows of `names` and `data` with those of a checkpoint; says who is new or gone.

    `source` is the checkpoint's folder. CheckpointError if it has no names, or nobody is known.
    """
    wanted = manifest.get("names_digest")
    if not wanted:
        raise CheckpointError(
            "it keeps no names of its users and items, because an earlier version trained it, and "
            "this table has others: train it again once, and later tables can continue from it"
        )
    workdir = os.path.dirname(os.path.dirname(source))
    path = f"{workdir}/data_index/rows-{wanted}.json"
    then = storage.read(path)
    if then is None or digest(then) != wanted:
        raise CheckpointError(
            f"{path}, which names its users and items, is {'damaged' if then else 'missing'}: copy "
            "it from where the run was trained, or train it again"
        )
    matrix, before, now = choices(data), json.loads(then), json.loads(names)
    matches = {}
    for side, table in (("users", matrix.T), ("items", matrix)):
        rows = pc.index_in(pyarrow.array(now[side]), value_set=pyarrow.array(before[side]))
        rows = pc.fill_null(rows, -1).to_numpy().astype(np.int64)
        known, new = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        if not len(known):
            raise CheckpointError(
                f"none of its {len(before[side]):,} {side} is in this table: is it the same log, "
                "with names in the same form? If not, leave config.init_from out"
            )
        near = known[:: -(-len(known) // _COMPARED)]
        similar = sparse.csr_array((0, len(near)), dtype=np.float32)
        if len(new):
            similar = neighbours(table[:, near], table[:, new], _NEIGHBOURS, 0.0)
        sums = similar.sum(axis=1)
        means = np.flatnonzero(sums)
        weights = similar[means].multiply(1 / sums[means, None]).tocsr()
        matches[side] = Match(rows, new[means], near, weights)
        gone = np.delete(np.array(before[side], object), rows[known])
        text = f"{len(known):,} {side} matched by name, {len(new):,} new"
        text += f" ({len(means):,} begin as the mean of similar ones)" if len(new) else ""
        text += f", {len(gone):,} vanished" + (f" ({some(gone)})" if len(gone) else "")
        if 2 * len(known) < min(len(rows), len(before[side])):
            text += ": few are the same; is it the same log, with names in the same form?"
        _log.info("NOTE init_from %s: %s", workdir, text)
    return matches


def compare_ratings(
    source: str, manifest: Mapping[str, Any], matches: Mapping[str, Match], data: Interactions
) -> None:
    """Says which held-out rows of `data` a model was trained on, or that most others are not."""
    workdir = os.path.dirname(os.path.dirname(source))
    then = caches.read_arrays(Interactions, f"{workdir}/data_index/interactions")
    if then is None or f"{then.checksum:08x}" not in manifest.get("data", {}).get("ratings", ""):
        text = "its index of ratings is not there: it may have seen what is held out now"
        _log.info("NOTE init_from %s: %s", workdir, text)
        return
    width = np.int64(then.num_items)
    old = then.users * width + then.items

    def seen(users: np.ndarray, items: np.ndarray) -> int:
        user, item = matches["users"].rows[users], matches["items"].rows[items]
        pairs = np.where((user < 0) | (item < 0), -1, user * width + item)
        places = np.searchsorted(old[:-1], pairs)  # `old` rises
        return int((old[places] == pairs).sum())

    held = seen(data.held_users, data.held_out)
    kept = held + seen(data.users, data.items)
    if held:
        text = f"it was trained on {held:,} of the {len(data.held_out):,} ratings that are held out"
        text += " now, so scores are too high: hold out later ones, --config.eval_holdout=date"
        _log.info("NOTE init_from %s: %s", workdir, text)
    if 2 * kept < len(old):
        text = f"{kept:,} of the {len(old):,} ratings that it was trained on are in this table"
        _log.info("NOTE init_from %s: only %s: is it the same log?", workdir, text)
