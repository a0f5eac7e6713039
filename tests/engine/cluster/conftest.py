"""What several tests of the hosts share."""

import logging
import tempfile

import pytest


@pytest.fixture(autouse=True)
def sockets_go(monkeypatch, tmp_path_factory):
    """The sockets of tunnels that no test closes lie in a folder that goes."""
    tmp_path_factory.getbasetemp()  # not there
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def log():
    """The lines that host 0 logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tpu_suite").addHandler(handler)
    yield lines
    logging.getLogger("tpu_suite").removeHandler(handler)
