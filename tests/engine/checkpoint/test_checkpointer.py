"""Checkpoints: exact, complete or refused; never an older or another state in silence."""

import collections
import errno
import fcntl
import gc
import logging
import os
import pathlib
import re
import shutil
import subprocess
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from common.errors import CheckpointError
from engine.checkpoint import checkpointer, manifest, model_source
from engine.checkpoint.checkpointer import Checkpointer
from engine.report.history import History

# Where Orbax fails, it leaves coroutines and reads behind that nobody awaits.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = pathlib.Path(__file__).parents[3]


def sharding(devices, split):
    """A function from leaf to its sharding over the first `devices`: cut where that is possible."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))

    def of(leaf):
        cut = split and leaf.ndim and leaf.shape[0] % 8 == 0
        return NamedSharding(mesh, PartitionSpec("data") if cut else PartitionSpec())

    return of


def values(seed):
    """{"model", "optimizer"}: every kind of tree and dtype, filled with random bits."""
    draw = np.random.default_rng(seed)

    def bits(x):
        return np.frombuffer(draw.bytes(x.nbytes), x.dtype).reshape(x.shape)

    kernel = np.zeros((64, 16), np.float32)  # enough for a file of its own
    params = {"stem": {"kernel": kernel, "scale": np.zeros(8, jnp.bfloat16)}}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.constant_schedule(0.1)))
    opt_state = jax.tree.map(np.asarray, chain.init(params))
    model = {"params": params, "model_state": {"empty": {}, "minus": -kernel}, "ema": {}}
    counts = {"byte": np.zeros(3, np.uint8), "wide": np.zeros((2, 2), np.int32)}
    tree = jax.tree.map(
        bits, {"model": model, "optimizer": {"opt_state": opt_state, "counts": counts}}
    )
    tree["model"]["model_state"]["minus"] = -kernel  # all -0.0, which equals the fill value
    tree["optimizer"]["step"] = np.int32(seed)
    return tree


def on(tree, place):
    return jax.tree.map(lambda x: jax.device_put(x, place(x)), tree)


def abstract(tree, place=None):
    place = place or sharding(1, False)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)), tree)


def assert_same(restored, expected):
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for (path, one), two in zip(
        jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(expected), strict=True
    ):
        assert (one.dtype, one.shape) == (two.dtype, two.shape), path
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), path


def write(folder, *steps, **options):
    """Saves `values(step)` of each step and closes."""
    saver = Checkpointer(str(folder), **{"keep": 9, "best": lambda: None, **options})
    for step in steps:
        saver.save(step, **on(values(step), sharding(1, False)), manifest={"config": {"a": (1, 2)}})
    saver.wait()
    saver.close()


def read(folder, step):
    """The arrays of a step, through a checkpointer that only reads."""
    reader = Checkpointer(str(folder), keep=1, best=None)
    try:
        assert step in reader.steps()
        return reader.restore(step, abstract(values(step)))
    finally:
        reader.close()


def snapshot(folder):
    """Everything under a folder: names, times and bytes."""
    paths = sorted(pathlib.Path(folder).rglob("*"))
    return [(p, p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in paths]


@pytest.fixture(scope="module", autouse=True)
def leave_nothing_behind():
    """What Orbax leaves of a failure complains here, not in another module's test."""
    asyncio = logging.getLogger("asyncio")
    asyncio.setLevel(logging.CRITICAL)
    yield
    gc.collect()
    asyncio.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the steps 1 and 2; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    write(folder, 1, 2)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "checkpoints"))


# Saving and restoring.


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_file_system_without_locks(has_locks, tmp_path, monkeypatch):
    """TensorStore locks the files that it writes, which NFS without its lock service refuses."""

    def lockf(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for name in ("_BASE_TS_CONTEXT", "_DEFAULT_OCDBT_TS_CONTEXT"):
        monkeypatch.setattr(checkpointer.inner, name, {**getattr(checkpointer.inner, name)})
    if not has_locks:
        monkeypatch.setattr(fcntl, "lockf", lockf)
    saver = Checkpointer(str(tmp_path), keep=1, best=lambda: None)
    arrays, place = values(3), sharding(1, False)
    for is_tree in (True, False):
        spec = checkpointer.inner.get_ts_context(use_ocdbt=is_tree).spec.to_json()
        assert spec.get("file_io_locking", {}) == ({} if has_locks else {"mode": "lockfile"})
    saver.save(3, **on(arrays, place), manifest={"config": {"a": 1}})
    saver.wait()
    assert_same(saver.restore(3, abstract(arrays, place)), arrays)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("before", "after"), [(8, 1), (8, 2), (1, 8), (2, 8), (8, 8)])
def test_any_mesh_restores_the_same_bits(before, after, split, tmp_path):
    saver = Checkpointer(str(tmp_path), keep=1, best=lambda: None)
    arrays, place = values(3), sharding(after, split)
    saver.save(3, **on(arrays, sharding(before, split)), manifest={"config": {"a": 1}})
    expected = abstract(arrays, place)
    restored = saver.restore(3, expected) if saver.wait() is None else None
    assert_same(restored, arrays)
    for one, want in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert one.sharding == want.sharding
        assert len(one.sharding.device_set) == after
    only = saver.restore(3, {"model": expected["model"]})
    assert_same(only, {"model": arrays["model"]})
    assert saver.manifest(3)["config"] == {"a": 1}
    saver.close()


def test_a_model_without_state_is_read_alone(tmp_path):
    """Transformers keep nothing but weights, with and without an average of them."""
    params = {"kernel": np.arange(3, dtype=np.float32)}
    plain = {"params": params, "model_state": {}}
    saver = Checkpointer(str(tmp_path), keep=9, best=lambda: None)
    for step, ema in enumerate(({}, plain)):
        items = {"model": {**plain, "ema": ema}, "optimizer": {"step": np.int32(step)}}
        saver.save(step, **on(items, sharding(1, False)), manifest={})
    saver.wait()
    for step, ema in enumerate(({}, plain)):
        found = model_source.read_step(saver, step)
        assert found.source == f"{tmp_path}/{step}" and found.model_state == {}
        assert_same(found.params, ema["params"] if ema else params)
    saver.close()


def test_training_goes_on_while_saving(tmp_path, monkeypatch):
    """Also before the checksums are computed, which come after two more steps here."""
    trained, checksums = threading.Event(), manifest.checksums

    def late(copies):
        assert trained.wait(60)
        return checksums(copies)

    monkeypatch.setattr(manifest, "checksums", late)
    big = {"kernel": np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)}
    state = on(big, sharding(8, False))
    step = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x + 1, tree), donate_argnums=0)
    saver = Checkpointer(str(tmp_path), keep=1, best=lambda: None)
    saver.save(1, state, {"step": jnp.int32(1)}, {})
    # On a CPU, jax copies the saved array instead of donating it while the saver has a view of it.
    for _ in range(2):
        state = step(state)
    jax.block_until_ready(state)
    trained.set()
    for _ in range(7):
        state = step(state)
    last = step(state)
    assert state["kernel"].is_deleted()
    saver.wait()
    assert_same(saver.restore(1, {"model": abstract(big)})["model"], big)
    assert float(last["kernel"][0, 0]) != big["kernel"][0, 0]
    saver.close()


@pytest.mark.parametrize("process", [0, 1])
def test_only_the_process_that_writes_the_checksums_copies_the_arrays(
    process, tmp_path, monkeypatch
):
    saves = []
    saver = bare(tmp_path, save=lambda step, args, force: saves.append(args.manifest.item))
    monkeypatch.setattr(jax, "process_index", lambda: process)
    saver.save(1, **on(values(1), sharding(8, False)), manifest={"config": {}})
    (item,) = saves
    assert item["step"] == 1 and set(item["tree"]) == {"model", "optimizer"}
    if process:
        assert item["checksums"] == {}
    else:
        assert {k: set(x) for k, x in item["checksums"].items()} == {
            name: set(tree) for name, tree in item["tree"].items()
        }


def test_orbax_alone_reads_every_item(saved):
    """By the handlers that the checkpoint names: none is of this program."""
    with ocp.CheckpointManager(saved) as manager:
        restored = manager.restore(2)
    assert restored["manifest"]["step"] == 2
    assert restored["manifest"]["checksums"]["optimizer"]["step"] > 0
    kernel = values(2)["model"]["params"]["stem"]["kernel"]
    assert np.asarray(restored["model"]["params"]["stem"]["kernel"]).tobytes() == kernel.tobytes()


# Retention.


@pytest.mark.parametrize(
    ("scores", "keep", "kept"),
    [
        ([5, 4, 3, 2, 1], 2, [1, 4, 5]),
        ([5, 4, 3, 2, 1], 1, [1, 5]),
        ([1, 2, 3, 4, 5], 2, [4, 5]),
        ([1, 9, 2, 3, 4], 1, [2, 5]),
        ([3, 3, 3, 3, 3], 1, [1, 5]),
        ([1, 4, 4, 2, 1], 1, [2, 5]),
        ([None] * 5, 3, [3, 4, 5]),
        ([None, None, 2, None, None], 1, [3, 5]),
        ([1, 2, 3], 9, [1, 2, 3]),
    ],
)
def test_the_newest_and_the_best_stay(scores, keep, kept, tmp_path):
    history = History(str(tmp_path), writes=False)
    folder = tmp_path / "checkpoints"
    saver = Checkpointer(str(folder), keep=keep, best=lambda: history.best("score"))
    model = jax.device_put({"w": np.arange(3.0, dtype=np.float32)})
    for step, score in enumerate(scores, 1):
        saver.save(step, model, {"step": jnp.int32(step)}, {})
        assert saver.steps()[-1] == step
        if score is not None:
            history.add({"split": "eval", "step": step, "score": score})
    saver.wait()
    assert sorted(os.listdir(folder)) == [str(step) for step in kept]
    assert saver.steps() == kept
    saver.close()


# Without Orbax: when it is asked, and what is said.


def bare(directory, writes=True, **manager):
    """A checkpointer whose manager is said to do what the test gives."""
    made: Any = object.__new__(Checkpointer)
    made.directory = made._newest = str(directory)
    made._is_local, made._writes = "://" not in str(directory), writes
    functions = {"reload": lambda: None, "wait_until_finished": lambda: None, **manager}
    made._manager = types.SimpleNamespace(**functions)
    return made


@pytest.mark.parametrize(
    ("writes", "is_local", "process", "stays"),
    [(True, True, 0, False), (True, True, 1, True), (False, True, 0, True), (True, False, 0, True)],
)
def test_process_0_deletes_the_old_steps(writes, is_local, process, stays, tmp_path, monkeypatch):
    (tmp_path / "deleted" / "3").mkdir(parents=True)
    saver = bare(tmp_path, writes)
    saver._is_local = is_local
    monkeypatch.setattr(jax, "process_index", lambda: process)
    saver.wait()
    assert (tmp_path / "deleted").exists() == stays


@pytest.mark.parametrize(("failures", "is_listed"), [(0, True), (2, True), (3, False)])
def test_a_folder_is_listed_again_while_steps_are_deleted(failures, is_listed, tmp_path):
    left = iter(range(failures))

    def reload():
        if next(left, None) is not None:
            raise OSError("step 3 is gone")

    reader = bare(tmp_path, reload=reload, all_steps=lambda: [7, 5])
    if is_listed:
        assert reader.steps() == [5, 7]
    else:
        with pytest.raises(CheckpointError) as caught:
            reader.steps()
        assert str(caught.value) == f"cannot list {tmp_path}: step 3 is gone"


@pytest.mark.parametrize(
    ("directory", "writes", "processes", "fix", "command"),
    [
        ("/r/c", False, 1, "checkpoint 2 is intact", ""),
        ("/r/c", False, 2, "checkpoint 5 comes before it and was not checked", ""),
        (
            *("/r/my c", True, 1, "checkpoint 2 is intact"),
            "mkdir -p '/r/damaged_my c' && mv '/r/my c/5' '/r/my c/7' '/r/my c/9' "
            "'/r/damaged_my c'/",
        ),
        (
            *("gs://b/c", True, 2, "checkpoint 5 comes before it and was not checked"),
            "gcloud storage mv gs://b/c/7 gs://b/c/9 gs://b/damaged_c/",
        ),
    ],
)
def test_the_fix_for_a_damaged_step(directory, writes, processes, fix, command, monkeypatch):
    """Steps 7 and 5 are damaged; of several hosts only one would notice, so none looks."""
    checkpointer = bare(directory, writes)
    monkeypatch.setattr(checkpointer, "steps", lambda: [1, 2, 5, 7, 9])
    monkeypatch.setattr(checkpointer, "_is_intact", lambda step, items: step < 5)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    text = checkpointer._advice(7, {})
    assert text.startswith(fix) and (f", type {command} and then" in text) == bool(command)


def test_a_failed_write_does_not_wait_for_the_other_hosts(monkeypatch):
    """Orbax calls the barrier in a thread of its own, while the error passes."""
    waits, errors = [], []
    wait = lambda **key: waits.append(key)  # noqa: E731
    monkeypatch.setattr(ocp.multihost, "get_barrier_sync_fn", lambda: wait)
    options = checkpointer._options(1, lambda: None).async_options
    barrier: Any = options and options.barrier_sync_fn
    failure = OSError("no space")

    def fail():
        try:
            try:
                raise failure
            finally:
                barrier(key="a", timeout_ms=1)
        except OSError as error:
            errors.append(error)

    def both():
        barrier(key="b", timeout_ms=2)
        fail()

    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    assert waits == [{"key": "b", "timeout_ms": 2}] and errors == [failure]
    fail()  # in the main thread it waits
    assert waits[1:] == [{"key": "a", "timeout_ms": 1}] and errors == [failure, failure]


# Refusing what is something else.


@pytest.mark.parametrize("count", [8, 9])
def test_another_tree_is_refused_leaf_by_leaf(count, saved):
    """Eight of them are named."""
    expected, before = values(2), snapshot(saved)
    expected["model"]["params"]["k"] = {f"{i}": np.zeros(2, "i4") for i in range(count)}
    reader = Checkpointer(str(saved), keep=1, best=None)
    with pytest.raises(CheckpointError) as refused:
        reader.restore(2, abstract(expected))
    reader.close()
    first, *rest = str(refused.value).splitlines()
    assert first.startswith(f"{saved}/2 holds another model than the config describes")
    differs = "the checkpoint has nothing, the config wants int32[2]"
    named = [f"  params/k/{i}: {differs}" for i in range(8)]
    assert rest == [*named, *["  ... and 1 more"] * (count == 9)]
    assert snapshot(saved) == before


def edit(name, change):
    """Damage: rewrites the largest file that matches `name` under step 2."""

    def damage(folder):
        path = max((folder / "2").glob(name), key=lambda p: p.stat().st_size)
        path.write_bytes(change(path.read_bytes()))

    return damage


def foreign(folder):
    shutil.rmtree(folder / "2")
    with ocp.CheckpointManager(folder) as manager:
        manager.save(2, args=ocp.args.StandardSave({"params": np.ones(3)}))


def renamed(folder):
    shutil.rmtree(folder / "2")
    shutil.copytree(folder / "1", folder / "2")


def emptied(folder):
    shutil.rmtree(folder / "2")
    (folder / "2").mkdir()


def flipped(data):
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]


FOREIGN = "was not written by this program or is damaged"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "2" / "manifest"), FOREIGN),
        (lambda folder: (folder / "2/manifest/metadata").unlink(), FOREIGN),
        (edit("manifest/metadata", lambda data: data[:-9]), FOREIGN),
        (edit("manifest/metadata", lambda data: b"[1, 2]"), FOREIGN),
        (edit("manifest/metadata", lambda data: b'{"step": 2}'), FOREIGN),
        (foreign, FOREIGN),
        (emptied, FOREIGN),
        (renamed, f"{FOREIGN}: its manifest belongs to step 1"),
        (lambda folder: shutil.rmtree(folder / "2" / "optimizer"), "cannot be restored"),
        (edit("model/ocdbt.process_0/d/*", lambda data: data[: len(data) // 2]), "be restored"),
        (
            edit("model/ocdbt.process_0/d/*", flipped),
            "is damaged: params/stem/kernel differs from its checksum",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(damage, message, copy):
    damage(copy)
    with pytest.raises(CheckpointError) as refused:
        read(copy, 2)
    assert str(refused.value).startswith(f"{copy}/2 ")
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    if damage is not foreign:  # with it in the folder, Orbax reads no step
        assert str(refused.value).endswith("checkpoint 1 is intact")
    assert_same(read(copy, 1), values(1))


@pytest.mark.long
def test_saving_leaves_nothing_in_memory(tmp_path):
    saver = Checkpointer(str(tmp_path / "c"), keep=1, best=lambda: None)
    objects = []
    gc.freeze()  # what other tests left is neither searched nor counted
    for step in range(1, 16):
        saver.save(step, **on(values(1), sharding(1, False)), manifest={})
        saver.wait()
        gc.collect()
        objects.append(len(gc.get_objects()))
    saver.close()
    gc.unfreeze()
    assert objects[-1] - objects[4] < 100  # TensorStore's answers were 48 of each save


def test_the_fix_goes_on_from_the_newest_intact_checkpoint(copy):
    edit("model/ocdbt.process_0/d/*", flipped)(copy)
    before = sorted(p.relative_to(copy) for p in copy.rglob("*"))
    checkpoints = Checkpointer(str(copy), keep=9, best=lambda: None)
    with pytest.raises(CheckpointError) as refused:
        checkpoints.restore(2, abstract(values(2)))
    checkpoints.close()
    assert sorted(p.relative_to(copy) for p in copy.rglob("*")) == before
    command = re.search(r"is intact. To go on from it, type (.*) and then", str(refused.value))
    assert command is not None
    subprocess.run(["bash", "-c", command[1]], check=True)
    again = Checkpointer(str(copy), keep=9, best=lambda: None)
    assert again.steps() == [1]
    again.save(2, **on(values(2), sharding(1, False)), manifest={})
    again.wait()
    again.close()
    assert_same(read(copy, 2), values(2))
    assert (copy.parent / f"damaged_{copy.name}" / "2").is_dir()


def test_without_an_intact_checkpoint_the_message_says_so(copy):
    for step in (1, 2):
        shutil.rmtree(copy / str(step) / "model")
    with pytest.raises(CheckpointError, match=r"none of the older checkpoints \[1\] is intact$"):
        read(copy, 2)
    checkpoints = Checkpointer(str(copy), keep=9, best=lambda: None)
    with pytest.raises(CheckpointError) as refused:
        checkpoints.restore(2, abstract(values(2)))
    checkpoints.close()
    command = re.search(r"is intact. To begin again, type (.*) and then", str(refused.value))
    assert command is not None
    subprocess.run(["bash", "-c", command[1]], check=True)
    again = Checkpointer(str(copy), keep=9, best=lambda: None)
    assert again.steps() == []
    again.close()


@pytest.mark.long
def test_any_damaged_file_is_noticed_or_not_needed(copy):
    files = [p for p in (copy / "2").rglob("*") if p.is_file()]
    outcomes, expected = collections.Counter(), values(2)
    for path in files:
        data = path.read_bytes()
        for damaged in (None, data[: len(data) // 2], flipped(data)):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            try:
                assert_same(read(copy, 2), expected)
                outcomes["same"] += 1
            except CheckpointError as error:
                assert str(error).startswith(f"{copy}/2 "), path
                outcomes["refused"] += 1
            path.write_bytes(data)
    assert outcomes["refused"] >= 20
    assert outcomes.total() == 3 * len(files)
    assert_same(read(copy, 2), expected)
