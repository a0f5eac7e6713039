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
from typing import Any

from etils import epath

from errors import UserError, one_line

_NAME = "run.lock"
_PERIOD = 20.0  # seconds between signs of life on gs://
_LOST = 90.0  # seconds without one after which a run on gs:// counts as dead


class LockError(UserError):
    """Another run has the workdir; the message says which."""


class Lock:
    """Held until it is closed or the process dies.

    On a local disk the kernel holds the lock. gs:// has no locks. There the lock is an object that
    only one run can create, and that the run writes again every 20 s as a sign of life. A later
    run replaces it if its process is known to be dead, or after 90 s of silence.
    """

    def __init__(self, workdir: str, lost: Callable[[str], None] = lambda message: None):
        """Takes the lock.

        Args:
          workdir: the run's folder, local or gs://.
          lost: called with a message, in a thread, if another run takes the lock later on.

        Raises:
          LockError: another run has the lock, or it cannot be written.
        """
        self._path = epath.Path(workdir) / _NAME
        self._me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _machine(),
            "token": uuid.uuid4().hex,
        }
        self._file: Any = None
        self._generation = 0  # of the object on gs://, as this run wrote it last
        self._closed = threading.Event()
        try:
            if "://" in workdir:
                self._bucket, self._name = _bucket(str(self._path))
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
        if self._file is None:
            return
        try:
            same = os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            same = False
        if not same:
            raise LockError(f"{self._path} was deleted: is another run beginning there?")

    def close(self) -> None:
        """Gives the lock back."""
        self._closed.set()
        with contextlib.suppress(Exception):
            if self._file is not None:
                self._file.close()  # the file stays: deleting it would let two runs in
            else:
                self._bucket.blob(self._name).delete(if_generation_match=self._generation)

    def _take_local(self) -> None:
        file = open(self._path, "a+")  # noqa: SIM115 (the lock is held while it is open)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            text = file.read()
            file.close()
            raise self._taken(text) from None
        file.truncate(0)
        file.write(json.dumps(self._me))
        file.flush()
        self._file = file

    def _taken(self, text: str) -> LockError:
        owner = _parsed(text)
        name = "process {pid} on {host}".format(**owner) if owner else "another process"
        return LockError(
            f"{name} trains in {self._path.parent} already: wait until it has ended, stop it, or "
            "use another --workdir"
        )

    # On gs://.

    def _take_remote(self) -> None:
        if self._write(0):
            return
        owner, generation, age = self._read()
        if not self._is_dead(owner):
            # A live run writes within one period; the clocks of the two hosts may differ.
            waiting = time.monotonic() + max(1.25 * _PERIOD, min(_LOST, _LOST - age))
            while time.monotonic() < waiting and self._read()[1] == generation:
                time.sleep(_PERIOD / 10)
        if not self._write(generation) and not self._write(0):  # 0: it has been given back
            raise self._taken(self._read()[0])

    def _write(self, generation: int) -> bool:
        """Writes the lock if the object there is still of this generation; 0: if there is none."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self._name)
        try:
            blob.upload_from_string(json.dumps(self._me), if_generation_match=generation)
            self._generation = blob.generation
        except PreconditionFailed:
            text, present, _ = self._read()
            if _parsed(text).get("token") != self._me["token"]:
                return False
            self._generation = present  # written by a request whose answer was lost
        return True

    def _read(self) -> tuple[str, int, float]:
        """(text, generation, age in seconds) of the lock; ("", 0, 0) if there is none."""
        from google.api_core.exceptions import NotFound

        try:
            if (blob := self._bucket.get_blob(self._name)) is not None:
                text = blob.download_as_bytes().decode(errors="replace")
                return text, blob.generation, time.time() - blob.updated.timestamp()
        except NotFound:  # replaced or deleted in between
            pass
        return "", 0, 0.0

    def _is_dead(self, text: str) -> bool:
        """Whether the process that wrote the lock ran on this machine and has ended."""
        owner = _parsed(text)
        if owner and owner.get("machine") != self._me["machine"]:
            return False
        try:
            os.kill(owner["pid"], 0)
        except PermissionError:
            return False
        except (KeyError, TypeError, ProcessLookupError):
            return True
        return False

    def _stay_alive(self, lost: Callable[[str], None]) -> None:
        while not self._closed.wait(_PERIOD):
            with contextlib.suppress(Exception):  # the next attempt may get through
                if not self._write(self._generation) and not self._closed.is_set():
                    text = self._read()[0]
                    lost(str(self._taken(text)) if text else f"{self._path} was deleted")
                    return


def _parsed(text: str) -> dict[str, Any]:
    """What a lock says of its owner; {} if it is empty or damaged."""
    try:
        owner = json.loads(text)
        return owner if {"host", "pid"} <= owner.keys() else {}
    except (ValueError, AttributeError):
        return {}


def _bucket(path: str) -> tuple[Any, str]:
    """The client's handle of the bucket of a gs:// path, and the object's name in it."""
    with warnings.catch_warnings(action="ignore"):  # of what only gRPC needs
        from google.cloud import storage
    bucket, _, name = path.removeprefix("gs://").partition("/")
    return storage.Client().bucket(bucket), name


def _machine() -> str:
    """What tells process ids here from those elsewhere: the kernel's start and the container."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
