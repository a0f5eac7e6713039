"""The limits of a run, its memory, and the hosts' vote."""

import resource
import types
from typing import Any

import jax
import psutil
import pytest

from common.errors import ConfigError
from engine import sharding
from engine.cluster import guard, preemption
from engine.cluster.guard import Guard, MemoryFull

# Memory.


def files(folder, **content):
    for name, text in content.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


def test_memory_of_the_machine_and_of_the_container(tmp_path, monkeypatch):
    none = str(tmp_path / "none")
    assert 0 < guard.memory_used() < 1 and guard.memory_free() > 1 << 20  # this machine
    machine = types.SimpleNamespace(available=250 * 1024, total=1000 * 1024)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert guard.memory_used(none) == 0.75 and guard.memory_free(none) == 250 * 1024
    stat = "anon 700\ninactive_file 60\nactive_file 40\n"
    group = files(tmp_path, memory__max="1000\n", memory__current="1000\n", memory__stat=stat)
    assert guard.memory_used(group) == 0.9 and guard.memory_free(group) == 100
    assert guard.memory_free(none, limit=0.8) == 50 * 1024  # until four fifths are used
    files(tmp_path, memory__max="max\n")
    assert guard.memory_used(group) == 0.75
    allowed = psutil.Process().memory_info().vms + (1 << 30) + (100 << 10)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (allowed, allowed))  # ulimit -v
    assert guard.memory_free(none) <= 100 << 10 and guard.memory_used(none) == 0.75


def test_input_that_does_not_fit_is_refused_with_the_keys_that_cause_it(monkeypatch):
    monkeypatch.setattr(guard, "memory_free", lambda: 2_000_000_000)
    values = {"cats": 9, "dogs": 1, "size": 224}
    guard.afford({("dogs",): 2_000_000_000}, values)
    monkeypatch.setattr(guard, "memory_free", lambda: 2_750_000_000)
    with pytest.raises(ConfigError) as caught:  # these are rounded up; 0.01 % less is not
        guard.afford({("dogs",): 1_000_000_000, ("cats", "size"): 2_750_000_000}, values)
    text = (
        "about 3.8 GB of this host, 2.8 GB are free: 2.8 GB are for --config.cats=9 and --config.si"
    )
    assert text in str(caught.value)
    with pytest.raises(ConfigError, match="use hosts with more memory"):
        guard.afford({(): 1_800_000_000, ("dogs",): 1_200_000_000}, values)


# The vote.


@pytest.fixture
def watching(tmp_path, monkeypatch):
    """A guard of a run of one process, with memory that a test fills."""
    memory: Any = types.SimpleNamespace(used=0.1)
    monkeypatch.setattr(guard, "memory_used", lambda: memory.used)
    monkeypatch.setattr(guard, "_MEMORY_PERIOD", -1.0)
    monkeypatch.setattr(preemption, "_requested", None)
    guarded = Guard(str(tmp_path), sharding.make(("a", "b"), 1), 0.5)
    yield guarded, memory
    guarded.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_each_answer_of_a_vote(processes, watching, monkeypatch):
    """With two processes the answers go through the devices; the other one always says no."""
    watching, memory = watching
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    vote = watching.vote()
    assert vote.stop is None and vote.score_ready is False
    vote = watching.vote(score_ready=True)
    assert vote.stop is None and vote.score_ready is True
    memory.used = 0.6
    vote = watching.vote()
    assert isinstance(vote.stop, MemoryFull) and "config.host_memory_limit=0.5" in str(vote.stop)
    assert not vote.score_ready
    monkeypatch.setattr(preemption, "_requested", 15)
    vote = watching.vote(score_ready=True)
    assert isinstance(vote.stop, preemption.Preempted) and vote.stop.agreed
    assert vote.stop.code == 143 and vote.score_ready
