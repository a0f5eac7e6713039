"""Writes each host's own log to workdir/hosts/, where later runs append to it."""

import contextlib
import logging
import threading
import time

from etils import epath

from common.errors import one_line
from engine.cluster.watchdog import within

PATIENCE = 10.0  # seconds that gs:// may keep a thread that has something more important to do
_PERIOD = 30.0  # seconds between two uploads to gs://
_log = logging.getLogger("tpu_suite")
_LIBRARIES = logging.getLogger("absl")  # Orbax writes its errors there


class HostLog(logging.Handler):
    """Appends log records to hosts/host-NNN.log; a log that cannot be written stops nothing.

    gs:// cannot append: there a thread uploads all of the text, every half minute and at warnings.
    """

    def __init__(self, workdir: str, index: int):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.workdir, self.is_remote = workdir, "://" in workdir
        self.path = epath.Path(workdir) / "hosts" / f"host-{index:03d}.log"
        self._text = ""  # of this run; on gs:// also of those before
        self._is_open = False  # a log that cannot be read must not be replaced
        self._writing = threading.Lock()
        self._uploaded = 0.0  # time.monotonic() of the last upload
        self._upload: threading.Thread | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.is_remote and self.path.exists():
                self._text = self.path.read_text()
            self._is_open = True
        except Exception as error:  # each file system has errors of its own
            _log.warning("WARNING no log in %s: %s", self.path, one_line(error))
        self._written = len(self._text)  # characters of the text that are in the file

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a line and writes it; on gs:// within half a minute, a warning at once."""
        self._text += self.format(record) + "\n"
        is_warning = record.levelno >= logging.WARNING and record.name == "tpu_suite"
        if not self.is_remote:
            self._write()
        elif is_warning or time.monotonic() - self._uploaded > _PERIOD:
            self._start_upload()

    def flush(self) -> None:
        """Writes the lines that are not written yet; waits at most 10 s for gs://."""
        until = time.monotonic() + PATIENCE
        for _ in range(2):  # an upload may have begun before the last line
            if self._written < len(self._text):
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

    def _start_upload(self) -> threading.Thread:
        """The thread that is writing, or else a new one."""
        if self._upload is None or not self._upload.is_alive():
            self._upload = threading.Thread(target=self._write, daemon=True, name="host log")
            self._upload.start()
        return self._upload

    def _write(self) -> None:
        """Writes the lines that are not written yet, unless that fails."""
        # Whatever fills the disk stops the run elsewhere, with a message.
        with self._writing, contextlib.suppress(Exception):
            text, self._uploaded = self._text, time.monotonic()
            if self._is_open and self.is_remote:
                self.path.write_text(text)
            elif self._is_open:
                with open(self.path, "a") as file:
                    file.write(text[self._written :])
            self._written = len(text)


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
