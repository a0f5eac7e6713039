"""Writes each host's own log to workdir/hosts/, where later runs append to it."""

from __future__ import annotations

import contextlib
import logging
import threading

from etils import epath

from engine.cluster.stalls import within
from errors import one_line

PATIENCE = 10.0  # seconds that gs:// may keep a thread that has something more important to do
_log = logging.getLogger("tpu_suite")
_LIBRARIES = logging.getLogger("absl")  # Orbax writes its errors there


class HostLog(logging.Handler):
    """Appends log records to hosts/host-NNN.log; a log that cannot be written stops nothing."""

    def __init__(self, workdir: str, index: int):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.workdir = workdir
        self.path = epath.Path(workdir) / "hosts" / f"host-{index:03d}.log"
        self.text = ""
        self.written = 0  # characters of the text that are in the file
        self._writing = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.open()
            self._is_open = True
        except Exception as error:  # each file system has errors of its own
            self._is_open = False  # a log that cannot be read must not be replaced
            _log.warning("WARNING no log in %s: %s", self.path, one_line(error))

    def open(self) -> None:
        """Prepares to write where an earlier run has stopped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a line."""
        self.text += self.format(record) + "\n"
        self.write()

    def flush(self) -> None:
        """Writes the lines that are not written yet."""
        self.write()

    def note(self, name: str, text: str) -> str:
        """Writes hosts/host-NNN.NAME; returns its path, or "" if that fails or takes over 10 s."""
        path = self.path.with_suffix(f".{name}")

        def write() -> str:
            try:
                path.write_text(text)
            except Exception:  # the caller has something more important to report
                return ""
            return str(path)

        return within(write, PATIENCE)

    def write(self) -> None:
        """Writes the lines that are not written yet, unless that fails."""
        # Whatever fills the disk stops the run elsewhere, with a message.
        with self._writing, contextlib.suppress(Exception):
            text = self.text
            if self._is_open and len(text) > self.written:
                self.save(text)
            self.written = len(text)

    def save(self, text: str) -> None:
        """Brings the file up to date with all lines, `text`."""
        with open(self.path, "a") as file:
            file.write(text[self.written :])


def attach(workdir: str, index: int) -> HostLog:
    """Sends the program's log and Orbax's errors to host `index`'s file; twice, the same log."""
    for handler in _log.handlers:
        if isinstance(handler, HostLog):
            if handler.workdir == workdir:
                return handler
            for logger in (_log, _LIBRARIES):
                logger.removeHandler(handler)
            handler.flush()
    if "://" in workdir:
        from engine.cluster.bucket_log import BucketLog

        handler = BucketLog(workdir, index)
    else:
        handler = HostLog(workdir, index)
    for logger in (_log, _LIBRARIES):
        logger.addHandler(handler)
    return handler
