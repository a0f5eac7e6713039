"""Who rated what: each user's items to train on, and the latest one, held out for evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import zlib

import numpy as np

from benchmarks.ncf import ratings
from benchmarks.ncf.ratings import Ratings
from errors import DataError
from ops import array_cache

_log = logging.getLogger("tpu_suite")
_VERSION = 1  # raise it when `index` makes other arrays from the same file


@dataclasses.dataclass(frozen=True, eq=False)
class Interactions:
    """Users and items are numbered from 0, in the order of their ids in the file.

    Attributes:
      starts: int64[users + 1]; user u trains on items[starts[u]:starts[u + 1]].
      items: int32[positives], rising within each user.
      held_out: int32[users]: each user's latest item, which is not among `items`.
      user_ids: uint32[users], as in the file.
      item_ids: uint32[items], as in the file.
    """

    starts: np.ndarray
    items: np.ndarray
    held_out: np.ndarray
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
        """Pairs of a user and an item to train on."""
        return len(self.items)

    @property
    def rows_digest(self) -> str:
        """A digest of the ids of users and items, which number the rows of the model's tables."""
        ids = self.user_ids.tobytes() + self.item_ids.tobytes()
        return hashlib.sha256(ids).hexdigest()[:16]

    @property
    def checksum(self) -> int:
        """CRC-32 of who rated what."""
        crc = 0
        for array in (self.starts, self.items, self.held_out):
            crc = zlib.crc32(array.data, crc)
        return crc

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in vars(self).values())


def load(data_dir: str, min_ratings: int, cache: str) -> Interactions:
    """Indexes the ratings in a folder, or takes the index from `cache` if nothing has changed.

    The name of the file, its size, its time of modification (in seconds) and `min_ratings` decide
    whether the cache is used.

    Args:
      data_dir: folder or file, see `ratings.locate`.
      min_ratings: users with fewer ratings are left out.
      cache: the file that keeps the index, local or gs://; "" for none.

    Raises:
      DataError: there are no ratings, or they cannot be used.
    """
    path = ratings.locate(data_dir)
    (_, size, modified), *others = array_cache.stamps(ratings.parts(path))
    facts = {"file": path, "bytes": size, "modified": modified}
    facts |= {"others": others} if others else {}
    key = json.dumps(facts | {"min_ratings": min_ratings, "version": _VERSION})
    return array_cache.cached(
        Interactions, cache, key, lambda: index(ratings.read(path), min_ratings, path)
    )


def index(raw: Ratings, min_ratings: int, path: str) -> Interactions:
    """Indexes ratings: see `load`. The order of the rows does not matter.

    A user's repeated rating of an item counts once, with its latest time. If a user's last ratings
    have the same time, the one of the item with the largest id is the latest.

    Args:
      raw: the ratings.
      min_ratings: users with fewer ratings are left out.
      path: the file, for messages.

    Raises:
      DataError: no user has enough ratings, or one has rated every item.
    """
    user_ids, users = np.unique(raw.users, return_inverse=True)
    item_ids, items = np.unique(raw.items, return_inverse=True)
    pairs, times = _sort(users * np.int64(len(item_ids)) + items, raw.times, path)
    users, items = np.divmod(pairs, len(item_ids))
    del pairs
    counts = np.bincount(users, minlength=len(user_ids))
    enough = counts >= min_ratings
    if not enough.all():
        few = len(enough) - int(enough.sum())
        fact = f"{few:,} of {len(enough):,} users in {path} have fewer than {min_ratings} ratings"
        if not enough.any():
            raise DataError(f"{fact}, so no user is left: set a smaller --config.min_ratings")
        _log.info("%s and are left out", fact)
        items, times = items[enough[users]], times[enough[users]]
        user_ids, counts = user_ids[enough], counts[enough]
        used, items = np.unique(items, return_inverse=True)
        item_ids = item_ids[used]
    if counts.max() >= len(item_ids):
        raise DataError(
            f"user {user_ids[np.argmax(counts)]} in {path} has rated all {len(item_ids):,} items, "
            "so no item is left as a negative example: use a larger data set"
        )
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    is_latest = np.repeat(np.maximum.reduceat(times, starts[:-1]), counts) == times
    rows = np.where(is_latest, np.arange(len(times)), -1)
    latest = np.maximum.reduceat(rows, starts[:-1])
    trained = np.ones(len(items), np.bool_)
    trained[latest] = False
    positives, held_out = items[trained].astype(np.int32), items[latest].astype(np.int32)
    return Interactions(starts - np.arange(len(starts)), positives, held_out, user_ids, item_ids)


def _sort(pairs: np.ndarray, times: np.ndarray, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Sorts pairs int64[n] with their times, and keeps each pair once, with its latest time."""
    if (pairs[1:] > pairs[:-1]).all():
        return pairs, times
    order = np.lexsort((times, pairs))
    pairs, times = pairs[order], times[order]
    is_last = np.append(pairs[1:] != pairs[:-1], True)
    _log.info(
        "%s was not in the order of users and items: sorted; %d ratings repeat an item and only "
        "the latest counts",
        *(path, len(is_last) - int(is_last.sum())),
    )
    return pairs[is_last], times[is_last]
