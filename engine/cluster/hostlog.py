"""Writes each host's own log to workdir/hosts/, where later runs append to it."""

import contextlib
import logging

from etils import epath

from common.errors import one_line
from engine.cluster.watchdog import within

_PATIENCE = 10.0  # seconds that gs:// may keep a thread that has something more important to do
_log = logging.getLogger("tpu_suite")
_LIBRARIES = logging.getLogger("absl")  # Orbax writes its errors there


class HostLog(logging.Handler):
    """Appends log records to hosts/host-NNN.log; a log that cannot be written stops nothing.

    gs:// cannot append, so that only the notes are written there.
    """

    def __init__(self, workdir: str, index: int):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.workdir = workdir
        self.path = epath.Path(workdir) / "hosts" / f"host-{index:03d}.log"
        try:
            if "://" not in workdir:
                self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _log.warning("WARNING no log in %s: %s", self.path, one_line(error))

    def emit(self, record: logging.LogRecord) -> None:
        """Appends a line, unless that fails."""
        # Whatever fills the disk stops the run elsewhere, with a message.
        with contextlib.suppress(OSError):
            if "://" not in self.workdir:
                with open(self.path, "a") as file:
                    file.write(self.format(record) + "\n")

    def note(self, name: str, text: str) -> str:
        """Writes hosts/host-NNN.NAME; returns its path, or "" if that fails or takes over 10 s."""
        path = self.path.with_suffix(f".{name}")

        def write() -> str:
            with contextlib.suppress(Exception):  # the caller has something more important to say
                path.write_text(text)
                return str(path)
            return ""

        return within(write, _PATIENCE)


def attach(workdir: str, index: int) -> HostLog:
    """Sends the program's log and Orbax's errors to host `index`'s file; twice, the same log."""
    for handler in [h for h in _log.handlers if isinstance(h, HostLog)]:
        if handler.workdir == workdir:
            return handler
        for logger in (_log, _LIBRARIES):
            logger.removeHandler(handler)
    handler = HostLog(workdir, index)
    for logger in (_log, _LIBRARIES):
        logger.addHandler(handler)
    return handler
