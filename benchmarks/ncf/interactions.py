"""Who rated what, indexed: the positives of each user, and the latest one, held out to ask for."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import numpy as np
from etils import epath

from benchmarks.ncf import ratings
from benchmarks.ncf.ratings import Ratings
from errors import one_line
from ops import files
from ops.shards import DataError, tensorflow

_log = logging.getLogger("tpu_suite")
_RULES = 1  # raise it when `index` gives something else for the same file
_ARRAYS = {"starts": "<i8", "items": "<i4", "held": "<i4", "user_ids": "<u4", "item_ids": "<u4"}


@dataclasses.dataclass(frozen=True, eq=False)
class Interactions:
    """Users and items are numbered from 0, in the order of their ids in the file.

    Attributes:
      starts: int64[users + 1]; user u's items to train on are items[starts[u]:starts[u + 1]].
      items: int32[positives], rising within each user.
      held: int32[users]: each user's latest item, which is not among `items`.
      user_ids: uint32[users], as in the file.
      item_ids: uint32[items], as in the file.
    """

    starts: np.ndarray
    items: np.ndarray
    held: np.ndarray
    user_ids: np.ndarray
    item_ids: np.ndarray

    @property
    def num_users(self) -> int:
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    @property
    def num_positives(self) -> int:
        """Positives to train on, of all users."""
        return len(self.items)


def load(data_dir: str, min_ratings: int, cache: str) -> Interactions:
    """The index of the ratings in a folder, from `cache` if file and rules are the same.

    A file is the same if its name, its size and when it was written (in seconds) are.

    Args:
      data_dir: folder or file, see `ratings.locate`.
      min_ratings: users with fewer are left out.
      cache: file to keep the index in, local or gs://; "" for none.

    Raises:
      DataError: there are no ratings, or they cannot be used.
    """
    path = ratings.locate(data_dir)
    tf = tensorflow()
    try:
        stat = tf.io.gfile.stat(path)
    except tf.errors.OpError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    key = {"file": path, "bytes": int(stat.length), "modified": int(stat.mtime_nsec)}
    key |= {"min_ratings": min_ratings, "rules": _RULES}
    found = _restore(epath.Path(cache), key) if cache else None
    if found is None:
        found = index(ratings.read(path), min_ratings, path)
        if cache:
            _keep(epath.Path(cache), key, found)
    return found


def index(raw: Ratings, min_ratings: int, path: str) -> Interactions:
    """Indexes ratings: see `load`. The order of the rows does not matter.

    A rating that a user repeats for an item counts once, with its latest time. Of ratings at the
    same second, the latest is the one of the item with the largest id.

    Raises:
      DataError: nobody has enough ratings; or somebody rated everything. `path` is for messages.
    """
    user_ids, users = np.unique(raw.users, return_inverse=True)
    item_ids, items = np.unique(raw.items, return_inverse=True)
    pairs = users * np.int64(len(item_ids)) + items
    times = raw.times
    del users, items
    if not (pairs[1:] > pairs[:-1]).all():
        _log.info("%s is not in the order of users and items, or repeats itself: sorted", path)
        order = np.lexsort((times, pairs))
        pairs, times = pairs[order], times[order]
        last = np.append(pairs[1:] != pairs[:-1], True)
        if not last.all():
            repeated = len(last) - int(last.sum())
            _log.info("%s rates an item again %d times: the latest counts", path, repeated)
            pairs, times = pairs[last], times[last]
    users, items = np.divmod(pairs, len(item_ids))
    del pairs
    counts = np.bincount(users, minlength=len(user_ids))
    enough = counts >= min_ratings
    if not enough.all():
        few = len(enough) - int(enough.sum())
        said = f"{few:,} of {len(enough):,} users in {path} have fewer than {min_ratings} ratings"
        if not enough.any():
            raise DataError(f"{said}, so nobody is left: set a smaller --config.min_ratings")
        _log.info("%s and are left out", said)
        items, times = items[enough[users]], times[enough[users]]
        user_ids, counts = user_ids[enough], counts[enough]
        there, items = np.unique(items, return_inverse=True)
        item_ids = item_ids[there]
    if counts.max() >= len(item_ids):
        whose = user_ids[np.argmax(counts)]
        raise DataError(
            f"user {whose} in {path} has rated all {len(item_ids):,} items, so there is none to "
            "tell from them: use a larger set"
        )
    starts, held = _latest(counts, times)
    rest = np.ones(len(items), np.bool_)
    rest[held] = False
    starts -= np.arange(len(starts))
    kept = items[rest].astype(np.int32), items[held].astype(np.int32)
    return Interactions(starts, *kept, user_ids, item_ids)


def _latest(counts: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts int64[users + 1], where each user's latest rating is) of rows in users' order."""
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    latest = np.repeat(np.maximum.reduceat(times, starts[:-1]), counts) == times
    places = np.where(latest, np.arange(len(times)), -1)
    return starts, np.maximum.reduceat(places, starts[:-1])


def _keep(path: epath.Path, key: dict[str, Any], found: Interactions) -> None:
    """Writes a line of JSON and then the arrays."""
    arrays = {name: getattr(found, name).astype(kind) for name, kind in _ARRAYS.items()}
    head = json.dumps({"key": key, "lengths": {name: len(a) for name, a in arrays.items()}})
    files.write(str(path), [head.encode(), b"\n", *(a.tobytes() for a in arrays.values())])


def _restore(path: epath.Path, key: dict[str, Any]) -> Interactions | None:
    """What `_keep` wrote for this key; None if it is not there, of another key, or damaged."""
    if not path.exists():
        return None
    content = path.read_bytes()
    end = content.find(b"\n")
    try:
        head = json.loads(content[: max(end, 0)])
        if head["key"] != key:
            return None
        position, arrays = end + 1, []
        for name, kind in _ARRAYS.items():
            found = np.frombuffer(content, kind, head["lengths"][name], position)
            arrays.append(found.copy())  # aligned, and `content` may go
            position += arrays[-1].nbytes
    except (ValueError, KeyError, TypeError):
        return None
    return Interactions(*arrays) if position == len(content) else None
