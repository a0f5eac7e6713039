"""One training run per workdir."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from typing import Any

from etils import epath

from errors import UserError, one_line

_NAME = "run.lock"
_PERIOD = 20.0  # seconds between signs of life on gs://
_LOST = 90.0  # of silence, after which a run on gs:// counts as dead


class LockError(UserError):
    """Another run has the workdir; the message says which."""


class Lock:
    """Held until closed, or until the process dies.

    On a local disk the kernel holds it. gs:// has no locks: there a file is written again and
    again, and a run whose file no longer changes counts as dead. Two runs that start within the
    same second both find the file free; the one that wrote first notices and stops.
    """

    def __init__(self, workdir: str, lost: Any = None):
        """Takes the lock.

        Args:
          workdir: the run's.
          lost: called with a message, in a thread, if another run takes the lock later on.

        Raises:
          LockError: another run has it.
        """
        self._path = epath.Path(workdir) / _NAME
        self._me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _machine(),
            "token": uuid.uuid4().hex,
        }
        self._file: Any = None
        self._closed = threading.Event()
        try:
            if "://" in workdir:
                self._take_remote()
                threading.Thread(target=self._live, args=(lost,), daemon=True).start()
            else:
                self._take_local()
        except LockError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise LockError(f"cannot use {self._path}: {one_line(error)}") from error

    def check(self) -> None:
        """Raises LockError if the lock's file, and with it perhaps the workdir, was replaced."""
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
            elif self._read() == self._me["token"]:
                self._path.unlink()

    def _take_local(self) -> None:
        file = open(self._path, "a+")  # noqa: SIM115 (the lock is held while it is open)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            text = file.read()
            file.close()
            raise LockError(self._taken(text)) from None
        file.truncate(0)
        file.write(json.dumps(self._me))
        file.flush()
        self._file = file

    def _taken(self, text: str) -> str:
        try:
            who = json.loads(text)
            owner = f"process {who['pid']} on {who['host']}"
        except (ValueError, KeyError, TypeError):
            owner = "another process"
        return (
            f"{owner} trains in {self._path.parent} already: wait until it has ended, stop it, or "
            "use another --workdir"
        )

    # On gs://.

    def _take_remote(self) -> None:
        before = self._path.read_text() if self._path.exists() else ""
        if before and not self._dead(before):
            waited = 0.0
            while waited < _LOST:
                time.sleep(2.0)
                waited += 2.0
                now = self._path.read_text() if self._path.exists() else ""
                if now != before:
                    if now:
                        raise LockError(self._taken(now))
                    break
        self._write(0)
        time.sleep(1.0)  # the other of two that start at once writes within this
        if self._read() != self._me["token"]:
            raise LockError(self._taken(self._path.read_text()))

    def _dead(self, text: str) -> bool:
        """Whether the process that wrote it ran on this host and has ended."""
        try:
            who = json.loads(text)
            if who["machine"] != self._me["machine"]:
                return False
            os.kill(who["pid"], 0)
        except (ValueError, KeyError, TypeError, ProcessLookupError):
            return True
        except PermissionError:
            return False
        return False

    def _write(self, count: int) -> None:
        self._path.write_text(json.dumps({**self._me, "alive": count}))

    def _read(self) -> str:
        return json.loads(self._path.read_text())["token"]

    def _live(self, lost: Any) -> None:
        count = 0
        while not self._closed.wait(_PERIOD):
            count += 1
            with contextlib.suppress(Exception):  # the next one may get through
                gone = not self._path.exists()
                if gone or self._read() != self._me["token"]:
                    if lost:
                        text = "" if gone else self._path.read_text()
                        lost(f"{self._path} was deleted" if gone else self._taken(text))
                    return
                self._write(count)


def _machine() -> str:
    """What tells process ids here from those elsewhere: the kernel's start and the container."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
