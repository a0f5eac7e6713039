"""Each host's own log in workdir/hosts/, of runs after one another."""

from __future__ import annotations

import logging
import os
import threading
import time

from etils import epath

_PERIOD = 30.0  # seconds between uploads: gs:// has no append, a file is written anew


class HostLog(logging.Handler):
    """Appends what is logged to hosts/host-NNN.log; a log that cannot be written stops nothing."""

    def __init__(self, workdir: str, index: int):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._path = epath.Path(workdir) / "hosts" / f"host-{index:03d}.log"
        self._local = "://" not in workdir
        self._text, self._written, self._flushed = "", 0, 0.0
        self._flushing = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._local and self._path.exists():
                self._text = self._path.read_text()
                self._written = len(self._text)
        except Exception as error:  # each file system has errors of its own
            logging.getLogger("tpu_suite").warning("no log in %s: %s", self._path, error)

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a line; on gs:// it is uploaded with the next after half a minute, or at the end.

        Errors at once.
        """
        self._text += self.format(record) + "\n"
        due = time.monotonic() - self._flushed > _PERIOD
        if self._local or due or record.levelno >= logging.WARNING:
            self.flush()

    def flush(self) -> None:
        """Writes what is not yet written."""
        with self._flushing:
            text, self._flushed = self._text, time.monotonic()
            if len(text) == self._written:
                return
            try:
                if self._local:
                    with open(self._path, "a") as file:
                        file.write(text[self._written :])
                else:
                    self._path.write_text(text)
                self._written = len(text)
            except Exception:  # a full disk is told by what matters more
                return

    def note(self, name: str, text: str) -> str:
        """Writes a file of this host beside the log; returns its path, "" if it cannot be."""
        path = self._path.parent / f"{os.path.splitext(self._path.name)[0]}.{name}"
        try:
            path.write_text(text)
        except Exception:  # the caller has something more important to say
            return ""
        return str(path)


def attach(workdir: str, index: int) -> HostLog:
    """Makes the program's log go there, too; once per process and workdir."""
    log = logging.getLogger("tpu_suite")
    for handler in log.handlers:
        if isinstance(handler, HostLog):
            if handler._path.parent.parent == epath.Path(workdir):
                return handler
            log.removeHandler(handler)
            handler.flush()
    handler = HostLog(workdir, index)
    log.addHandler(handler)
    return handler
