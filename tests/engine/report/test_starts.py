"""A start writes itself down while it lasts."""

import json
import threading
import time
import types
from typing import Any

import jax
import pytest

from engine.report import starts


@pytest.fixture
def mesh() -> Any:
    return jax.sharding.Mesh(jax.devices(), ("data",))


def written(folder):
    return json.loads((folder / "starts.json").read_text())


def test_a_start_is_written_when_it_begins_and_when_it_ends(tmp_path, mesh, monkeypatch):
    process = types.SimpleNamespace(create_time=lambda: 1000.04)
    monkeypatch.setattr(starts.psutil, "Process", lambda: process)
    times = iter([1010.0, 1015.0, 1042.0])
    clock = {"time": lambda: next(times), "strftime": time.strftime, "gmtime": time.gmtime}
    monkeypatch.setattr(starts, "time", types.SimpleNamespace(**clock))
    known: list[Any] = [{"step": 0, "seconds": 7.0}]
    record = starts.Record(str(tmp_path), known, 50, mesh)
    assert written(tmp_path) == known and len(known) == 2
    own = {"step": 50, "begun": 1000.0, "seconds": 10.0, "device": "cpu", "chips": 8}
    assert own.items() <= known[1].items()
    record.note(compile_seconds=3.0)
    assert written(tmp_path)[1] == {**known[1], "compile_seconds": 3.0, "seconds": 15.0}
    record.close()
    assert written(tmp_path)[1]["seconds"] == 42.0 and written(tmp_path)[0] == known[0]


def test_a_thread_notes_how_long_it_lasts(tmp_path, mesh, monkeypatch):
    """So that the end of a killed start is known."""
    monkeypatch.setattr(starts, "_DISK", 0.01)
    noted = threading.Semaphore(0)
    monkeypatch.setattr(starts.Record, "note", lambda self: noted.release())
    record = starts.Record(str(tmp_path), [], 0, mesh)
    assert all(noted.acquire(timeout=20) for _ in range(3))  # the first one when it began
    record.close()


def test_what_cannot_be_written_stops_nothing(tmp_path, mesh):
    known: list[Any] = []
    record = starts.Record(str(tmp_path / "missing"), known, 0, mesh)
    record.close()
    assert known[0]["seconds"] > 0 and not (tmp_path / "missing").exists()


def test_process_0_alone_writes(tmp_path, mesh, monkeypatch):
    monkeypatch.setattr(starts.jax, "process_index", lambda: 1)
    starts.Record(str(tmp_path), [], 0, mesh).close()
    assert not list(tmp_path.iterdir())
