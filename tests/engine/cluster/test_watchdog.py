"""The watchdog, the lock, the memory limit and the hosts' logs, each by itself."""

import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.cluster import activity, hostlog, lock, memory, watchdog
from engine.cluster.lock import Lock, LockError
from engine.cluster.watchdog import Watchdog

ROOT = Path(__file__).parents[3]


def watch(folder, seconds, rescue=lambda: "saved step 7"):
    ended = queue.Queue()
    log = hostlog.attach(str(folder), 3)
    dog = Watchdog(
        *(seconds, log),
        explain=lambda: "gs://b/train-1 did not answer",
        rescue=rescue,
        leave=ended.put,
    )
    return dog, ended


def test_a_run_that_hangs_is_explained_and_ended(tmp_path, caplog):
    activity.at("waiting for input", 41)
    with caplog.at_level("INFO", logger="tpu_suite"):
        _, ended = watch(tmp_path, 1.5)
        reason = ended.get(timeout=60)
    assert "nothing has happened for 3 s: waiting for input (step 41)" in reason
    assert "gs://b/train-1 did not answer" in reason and "saved step 7" in reason
    said = caplog.text
    assert "nothing has happened for 2 s" in said and "waiting for input (step 41)" in said
    stacks = (tmp_path / "hosts" / "host-003.stacks.txt").read_text()
    assert "test_a_run_that_hangs_is_explained_and_ended" in stacks
    assert "nothing has happened" in (tmp_path / "hosts" / "host-003.log").read_text()


def test_signs_of_life_keep_it_quiet(tmp_path, caplog):
    dog, ended = watch(tmp_path, 1.2)
    for step in range(12):
        activity.at("training", step)
        time.sleep(0.3)
    dog.close()
    assert ended.empty() and "nothing has happened" not in caplog.text


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_rescue_that_fails_does_not_keep_the_process(fault, tmp_path, monkeypatch):
    def rescue():
        if fault == "raises":
            raise OSError("the disk is gone")
        time.sleep(1000)
        return "never"

    within = Watchdog._within
    monkeypatch.setattr(Watchdog, "_within", lambda self, work, _: within(self, work, 1.0))
    _, ended = watch(tmp_path, 1.0, rescue)
    wanted = {"raises": "the disk is gone", "hangs": "nothing more could be saved"}
    assert wanted[fault] in ended.get(timeout=60)


STOPPED = """
import sys, time
from engine import hostlog
from engine.cluster.watchdog import Watchdog
Watchdog(8.0, hostlog.attach(sys.argv[1], 0), explain=str, rescue=str, leave=print)
print("here", flush=True)
sys.stdin.read()
"""


def test_a_process_that_was_stopped_has_not_been_idle(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(12)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(3)
        process.stdin.close()
        assert process.stdout.read() == ""
    assert not (tmp_path / "hosts" / "host-000.stacks.txt").exists()


def test_others_that_go_on_are_signs_of_life(tmp_path, caplog):
    """A host that waits for another, which counts its files, is not hanging."""
    activity.at("waiting for host 0 to read the data")
    ended, done = queue.Queue(), iter(range(1000))
    dog = Watchdog(
        *(1.2, hostlog.attach(str(tmp_path), 0)),
        explain=str,
        rescue=str,
        leave=ended.put,
        life=lambda: next(done),
    )
    time.sleep(4)
    dog.close()
    assert ended.empty() and "nothing has happened" not in caplog.text


@pytest.mark.parametrize("what", ["training", "writing gs://b/run/checkpoints/3"])
def test_who_was_asked_to_stop_hangs_for_a_short_time_only(what, tmp_path, monkeypatch):
    """But what is being written may take as long as ever."""
    monkeypatch.setattr(watchdog, "_HURRY", 1.0)
    activity.at(what)
    ended = queue.Queue()
    dog = Watchdog(
        *(100.0, hostlog.attach(str(tmp_path), 0)),
        explain=str,
        rescue=str,
        leave=ended.put,
        hurry=lambda: True,
    )
    if what == "training":
        assert "training" in ended.get(timeout=60)
    else:
        time.sleep(4)
        assert ended.empty()
    dog.close()


# The lock.

HOLD = """
import sys
from engine.cluster.lock import Lock
lock = Lock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def held(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path):
    with held(str(tmp_path)) as process:
        with pytest.raises(LockError, match=f"process {process.pid} on .* trains in {tmp_path}"):
            Lock(str(tmp_path))
        process.kill()
    Lock(str(tmp_path)).close()
    Lock(str(tmp_path)).close()


def test_a_workdir_that_was_replaced_is_noticed(tmp_path):
    """rm -rf and a new start: the old run must not write among the new one's files."""
    folder = tmp_path / "run"
    folder.mkdir()
    first = Lock(str(folder))
    first.check()
    shutil.rmtree(folder)
    with pytest.raises(LockError, match="run.lock was deleted"):
        first.check()
    folder.mkdir()
    second = Lock(str(folder))
    with pytest.raises(LockError, match="is another run beginning there"):
        first.check()
    second.check()
    first.close()
    second.close()


def test_on_gs_the_dead_are_known_by_pid_or_by_silence(gcs, monkeypatch):
    monkeypatch.setattr(lock, "_PERIOD", 0.5)
    monkeypatch.setattr(lock, "_LOST", 6.0)
    folder = f"{gcs.bucket()}/run"
    gcs.write(f"{folder}/x", b"")
    first = Lock(folder)
    with pytest.raises(LockError, match=f"process {os.getpid()} on .* trains in {folder}"):
        Lock(folder)
    first.close()
    assert "run.lock" not in gcs.names(folder)
    with held(folder) as process:
        process.kill()
    second = Lock(folder)  # at once: that process was on this host and is gone
    second.close()
    gcs.write(f"{folder}/run.lock", json.dumps({"host": "x", "pid": 1, "token": "t"}).encode())
    Lock(folder).close()  # after a while: a host that nobody can ask has said nothing


def test_who_loses_a_race_on_gs_notices(gcs, monkeypatch):
    monkeypatch.setattr(lock, "_PERIOD", 0.5)
    folder, lost = f"{gcs.bucket()}/run", queue.Queue()
    gcs.write(f"{folder}/x", b"")
    first = Lock(folder, lost=lost.put)
    gcs.write(f"{folder}/run.lock", json.dumps({"host": "y", "pid": 9, "token": "t"}).encode())
    assert "process 9 on y" in lost.get(timeout=60)
    first.close()
    assert "run.lock" in gcs.names(folder)  # it is the other's now


# Memory.


def files(folder, **content):
    for name, text in content.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


def test_memory_of_the_machine_and_of_the_container(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "c").mkdir()
    meminfo = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    250 kB\n"
    proc = files(tmp_path / "p", meminfo=meminfo)
    none = str(tmp_path / "none")
    assert memory.used(proc, none) == 0.75 and memory.available(proc, none) == 250 * 1024
    stat = "anon 700\ninactive_file 60\nactive_file 40\n"
    group = files(
        *(tmp_path / "c",), memory__max="1000\n", memory__current="1000\n", memory__stat=stat
    )
    assert memory.used(proc, group) == 0.9 and memory.available(proc, group) == 100
    files(tmp_path / "c", memory__max="max\n")
    assert memory.used(proc, group) == 0.75
    assert memory.used(none, none) == 0.0 and memory.available(none, none) is None
    assert 0 < memory.used() < 1 and (memory.available() or 0) > 1 << 20  # this machine


# Logs.


def test_each_host_has_a_log_of_its_own(tmp_path, gcs):
    log = logging.getLogger("tpu_suite")
    log.setLevel(logging.INFO)
    for folder in (str(tmp_path), f"{gcs.bucket()}/run"):
        for said in ("first", "second"):  # two runs after one another
            handler = hostlog.attach(folder, 12)
            log.info("%s run", said)
            handler.flush()
            log.removeHandler(handler)
        where = Path(folder) / "hosts/host-012.log" if folder.startswith("/") else None
        text = where.read_text() if where else gcs.read(f"{folder}/hosts/host-012.log").decode()
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
