"""Checkpoints when things go wrong: kills, full disks, failing saves, folders that cannot be."""

import contextlib
import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from common.errors import CheckpointError
from engine.checkpoint import checkpointer
from engine.checkpoint.checkpointer import Checkpointer
from tests.engine.checkpoint.test_checkpointer import (
    ROOT,
    abstract,
    assert_same,
    edit,
    flipped,
    leave_nothing_behind,  # noqa: F401
    on,
    pytestmark,  # noqa: F401
    read,
    sharding,
    snapshot,
    values,
    write,
)


def listed(folder):
    reader = Checkpointer(str(folder), keep=1, best=None)
    steps = reader.steps()
    reader.close()
    return steps


def small(size=3):
    """Arrays for `save` where their values do not matter."""
    return {"model": {"w": jnp.zeros(size)}, "optimizer": {"step": jnp.int32(7)}}


def save_for_ever(folder):
    """What the killed process runs: goes on from the newest step, saying what is complete."""
    print(os.getpid(), flush=True)
    saver = Checkpointer(folder, keep=2, best=lambda: 1)
    step = max(saver.steps(), default=0)
    while True:
        step += 1
        saver.save(step, **on(values(step), sharding(1, False)), manifest={})
        saver.wait()
        print(step, flush=True)


# Kills.


@pytest.mark.long
def test_what_is_listed_after_a_kill_is_complete(tmp_path):
    folder, done = tmp_path / "checkpoints", 0
    command, pipe = [sys.executable, __file__, str(folder)], subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as runs:
        assert runs.stdin and runs.stdout
        for _ in range(4):
            print("one more", file=runs.stdin, flush=True)
            pid, done = (int(runs.stdout.readline()) for _ in range(2))
            time.sleep(random.uniform(0, 0.5))
            os.kill(pid, signal.SIGKILL)
            for line in iter(runs.stdout.readline, "killed\n"):
                done = int(line)
            steps = listed(folder)
            assert steps[0] == 1
            assert done <= steps[-1] <= done + 1
            for step in steps:
                assert_same(read(folder, step), values(step))
        runs.stdin.close()
    assert done >= 4  # each round ended after at least one more step was complete
    write(folder, done + 2, keep=1)
    assert os.listdir(folder) == [str(done + 2)]


def test_a_torn_save_is_not_listed_and_makes_way(tmp_path):
    write(tmp_path, 1, 2)
    torn = tmp_path / "3.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "2" / "model", torn / "model.orbax-checkpoint-tmp")
    shutil.copytree(torn, tmp_path / "7.orbax-checkpoint-tmp")
    assert listed(tmp_path) == [1, 2]
    with pytest.raises(CheckpointError):
        Checkpointer(str(tmp_path), keep=1, best=None).manifest(3)
    saver = Checkpointer(str(tmp_path), keep=9, best=lambda: None)
    assert saver.steps() == [1, 2]
    saver.save(3, **on(values(3), sharding(1, False)), manifest={})
    saver.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3"]
    assert_same(read(tmp_path, 3), values(3))


def test_a_step_half_deleted_is_not_listed(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer.shutil, "rmtree", lambda *args, **kwargs: None)  # killed there
        write(tmp_path, 1, 2, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["2", "deleted"]
    assert listed(tmp_path) == [2]
    write(tmp_path, 3, keep=1)
    assert os.listdir(tmp_path) == ["3"]


# Saves that fail.


@contextlib.contextmanager
def file_limit(size):
    """No file may grow beyond `size` bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("call_name", ["save", "wait", "verify", "steps", "close"])
def test_the_next_call_tells_of_a_failed_write(call_name, tmp_path, caplog):
    saver = Checkpointer(str(tmp_path), keep=1, best=lambda: None)
    noise = np.random.default_rng(0).normal(size=200_000)
    big = {"model": {"w": jnp.asarray(noise, jnp.float32)}, "optimizer": {"step": jnp.int32(1)}}
    saver.save(1, **big, manifest={})
    saver.wait()
    call = {
        "save": lambda: saver.save(3, **big, manifest={}),
        "verify": lambda: saver.verify(2, big),
    }.get(call_name) or getattr(saver, call_name)
    with file_limit(300_000):
        saver.save(2, **big, manifest={})
        if call_name == "close":
            call()  # only tells: whoever closes after a failure has an error to show already
            (text,) = [r.getMessage() for r in caplog.records if r.name == "tpu_suite"]
        else:
            with pytest.raises(CheckpointError) as caught:
                call()
            text = str(caught.value)
    assert text.startswith(f"the last checkpoint could not be saved in {tmp_path}: ")
    assert "File too large" in text
    assert text.endswith("; the newest complete one is 1")
    assert len(text.splitlines()) == 1
    if call_name == "close":
        saver = Checkpointer(str(tmp_path), keep=1, best=None)
    assert saver.steps() == [1]
    saver.verify(1, big)
    if call_name == "close":
        return saver.close()
    saver.save(2, **big, manifest={})
    saver.verify(2, big)
    assert os.listdir(tmp_path) == ["2"]
    with pytest.raises(CheckpointError, match="checkpoint 2 could not be saved.*already exists"):
        saver.save(2, **big, manifest={})
    saver.close()


def test_a_checksum_that_fails_fails_the_save(tmp_path, monkeypatch):
    write(tmp_path, 1)
    saver = Checkpointer(str(tmp_path), keep=9, best=lambda: None)

    def fail(copies):
        raise MemoryError("no page is left")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer.manifests, "checksums", fail)
        saver.save(2, **small(), manifest={})
        with pytest.raises(CheckpointError) as caught:
            saver.wait()
    assert str(caught.value) == (
        f"the last checkpoint could not be saved in {tmp_path}: no page is left; "
        "the newest complete one is 1"
    )
    assert saver.steps() == [1]
    # Not step 2 again: threads of its failed save may still write into its temporary folder.
    saver.save(3, **small(), manifest={})
    saver.verify(3, small())
    saver.close()


def test_a_folder_that_is_gone_is_reported_at_once(tmp_path):
    folder = tmp_path / "checkpoints"
    saver = Checkpointer(str(folder), keep=1, best=lambda: None)
    saver.save(1, **small(), manifest={})
    saver.wait()
    folder.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="^nothing can be saved in .*No such file"):
        saver.save(2, **small(), manifest={})
    folder.write_text("no folder")
    with pytest.raises(CheckpointError) as caught:
        saver.save(2, **small(), manifest={})
    assert str(caught.value).startswith(f"checkpoint 2 could not be saved in {folder}: ")
    assert "Not a directory" in str(caught.value)
    assert str(caught.value).endswith("; there is none before it")
    folder.unlink()
    (tmp_path / "away").rename(folder)
    saver.save(3, **small(), manifest={})
    saver.verify(3, small())
    assert saver.steps() == [1, 3]
    saver.close()


def test_a_full_disk_is_one_line_before_anything_is_written(tmp_path, monkeypatch):
    write(tmp_path, 1)
    saver = Checkpointer(str(tmp_path), keep=2, best=lambda: None)
    free = types.SimpleNamespace(free=0)
    monkeypatch.setattr(checkpointer.shutil, "disk_usage", lambda path: free)
    needed = 4 * 500_000 + 4 + 2**20
    before = snapshot(tmp_path)
    for free.free in (1_500_000, needed - 1):
        with pytest.raises(CheckpointError) as caught:
            saver.save(2, **small(500_000), manifest={})
        assert str(caught.value) == (
            f"the disk is full, so that nothing more can be saved in {tmp_path}: a checkpoint "
            f"takes 3.0 MB, {free.free / 1e6:.1f} are free; the newest complete one is 1"
        )
    assert snapshot(tmp_path) == before
    free.free = needed
    saver.save(2, **small(500_000), manifest={})
    assert saver.steps() == [1, 2]
    saver.close()


# Reading back.


@pytest.mark.parametrize("split", [False, True])
def test_verify_compares_every_bit(split, tmp_path):
    saver = Checkpointer(str(tmp_path), keep=1, best=lambda: None)
    arrays, place = values(1), sharding(8, split)
    saver.save(1, **on(arrays, place), manifest={})
    saver.verify(1, on(arrays, place))
    for name, index in (("kernel", (-1, -1)), ("scale", -1)):
        live = values(1)
        changed = live["model"]["params"]["stem"][name].copy()
        bits = changed.view(f"uint{8 * changed.itemsize}")
        bits[index] ^= 1
        live["model"]["params"]["stem"][name] = changed
        with pytest.raises(CheckpointError) as caught:
            saver.verify(1, on(live, place))
        leaf = f"model/params/stem/{name}"
        assert str(caught.value) == f"{tmp_path}/1 reads back differently at {leaf}"
    saver.verify(1, on(arrays, place))
    saver.close()


def test_verify_reads_the_files(tmp_path):
    write(tmp_path, 2)
    saver, live = Checkpointer(str(tmp_path), keep=1, best=None), on(values(2), sharding(1, False))
    saver.verify(2, live)
    edit("model/ocdbt.process_0/d/*", flipped)(tmp_path)
    with pytest.raises(CheckpointError, match="/2 is damaged: params/stem/kernel differs"):
        saver.verify(2, live)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/3 "):
        saver.verify(3, live)
    saver.close()


def test_reading_creates_and_deletes_nothing(tmp_path):
    missing = Checkpointer(str(tmp_path / "missing"), keep=1, best=None)
    assert missing.steps() == []
    missing.close()
    assert os.listdir(tmp_path) == []
    write(tmp_path, 1, 2, 3)
    for leftover in ("4.orbax-checkpoint-tmp", "deleted/0"):
        (tmp_path / leftover).mkdir(parents=True)
    before = snapshot(tmp_path)
    reader = Checkpointer(str(tmp_path), keep=1, best=None)
    assert reader.steps() == [1, 2, 3]
    reader.verify(2, on(values(2), sharding(1, False)))
    reader.close()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("best", [None, lambda: None])
def test_a_file_is_no_folder_for_checkpoints(best, tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(CheckpointError, match="/file for checkpoints: it is not a folder$"):
        Checkpointer(str(tmp_path / "file"), keep=1, best=best)


# Waiting for another process.


def test_a_reader_sees_what_another_process_writes(tmp_path):
    write(tmp_path, 1, 2)
    reader = Checkpointer(str(tmp_path), keep=1, best=None)
    write(tmp_path, 3, 4)
    assert reader.steps()[-2:] == [3, 4]
    assert_same(reader.restore(4, abstract(values(4))), values(4))
    reader.close()


@pytest.mark.parametrize("moment", ["manifest", "_restore"])
@pytest.mark.parametrize(
    ("wanted", "outcome"),
    [("latest", 3), ("2", r"--checkpoint=2 is not in .* one of \[3\]$"), ("damaged", "is damaged")],
)
def test_a_step_that_a_run_deletes_is_not_damaged(moment, wanted, outcome, tmp_path, monkeypatch):
    """The run replaces step 2 before its manifest is read, or between that and the arrays."""
    write(tmp_path, 2)
    reader = Checkpointer(str(tmp_path), keep=1, best=None)
    original = getattr(reader, moment)

    def replace(step, *rest):
        if wanted == "damaged":
            shutil.rmtree(tmp_path / "2" / moment.replace("_restore", "model"))
        elif step == 2:
            write(tmp_path, 3)
            shutil.rmtree(tmp_path / "2")
        return original(step, *rest)

    def restored(step):
        return reader.restore(step, abstract(values(step)))

    with monkeypatch.context() as patch:
        patch.setattr(reader, moment, replace)
        chosen = functools.partial(reader.choose, wanted.replace("damaged", "latest"))
        if outcome == 3:
            step, arrays = reader.read(chosen, restored)
            assert step == 3
            assert_same(arrays, values(3))
        else:
            with pytest.raises(CheckpointError, match=outcome):
                reader.read(chosen, restored)
    reader.close()


if __name__ == "__main__":
    for _ in sys.stdin:  # one process to be killed for each line; what they import is shared
        if (pid := os.fork()) == 0:
            save_for_ever(sys.argv[1])
        os.waitpid(pid, 0)
        print("killed", flush=True)
