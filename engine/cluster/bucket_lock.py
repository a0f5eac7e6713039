"""Keeps a second run out of a workdir on gs://."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import psutil
from etils import epath

from engine.cluster import lock

_PERIOD = 20.0  # seconds between signs of life, and of silence before a new attempt
_LOST = 90.0  # seconds without a sign of life after which a run counts as dead


class BucketLock:
    """A lock on gs://, which has none of its own.

    The lock is an object that only one run can create, and that the run writes again every 20 s as
    a sign of life. A later run replaces it if its process is known to be dead, or after 90 s of
    silence.
    """

    def __init__(self, path: epath.Path, lost: Callable[[str], None]):
        """Takes the lock; LockError if another process has it. `lost` as of `lock.take`."""
        self._path, self._me = path, lock.this_process()
        self._generation = 0  # of the object, as this run wrote it last
        self._closed = threading.Event()
        with warnings.catch_warnings(action="ignore"):  # about what only gRPC needs
            from google.cloud import storage
        bucket, _, self._name = str(path).removeprefix("gs://").partition("/")
        self._bucket: Any = storage.Client().bucket(bucket)  # the package has incomplete types
        if not self._write(0):
            self._replace()
        threading.Thread(target=self._stay_alive, args=(lost,), daemon=True).start()

    def check(self) -> None:
        """Does nothing: `lost` is called if another run takes the lock."""

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(Exception):
            self._bucket.blob(self._name).delete(
                if_generation_match=self._generation, timeout=_PERIOD
            )

    def _replace(self) -> None:
        """Replaces the lock of a process that is dead."""
        owner, generation, age = self._read()
        is_here = owner.get("machine") == self._me["machine"]
        is_dead = not owner or (is_here and not psutil.pid_exists(owner["pid"]))
        # A live run writes within one period; the clocks of the two hosts may differ.
        waiting = time.monotonic() + max(1.25 * _PERIOD, min(_LOST, _LOST - age))
        while not is_dead and self._read()[1] == generation:
            is_dead = time.monotonic() > waiting
            time.sleep(_PERIOD / 10)
        if not self._write(generation) and not self._write(0):  # 0: the owner has given it back
            raise lock.taken(self._path, self._read()[0])

    def _write(self, generation: int) -> bool:
        """Writes the lock if the object is still of this generation; 0: if there is no object."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self._name)
        try:
            blob.upload_from_string(
                json.dumps(self._me), if_generation_match=generation, timeout=_PERIOD
            )
            self._generation = blob.generation
        except PreconditionFailed:
            owner, present, _ = self._read()
            if owner.get("token") != self._me["token"]:
                return False
            self._generation = present  # written by a request whose answer was lost
        return True

    def _read(self) -> tuple[dict[str, Any], int, float]:
        """(owner, generation, age in seconds) of the lock; ({}, 0, 0) if there is none."""
        from google.api_core.exceptions import NotFound

        with contextlib.suppress(NotFound):
            if (blob := self._bucket.get_blob(self._name, timeout=_PERIOD)) is not None:
                age = time.time() - blob.updated.timestamp()
                return lock.owner(blob.download_as_bytes(timeout=_PERIOD)), blob.generation, age
        return {}, 0, 0.0

    def _stay_alive(self, lost: Callable[[str], None]) -> None:
        while not self._closed.wait(_PERIOD):
            with contextlib.suppress(Exception):  # the next attempt may get through
                if not self._write(self._generation) and not self._closed.is_set():
                    owner, generation, _ = self._read()
                    taken = str(lock.taken(self._path, owner))
                    lost(taken if generation else f"{self._path} was deleted")
                    return
