import time

import pytest

from tests.mlperf_fixture import Clock


@pytest.fixture
def clock(monkeypatch):
    """The time that MLPerf's log sees."""
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock
