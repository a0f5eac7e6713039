"""The lock of a folder, on a disk and on gs://."""

import errno
import fcntl
import json
import os
import queue
import shutil
import socket
import threading

import pytest

from common import locks
from common.locks import BucketLock, LockError
from tests.engine.cluster.meeting import child

HOLD = """
import sys
from common.locks import take
folder = sys.argv[1]
lock = take(f"{folder}/run.lock", f"trains in {folder}", "stop", print, print)
print("held", flush=True)
sys.stdin.read()
"""


def take(folder, lost=print):
    return locks.take(f"{folder}/run.lock", f"trains in {folder}", "stop", lost, print)


def held(folder):
    process = child(HOLD, folder)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path):
    with held(str(tmp_path)) as process:
        with pytest.raises(LockError, match=f"process {process.pid} on .* trains in {tmp_path}"):
            take(str(tmp_path))
        process.kill()
    take(str(tmp_path)).close()
    again = take(str(tmp_path))
    owner = json.loads((tmp_path / "run.lock").read_text())  # without what the others wrote
    assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())
    again.close()


@pytest.mark.parametrize(
    "content",
    [b"5", b"[1]", b'"x"', b'{"pid": 1}', b'{"pid": "x", "host": "y"}', b"[" * 99_999]
    + [b"\xff\xfe", b"null"],
)
def test_a_damaged_lock_is_nevertheless_held(content, tmp_path):
    first = take(str(tmp_path))
    (tmp_path / "run.lock").write_bytes(content)
    with pytest.raises(LockError, match=f"^another process trains in {tmp_path} already"):
        take(str(tmp_path))
    first.close()


def test_a_workdir_that_was_replaced_is_noticed(tmp_path):
    """rm -rf and a new start: the old run must not write among the new one's files."""
    folder = tmp_path / "run"
    folder.mkdir()
    first = take(str(folder))
    first.check()
    shutil.rmtree(folder)
    with pytest.raises(LockError, match="run.lock was deleted"):
        first.check()
    folder.mkdir()
    second = take(str(folder))
    with pytest.raises(LockError, match="is another process beginning there"):
        first.check()
    second.check()
    first.close()
    second.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_gets_a_note(tmp_path, monkeypatch, capsys, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    first = take(str(tmp_path))
    note = capsys.readouterr().out
    assert f"NOTE {tmp_path}/run.lock" in note and os.strerror(number) in note
    first.check()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    first.close()


def test_a_disk_that_fails_is_not_one_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(LockError, match="run.lock: .*Input/output error"):
        take(str(tmp_path))


def test_who_works_alone_leaves_nothing(tmp_path):
    path = tmp_path / "new" / "inner" / "prepare.lock"
    for has_file in (False, True):
        words = str(path), f"prepares {path.parent}", "use another --out"
        with locks.alone(*words):
            match = f"process {os.getpid()} on .* prepares {path.parent} already: .* --out"
            with pytest.raises(LockError, match=match), locks.alone(*words):
                pass
            if has_file:
                (path.parent / "a").touch()
        assert [*tmp_path.rglob("*")] == (
            [path.parents[1], path.parent, path.parent / "a"] * has_file
        )


def test_a_lock_that_another_process_deleted_is_left_to_it(tmp_path):
    path = tmp_path / "prepare.lock"
    with locks.alone(str(path), "prepares x", ""):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


# On gs://.


def test_who_works_alone_on_gs_leaves_nothing(folder, gcs):
    with locks.alone(f"{folder}/prepare.lock", f"prepares {folder}", "stop"):
        assert gcs.names(folder) == ["prepare.lock"]
    assert gcs.names(folder) == []


@pytest.fixture
def folder(gcs):
    """A workdir on gs://."""
    return f"{gcs.bucket()}/run"


def other(**more):
    """The lock of a run on a host that nobody can ask."""
    return json.dumps({"host": "y", "pid": 9, "token": "t", "machine": "z", **more}).encode()


def test_the_dead_of_this_host_are_known_by_their_pid(folder, gcs):
    first = take(folder)
    first.close()
    assert gcs.names(folder) == []
    with held(folder) as process:
        process.kill()
    take(folder).close()  # at once
    gcs.write(f"{folder}/run.lock", b'{"host": "y", "pi')
    take(folder).close()  # nobody writes half an object


def test_a_live_run_is_known_by_its_signs_of_life(folder, monkeypatch):
    monkeypatch.setattr(locks, "_SIGN", 0.1)
    monkeypatch.setattr(locks, "_SILENCE", 3600.0)
    first = take(folder)
    with pytest.raises(LockError, match=f"process {os.getpid()} on .* trains in {folder}"):
        take(folder)
    first.close()


@pytest.mark.parametrize(
    ("age", "patience"),
    [
        (10.0, 80.0),  # 90 s of silence
        (80.0, 25.0),  # but 1.25 periods here
        (-100.0, 90.0),  # the clocks of the two hosts differ
    ],
)
def test_how_long_a_silent_run_is_waited_for(age, patience):
    assert locks._patience(age) == patience


def test_a_silent_run_counts_as_dead(folder, gcs, monkeypatch):
    monkeypatch.setattr(locks, "_SIGN", 0.5)
    monkeypatch.setattr(locks, "_SILENCE", 2.0)
    gcs.write(f"{folder}/run.lock", other())
    take(folder).close()
    assert gcs.names(folder) == []


def test_of_many_that_start_at_once_one_gets_the_lock(folder, monkeypatch):
    monkeypatch.setattr(locks, "_SIGN", 0.1)
    monkeypatch.setattr(locks, "_SILENCE", 3600.0)
    results = queue.Queue()

    def start():
        try:
            results.put(take(folder))
        except LockError as error:
            results.put(str(error))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner, *losers) = sorted((results.get() for _ in range(4)), key=lambda x: isinstance(x, str))
    assert isinstance(winner, BucketLock) and all("trains in" in text for text in losers)
    winner.close()


def test_an_answer_that_is_lost_does_not_lose_the_lock(folder, gcs):
    gcs.fault("POST /upload.*ifGenerationMatch=0", lose_response=True)
    first = take(folder)
    assert gcs.hits() == [1] and isinstance(first, BucketLock)
    assert first._write(first._generation)
    first.close()
    assert gcs.names(folder) == []


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_run_notices_that_its_lock_was_taken_or_deleted(is_deleted, folder, gcs, monkeypatch):
    monkeypatch.setattr(locks, "_SIGN", 0.1)
    lost, path = queue.Queue(), f"{folder}/run.lock"
    first = take(folder, lost=lost.put)
    gcs.delete(path) if is_deleted else gcs.write(path, other())
    # A test that hangs here has failed.
    assert (f"{path} was deleted" if is_deleted else "process 9 on y") in lost.get()
    first.close()
    assert gcs.names(folder) == ([] if is_deleted else ["run.lock"])  # it is the other's now
