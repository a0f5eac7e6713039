"""The log of a host where nothing but the log is tested; runs are in tests/test_gcs_stalls.py."""

import logging

from engine.cluster import hostlog


def test_each_host_has_a_log_of_its_own_that_later_runs_append_to(tmp_path):
    loggers = logging.getLogger("tpu_suite"), logging.getLogger("absl")
    loggers[0].setLevel(logging.INFO)
    for text in ("first", "second"):  # two runs after one another
        handler = hostlog.attach(str(tmp_path / "a"), 12)
        assert hostlog.attach(str(tmp_path / "a"), 12) is handler
        loggers[0].info("%s run", text)
        other = hostlog.attach(str(tmp_path / "b"), 12)
        for logger in loggers:
            assert other in logger.handlers and handler not in logger.handlers
            logger.removeHandler(other)
    lines = (tmp_path / "a/hosts/host-012.log").read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in lines] == ["first run", "second run"]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "hosts").write_text("in the way")
    handler = hostlog.attach(str(tmp_path), 0)
    logging.getLogger("tpu_suite").info("still here")
    assert handler.note("stacks.txt", "x") == ""
    logging.getLogger("tpu_suite").removeHandler(handler)


def test_a_bucket_has_notes_and_no_log(gcs):
    workdir = f"{gcs.bucket()}/run"
    handler = hostlog.HostLog(workdir, 0)
    assert not handler.path.exists()  # imports TensorFlow, for which `note` would not wait
    handler.emit(logging.makeLogRecord({"msg": "a line", "levelno": logging.ERROR}))
    path = handler.note("stacks.txt", "stacks")
    assert path == f"{workdir}/hosts/host-000.stacks.txt" and gcs.read(path) == b"stacks"
    assert not [name for name in gcs.names(workdir) if name.endswith(".log")]
