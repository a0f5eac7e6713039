"""Keeps a second run out of a workdir."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from typing import IO, Any

import psutil
from etils import epath

from errors import UserError, one_line
from ops import files

_PERIOD = 20.0  # seconds between signs of life on gs://, and of silence before a new attempt
_LOST = 90.0  # seconds without a sign of life after which a run on gs:// counts as dead


class LockError(UserError):
    """Another run has the workdir; the message names its process and host."""


class Lock:
    """The right to write in a workdir, until it is closed or the process dies.

    On a local disk the kernel holds the lock. gs:// has no locks. There the lock is an object that
    only one run can create, and that the run writes again every 20 s as a sign of life. A later
    run replaces it if its process is known to be dead, or after 90 s of silence.
    """

    def __init__(self, workdir: str, lost: Callable[[str], None] = lambda message: None):
        """Takes the lock.

        Args:
          workdir: the run's folder, local or gs://.
          lost: called with a message, in a thread, if another run takes the lock on gs://.

        Raises:
          LockError: another run has the lock, or the lock cannot be written.
        """
        self._path = epath.Path(workdir) / "run.lock"
        self._me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _machine(),
            "token": uuid.uuid4().hex,
        }
        self._file: IO[str] | None = None
        self._generation = 0  # of the object on gs://, as this run wrote it last
        self._closed = threading.Event()
        try:
            if "://" in workdir:
                self._take_remote()
                threading.Thread(target=self._stay_alive, args=(lost,), daemon=True).start()
            else:
                self._take_local()
        except LockError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise LockError(f"cannot use {self._path}: {one_line(error)}") from error

    def check(self) -> None:
        """Raises LockError if the local lock's file, and perhaps the workdir, was replaced."""
        if self._file:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino:
                    return
            raise LockError(f"{self._path} was deleted: is another run beginning there?")

    def close(self) -> None:
        """Gives the lock back."""
        self._closed.set()
        if self._file:
            self._file.close()  # the file stays: deleting it would let two runs in
        else:
            with contextlib.suppress(Exception):
                self._bucket.blob(self._name).delete(
                    if_generation_match=self._generation, timeout=_PERIOD
                )

    def _take_local(self) -> None:
        file = open(self._path, "a+")  # noqa: SIM115 (the lock is held while it is open)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                raise self._taken(_owner(file.read())) from None
        file.truncate(0)
        file.write(json.dumps(self._me))
        file.flush()
        self._file = file

    def _taken(self, owner: dict[str, Any]) -> LockError:
        name = "process {pid} on {host}".format(**owner) if owner else "another process"
        return LockError(
            f"{name} trains in {self._path.parent} already: wait until it has ended, stop it, or "
            "use another --workdir"
        )

    # On gs://.

    def _take_remote(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # about what only gRPC needs
            from google.cloud import storage
        bucket, _, self._name = str(self._path).removeprefix("gs://").partition("/")
        self._bucket: Any = storage.Client().bucket(bucket)  # the package has incomplete types
        if self._write(0):
            return
        owner, generation, age = self._read()
        is_here = owner.get("machine") == self._me["machine"]
        is_dead = not owner or (is_here and not psutil.pid_exists(owner["pid"]))
        # A live run writes within one period; the clocks of the two hosts may differ.
        waiting = time.monotonic() + max(1.25 * _PERIOD, min(_LOST, _LOST - age))
        while not is_dead and self._read()[1] == generation:
            is_dead = time.monotonic() > waiting
            time.sleep(_PERIOD / 10)
        if not self._write(generation) and not self._write(0):  # 0: the owner has given it back
            raise self._taken(self._read()[0])

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
                return _owner(blob.download_as_bytes(timeout=_PERIOD)), blob.generation, age
        return {}, 0, 0.0

    def _stay_alive(self, lost: Callable[[str], None]) -> None:
        while not self._closed.wait(_PERIOD):
            with contextlib.suppress(Exception):  # the next attempt may get through
                if not self._write(self._generation) and not self._closed.is_set():
                    owner, generation, _ = self._read()
                    lost(str(self._taken(owner)) if generation else f"{self._path} was deleted")
                    return


def _owner(content: str | bytes) -> dict[str, Any]:
    """The process that a lock names; {} if the lock is empty or damaged."""
    with contextlib.suppress(ValueError, AttributeError):
        owner = files.parse_json(content)
        return owner if {"host", "pid"} <= owner.keys() else {}
    return {}


def _machine() -> str:
    """The machine in which process ids are unique: the kernel's start and the container."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
