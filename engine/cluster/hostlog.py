"""Writes each host's own log to workdir/hosts/, where later runs append to it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from etils import epath

from engine.cluster.stalls import within
from errors import one_line

_PATIENCE = 10.0  # seconds that gs:// may keep a thread that has something more important to do
_PERIOD = 30.0  # seconds between uploads: gs:// cannot append, so each one writes the whole file
_log = logging.getLogger("tpu_suite")
_LIBRARIES = logging.getLogger("absl")  # Orbax writes its errors there


class HostLog(logging.Handler):
    """Appends log records to hosts/host-NNN.log; a log that cannot be written stops nothing.

    A thread uploads the log to gs://, so that a connection that stands still stops nothing either.
    """

    def __init__(self, workdir: str, index: int):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.workdir = workdir
        self._path = epath.Path(workdir) / "hosts" / f"host-{index:03d}.log"
        self._is_local = "://" not in workdir
        self._text, self._written, self._flushed = "", 0, 0.0
        self._writing = threading.Lock()
        self._upload: threading.Thread | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_local and self._path.exists():
                self._text = self._path.read_text()
                self._written = len(self._text)
            self._is_open = True
        except Exception as error:  # each file system has errors of its own
            self._is_open = False  # what it holds must not be replaced
            _log.warning("WARNING no log in %s: %s", self._path, one_line(error))

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a line. On gs:// it is uploaded within half a minute, warnings at once."""
        self._text += self.format(record) + "\n"
        due = time.monotonic() - self._flushed > _PERIOD
        is_urgent = record.levelno >= logging.WARNING and record.name == _log.name
        if self._is_local:
            self._write()
        elif due or is_urgent:
            self._start_upload()

    def flush(self) -> None:
        """Writes the lines that are not written yet; waits for an upload at most 10 s."""
        if self._is_local:
            self._write()
            return
        until = time.monotonic() + _PATIENCE
        for _ in range(2):  # the first may have begun before the last line
            if self._written < len(self._text):
                try:
                    self._start_upload().join(max(until - time.monotonic(), 0.0))
                except RuntimeError:  # Python 3.12 starts no thread while it shuts down
                    self._write()

    def note(self, name: str, text: str) -> str:
        """Writes hosts/host-NNN.NAME; returns its path, or "" if that fails or takes over 10 s."""
        path = self._path.with_suffix(f".{name}")

        def write() -> str:
            try:
                path.write_text(text)
            except Exception:  # the caller has something more important to report
                return ""
            return str(path)

        return within(write, _PATIENCE)

    def _start_upload(self) -> threading.Thread:
        """The upload that is under way, or else a new one."""
        if self._upload is None or not self._upload.is_alive():
            self._upload = threading.Thread(target=self._write, daemon=True, name="host log")
            self._upload.start()
        return self._upload

    def _write(self) -> None:
        # Whatever fills the disk stops the run elsewhere, with a message.
        with self._writing, contextlib.suppress(Exception):
            text, self._flushed = self._text, time.monotonic()
            if self._is_open and len(text) > self._written:
                if self._is_local:
                    with open(self._path, "a") as file:
                        file.write(text[self._written :])
                else:
                    self._path.write_text(text)
            self._written = len(text)


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
