"""Writes each host's own log to workdir/hosts/, where later runs append to it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from etils import epath

_PERIOD = 30.0  # seconds between uploads: gs:// cannot append, so each one writes the whole file
_log = logging.getLogger("tpu_suite")
_LIBRARIES = logging.getLogger("absl")  # Orbax writes its errors there


class HostLog(logging.Handler):
    """Appends log records to hosts/host-NNN.log; a log that cannot be written stops nothing."""

    def __init__(self, workdir: str, index: int):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.workdir = workdir
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
            _log.warning("no log in %s: %s", self._path, error)

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a line. On gs:// it is uploaded within half a minute, warnings at once."""
        self._text += self.format(record) + "\n"
        due = time.monotonic() - self._flushed > _PERIOD
        is_urgent = record.levelno >= logging.WARNING and record.name == _log.name
        if self._local or due or is_urgent:
            self.flush()

    def flush(self) -> None:
        """Writes the lines that are not written yet."""
        # Whatever fills the disk stops the run elsewhere, with a message.
        with self._flushing, contextlib.suppress(Exception):
            text, self._flushed = self._text, time.monotonic()
            if self._local and len(text) > self._written:
                with open(self._path, "a") as file:
                    file.write(text[self._written :])
            elif len(text) > self._written:
                self._path.write_text(text)
            self._written = len(text)

    def note(self, name: str, text: str) -> str:
        """Writes hosts/host-NNN.NAME and returns its path, or "" if it cannot be written."""
        path = self._path.with_suffix(f".{name}")
        try:
            path.write_text(text)
        except Exception:  # the caller has something more important to report
            return ""
        return str(path)


def attach(workdir: str, index: int) -> HostLog:
    """Sends the program's log and Orbax's errors to host `index`'s file; twice, the same log."""
    for handler in _log.handlers:
        if isinstance(handler, HostLog):
            if handler.workdir == workdir:
                return handler
            for logger in (_log, _LIBRARIES):
                logger.removeHandler(handler)
            handler.flush()
    handler = HostLog(workdir, index)
    for logger in (_log, _LIBRARIES):
        logger.addHandler(handler)
    return handler
