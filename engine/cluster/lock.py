"""Keeps a second run out of a workdir."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import uuid
from collections.abc import Callable
from typing import IO, Any, Protocol

from etils import epath

from errors import UserError, one_line, parse_json


class LockError(UserError):
    """Another run has the workdir; the message names its process and host."""


class Lock(Protocol):
    """The right to write in a workdir, until it is closed or the process dies."""

    def check(self) -> None:
        """Raises LockError if the workdir no longer belongs to this run."""
        ...

    def close(self) -> None:
        """Gives the lock back."""
        ...


def take(workdir: str, lost: Callable[[str], None] = lambda message: None) -> Lock:
    """Takes the lock of a workdir.

    Args:
      workdir: the run's folder, local or gs://.
      lost: called with a message, in a thread, if another run takes the lock on gs://.

    Raises:
      LockError: another run has the lock, or the lock cannot be written.
    """
    path = epath.Path(workdir) / "run.lock"
    try:
        if "://" in workdir:
            from engine.cluster.bucket_lock import BucketLock

            return BucketLock(path, lost)
        return LocalLock(path)
    except LockError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise LockError(f"cannot use {path}: {one_line(error)}") from error


class LocalLock:
    """A lock on a local disk, which the kernel holds for the process."""

    def __init__(self, path: epath.Path):
        """Takes the lock; LockError if another process has it."""
        self._path = path
        file = open(path, "a+")  # noqa: SIM115 (the lock is held while it is open)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                raise taken(path, owner(file.read())) from None
        file.truncate(0)
        file.write(json.dumps(this_process()))
        file.flush()
        self._file: IO[str] = file

    def check(self) -> None:
        """Raises LockError if the lock's file, and perhaps the workdir, was replaced."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino:
                return
        raise LockError(f"{self._path} was deleted: is another run beginning there?")

    def close(self) -> None:
        self._file.close()  # the file stays: deleting it would let two runs in


def taken(path: epath.Path, owner: dict[str, Any]) -> LockError:
    """The error for a lock that another process has."""
    name = "process {pid} on {host}".format(**owner) if owner else "another process"
    return LockError(
        f"{name} trains in {path.parent} already: wait until it has ended, stop it, or use another "
        "--workdir"
    )


def this_process() -> dict[str, Any]:
    """What a lock says about its owner."""
    host, token = socket.gethostname(), uuid.uuid4().hex
    return {"host": host, "pid": os.getpid(), "machine": _machine(), "token": token}


def owner(content: str | bytes) -> dict[str, Any]:
    """The process that a lock names; {} if the lock is empty or damaged."""
    with contextlib.suppress(ValueError, AttributeError):
        owner = parse_json(content)
        return owner if {"host", "pid"} <= owner.keys() else {}
    return {}


def _machine() -> str:
    """The machine in which process ids are unique: the kernel's start and the container."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
