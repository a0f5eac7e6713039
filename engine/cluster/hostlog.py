"""Writes each host's own log to workdir/hosts/, where later runs append to it."""

import contextlib
import logging
import threading
import time

from etils import epath

from common.errors import one_line
from engine.cluster.watchdog import within

PATIENCE = 10.0  # seconds that gs:// may keep a thread that has something more important to do
_PERIOD = 30.0  # seconds between uploads: gs:// cannot append, so each one writes all of the file
_log = logging.getLogger("tpu_suite")
_LIBRARIES = logging.getLogger("absl")  # Orbax writes its errors there


class HostLog(logging.Handler):
    """Appends log records to hosts/host-NNN.log; a log that cannot be written stops nothing.

    To gs:// a thread uploads all lines, within half a minute, after a warning at once.
    """

    def __init__(self, workdir: str, index: int):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.workdir, self._is_local = workdir, "://" not in workdir
        self.path = epath.Path(workdir) / "hosts" / f"host-{index:03d}.log"
        self.text = ""  # what the file shall hold; on a local disk without earlier runs
        self._is_open = False  # a log that cannot be read must not be replaced
        self._writing = threading.Lock()
        self._upload: threading.Thread | None = None
        self._uploaded = 0.0  # time.monotonic() of the last upload
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_local and self.path.exists():
                self.text = self.path.read_text()
            self._is_open = True
        except Exception as error:  # each file system has errors of its own
            _log.warning("WARNING no log in %s: %s", self.path, one_line(error))
        self.written = len(self.text)  # characters of the text that are in the file

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"
        is_urgent = record.levelno >= logging.WARNING and record.name == "tpu_suite"
        if self._is_local:
            self._write()
        elif is_urgent or time.monotonic() - self._uploaded > _PERIOD:
            self._start_upload()

    def flush(self) -> None:
        """Writes the lines that are not written yet; waits at most 10 s for gs://."""
        if self._is_local:
            self._write()
            return
        until = time.monotonic() + PATIENCE
        for _ in range(2):  # the first may have begun before the last line
            if self.written < len(self.text):
                try:
                    self._start_upload().join(max(until - time.monotonic(), 0.0))
                except RuntimeError:  # Python 3.12 starts no thread while it shuts down
                    self._write()

    def note(self, name: str, text: str) -> str:
        """Writes hosts/host-NNN.NAME; returns its path, or "" if that fails or takes over 10 s."""
        path = self.path.with_suffix(f".{name}")

        def write() -> str:
            with contextlib.suppress(Exception):  # the caller has something more important to say
                path.write_text(text)
                return str(path)
            return ""

        return within(write, PATIENCE)

    def _write(self) -> None:
        """Writes the lines that are not written yet, unless that fails."""
        # Whatever fills the disk stops the run elsewhere, with a message.
        with self._writing, contextlib.suppress(Exception):
            text = self.text
            if self._is_open and len(text) > self.written:
                if self._is_local:
                    with open(self.path, "a") as file:
                        file.write(text[self.written :])
                else:
                    self._uploaded = time.monotonic()
                    self.path.write_text(text)
            self.written = len(text)

    def _start_upload(self) -> threading.Thread:
        """The upload that is under way, or else a new one."""
        if self._upload is None or not self._upload.is_alive():
            self._upload = threading.Thread(target=self._write, daemon=True, name="host log")
            self._upload.start()
        return self._upload


def attach(workdir: str, index: int) -> HostLog:
    """Sends the program's log and Orbax's errors to host `index`'s file; twice, the same log."""
    for handler in [h for h in _log.handlers if isinstance(h, HostLog)]:
        if handler.workdir == workdir:
            return handler
        for logger in (_log, _LIBRARIES):
            logger.removeHandler(handler)
        handler.flush()
    handler = HostLog(workdir, index)
    for logger in (_log, _LIBRARIES):
        logger.addHandler(handler)
    return handler
