"""Keeps a second process out of a folder: a run's workdir, or records that are being made."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from etils import epath

from common import entry
from common.errors import UserError, one_line, parse_json

_SIGN = 20.0  # seconds between signs of life on gs://, and of silence before a new attempt
_SILENCE = 90.0  # seconds without a sign of life after which a run counts as dead
# NFS without its lock service, Lustre without -o flock, other file systems that have no locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class LockError(UserError):
    """Another process has the folder; the message names it and its host."""


Taken = Callable[[dict[str, Any]], LockError]  # the error that names an owner


class LocalLock:
    """A lock on a disk, which the kernel holds for the process.

    A file system without locks, as of some clusters, gets a NOTE.
    """

    def __init__(self, path: epath.Path, taken: Taken, say: Callable[[str], None]):
        self._path = path
        self._file = open(path, "a+", errors="replace")  # noqa: SIM115 (held while it is open)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with self._file as file:
                file.seek(0)
                raise taken(_owner(file.read())) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._file.close()
                raise
            say(
                f"NOTE {path}: its file system has no locks ({error.strerror}). Start no second "
                "process in this folder while this one works: nothing would refuse it"
            )
        self._file.truncate(0)
        self._file.write(json.dumps(_this_process()))
        self._file.flush()

    def check(self) -> None:
        """Raises LockError if the lock's file, and perhaps its folder, was replaced."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino:
                return
        raise LockError(f"{self._path} was deleted: is another process beginning there?")

    def close(self) -> None:
        self._file.close()  # the file stays: who has opened it might lock a deleted one


class BucketLock:
    """A lock on gs://, where no file can be locked.

    The lock is an object that only one process can create, and that it writes again every 20 s as
    a sign of life. A later process replaces it if its process is known to be dead, or after 90 s of
    silence.
    """

    def __init__(self, path: epath.Path, taken: Taken, lost: Callable[[str], None]):
        self._path, self._taken, self._me = path, taken, _this_process()
        self._generation = 0  # of the object, as this run wrote it last
        self._closed = threading.Event()
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
            blob = self._bucket.blob(self._name)
            blob.delete(if_generation_match=self._generation, timeout=_SIGN)

    def _replace(self) -> None:
        """Replaces the lock of a process that is dead."""
        owner, generation, age = self._read()
        is_here = owner.get("machine") == self._me["machine"]
        is_dead = not owner or (is_here and not psutil.pid_exists(owner["pid"]))
        waiting = time.monotonic() + _patience(age)
        while not is_dead and self._read()[1] == generation:
            is_dead = time.monotonic() > waiting
            time.sleep(_SIGN / 10)
        if not self._write(generation) and not self._write(0):  # 0: the owner has given it back
            raise self._taken(self._read()[0])

    def _write(self, generation: int) -> bool:
        """Writes the lock if the object has this generation; 0 means that there is no object."""
        from google.api_core.exceptions import PreconditionFailed

        blob, text = self._bucket.blob(self._name), json.dumps(self._me)
        try:
            blob.upload_from_string(text, if_generation_match=generation, timeout=_SIGN)
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
            if (blob := self._bucket.get_blob(self._name, timeout=_SIGN)) is not None:
                age = time.time() - blob.updated.timestamp()
                return _owner(blob.download_as_bytes(timeout=_SIGN)), blob.generation, age
        return {}, 0, 0.0

    def _stay_alive(self, lost: Callable[[str], None]) -> None:
        while not self._closed.wait(_SIGN):
            with contextlib.suppress(Exception):  # the next attempt may get through
                if not self._write(self._generation) and not self._closed.is_set():
                    owner, generation, _ = self._read()
                    deleted = f"{self._path} was deleted"
                    lost(str(self._taken(owner)) if generation else deleted)
                    return


def _patience(age: float) -> float:
    """Seconds to wait for a sign of life of a run whose last one is `age` seconds old."""
    # A live run writes within one period; the clocks of the two hosts may differ.
    return max(1.25 * _SIGN, min(_SILENCE, _SILENCE - age))


def _owner(content: str | bytes) -> dict[str, Any]:
    """The process that a lock names; {} if it was killed within its write, or it was damaged."""
    with contextlib.suppress(ValueError):
        owner = parse_json(content)
        if isinstance(owner, dict) and isinstance(owner.get("pid"), int) and "host" in owner:
            return owner
    return {}


def _this_process() -> dict[str, Any]:
    """What a lock says about its owner; in `machine`, process ids are unique."""
    host = machine = socket.gethostname()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"  # and the container
    return {"host": host, "pid": os.getpid(), "machine": machine, "token": uuid.uuid4().hex}


def has_locks(folder: str) -> bool:
    """Whether files in a local folder can be locked by `fcntl`, as TensorStore locks its own."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    return True


def take(
    path: str, does: str, fix: str, lost: Callable[[str], None], say: Callable[[str], None]
) -> LocalLock | BucketLock:
    """Takes the lock `path` until it is closed or the process dies.

    LockError says who has it, or why it cannot be written: the owner `does` something, such as
    "trains in DIR"; `fix` is what a second process may do besides waiting. `lost` is called with a
    message, in a thread, if another process takes the lock on gs://, `say` with a NOTE.
    """

    def taken(owner: dict[str, Any]) -> LockError:
        name = "process {pid} on {host}".format(**owner) if owner else "another process"
        return LockError(f"{name} {does} already: wait until it has ended, stop it, or {fix}")

    file = epath.Path(path)
    try:
        return BucketLock(file, taken, lost) if "://" in path else LocalLock(file, taken, say)
    except LockError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise LockError(f"cannot use {path}: {one_line(error)}") from error


@contextlib.contextmanager
def alone(path: str, does: str, fix: str) -> Iterator[None]:
    """Holds the lock `path` within this context, and leaves neither it nor new empty folders."""
    folder, is_local, made = os.path.dirname(path), "://" not in path, []
    while is_local and folder and not os.path.isdir(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    if made:
        os.makedirs(made[0], exist_ok=True)

    def lost(message: str) -> None:
        print(message, file=sys.stderr)
        entry.leave(1)

    lock = take(path, does, fix, lost, print)
    try:
        lock.check()  # the last owner may have deleted the file that this one has opened
        yield
    finally:
        with contextlib.suppress(LockError):
            lock.check()
            if is_local:
                os.remove(path)
        lock.close()
        with contextlib.suppress(OSError):  # one is not empty
            for folder in made:
                os.rmdir(folder)
