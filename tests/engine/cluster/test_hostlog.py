"""The log of a host where nothing but the log is tested; runs are in tests/test_gcs_stalls.py."""

import logging
import threading

from engine.cluster.hostlog import HostLog


def test_the_last_lines_are_written_while_python_shuts_down(tmp_path, monkeypatch):
    """Python 3.12 refuses new threads then; logging flushes its handlers at that time."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    log = HostLog(str(tmp_path), 3)
    log._is_local = False  # as on gs://, where a thread uploads
    log._flushed = float("inf")  # not yet
    log.emit(logging.LogRecord("absl", logging.INFO, "", 0, "the last %s", ("line",), None))
    assert not (tmp_path / "hosts" / "host-003.log").exists()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    log.flush()
    assert (tmp_path / "hosts" / "host-003.log").read_text().endswith("INFO the last line\n")
