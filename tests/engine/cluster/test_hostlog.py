"""The log of a host where nothing but the log is tested; runs are in tests/test_gcs_stalls.py."""

import logging
import threading
from pathlib import Path

import pytest

from engine.cluster import hostlog
from engine.cluster.hostlog import HostLog


def record(text, level=logging.INFO, name="tpu_suite"):
    return logging.LogRecord(name, level, "", 0, "%s", (text,), None)


@pytest.fixture
def remote(tmp_path):
    """A log as on gs://."""
    log = HostLog(str(tmp_path), 3)
    log.is_remote = True
    return log


@pytest.mark.parametrize(
    ("since", "level", "name", "starts"),
    [
        (30.0, logging.INFO, "tpu_suite", False),
        (30.1, logging.INFO, "tpu_suite", True),
        (30.0, logging.WARNING, "tpu_suite", True),
        (30.0, logging.ERROR, "absl", False),
    ],
)
def test_lines_are_uploaded_every_half_minute_and_warnings_at_once(
    remote, monkeypatch, since, level, name, starts
):
    uploads = []
    monkeypatch.setattr(hostlog.time, "monotonic", lambda: 130.0)
    monkeypatch.setattr(remote, "_start_upload", lambda: uploads.append(remote._text))
    remote._uploaded = 130.0 - since
    remote.emit(record("a line", level, name))
    assert len(uploads) == starts and all(text.endswith("a line\n") for text in uploads)


def test_a_workdir_has_one_log_and_another_workdir_another(tmp_path):
    first = hostlog.attach(str(tmp_path / "a"), 0)
    loggers = logging.getLogger("tpu_suite"), logging.getLogger("absl")
    try:
        assert hostlog.attach(str(tmp_path / "a"), 0) is first
        second = hostlog.attach(str(tmp_path / "b"), 0)
        for logger in loggers:
            assert second in logger.handlers and first not in logger.handlers
    finally:
        for logger in loggers:
            for handler in [h for h in logger.handlers if isinstance(h, HostLog)]:
                logger.removeHandler(handler)


def test_the_last_lines_are_written_while_python_shuts_down(remote, tmp_path, monkeypatch):
    """Python 3.12 refuses new threads then; logging flushes its handlers at that time."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    remote._uploaded = float("inf")  # not yet
    remote.emit(record("the last line"))
    assert not (tmp_path / "hosts" / "host-003.log").exists()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    remote.flush()
    assert (tmp_path / "hosts" / "host-003.log").read_text().endswith("INFO the last line\n")


def test_each_host_has_a_log_of_its_own(tmp_path, gcs):
    log = logging.getLogger("tpu_suite")
    log.setLevel(logging.INFO)
    for folder in (str(tmp_path), f"{gcs.bucket()}/run"):
        for text in ("first", "second"):  # two runs after one another
            handler = hostlog.attach(folder, 12)
            assert hostlog.attach(folder, 12) is handler
            log.info("%s run", text)
            handler.flush()
            log.removeHandler(handler)
        local = Path(folder) / "hosts/host-012.log" if folder.startswith("/") else None
        text = local.read_text() if local else gcs.read(f"{folder}/hosts/host-012.log").decode()
        assert [line.split(" INFO ")[1] for line in text.splitlines()] == [
            "first run",
            "second run",
        ]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "hosts").write_text("in the way")
    handler = hostlog.attach(str(tmp_path), 0)
    logging.getLogger("tpu_suite").info("still here")
    assert handler.note("stacks.txt", "x") == ""
    logging.getLogger("tpu_suite").removeHandler(handler)
