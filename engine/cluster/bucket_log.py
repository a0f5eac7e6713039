"""Writes a host's log to gs://, where a connection that stands still must not stop the run."""

from __future__ import annotations

import logging
import threading
import time

from engine.cluster import hostlog

_PERIOD = 30.0  # seconds between uploads: gs:// cannot append, so each one writes the whole file


class BucketLog(hostlog.HostLog):
    """A host's log on gs://; a thread uploads it."""

    def __init__(self, workdir: str, index: int):
        self._uploaded = 0.0  # time.monotonic() of the last upload
        self._upload: threading.Thread | None = None
        super().__init__(workdir, index)

    def open(self) -> None:
        if self.path.exists():
            self.text = self.path.read_text()
            self.written = len(self.text)

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a line. It is uploaded within half a minute, warnings at once."""
        self.text += self.format(record) + "\n"
        is_due = time.monotonic() - self._uploaded > _PERIOD
        if is_due or (record.levelno >= logging.WARNING and record.name == "tpu_suite"):
            self._start_upload()

    def flush(self) -> None:
        """Uploads the lines that are not written yet; waits at most 10 s."""
        until = time.monotonic() + hostlog.PATIENCE
        for _ in range(2):  # the first may have begun before the last line
            if self.written < len(self.text):
                try:
                    self._start_upload().join(max(until - time.monotonic(), 0.0))
                except RuntimeError:  # Python 3.12 starts no thread while it shuts down
                    self.write()

    def save(self, text: str) -> None:
        self._uploaded = time.monotonic()
        self.path.write_text(text)

    def _start_upload(self) -> threading.Thread:
        """The upload that is under way, or else a new one."""
        if self._upload is None or not self._upload.is_alive():
            self._upload = threading.Thread(target=self.write, daemon=True, name="host log")
            self._upload.start()
        return self._upload
