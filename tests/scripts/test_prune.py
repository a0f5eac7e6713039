"""scripts.job.prune: the best and the last checkpoint stay, whatever happens."""

import json
import os

import jax.numpy as jnp
import pytest

from engine.checkpoint import Checkpointer, CheckpointError
from engine.cluster.lock import take
from scripts.job import prune

# Where Orbax fails, it leaves coroutines and reads behind that nobody awaits.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SCORES = {2: 0.2, 4: 0.9, 6: 0.9, 8: None}  # two equals, the earlier counts; the last is nan


def make_run(workdir, steps=(2, 4, 6, 8), facts=("target_metric", "accuracy")):
    """Checkpoints of one array each."""
    item = {"w": jnp.arange(4.0)}
    checkpoints = Checkpointer(f"{workdir}/checkpoints", keep=99, best=lambda: None)
    for step in steps:
        checkpoints.save(step, item, item, dict([facts]))
    checkpoints.close()
    return workdir


def metrics(scores=SCORES):
    rows = [{"split": "train", "step": 8, "loss": 1.0}]
    rows += [{"split": "eval", "step": k, "accuracy": v, "loss": 1.0} for k, v in scores.items()]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def on_disk(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(metrics())
    return make_run(str(tmp_path))


@pytest.fixture
def in_cloud(gcs):
    workdir = f"{gcs.bucket()}/run"
    gcs.write(f"{workdir}/metrics.jsonl", metrics().encode())
    return make_run(workdir)


def complete(workdir):
    checkpoints = Checkpointer(f"{workdir}/checkpoints", keep=1, best=None)
    try:
        steps = checkpoints.steps()
        for step in steps:
            assert checkpoints.manifest(step)["step"] == step
        return steps
    finally:
        checkpoints.close()


def test_best_and_last_stay_on_disk(on_disk, capsys):
    os.makedirs(f"{on_disk}/checkpoints/9.orbax-checkpoint-tmp-3/model")
    os.makedirs(f"{on_disk}/checkpoints/deleted/1")
    os.makedirs(f"{on_disk}/checkpoints/mine")
    prune.prune(on_disk, dry_run=True)
    assert len(os.listdir(f"{on_disk}/checkpoints")) == 7
    output = capsys.readouterr().out
    assert output.count("would remove") == 4
    prune.prune(on_disk)
    assert sorted(os.listdir(f"{on_disk}/checkpoints")) == ["4", "8", "mine"]
    assert complete(on_disk) == [4, 8]
    again = capsys.readouterr().out
    assert again.replace("removing", "would remove").startswith(output)
    for line in ("the best (accuracy) is step 4, the last step 8\n", "removing checkpoint 2\n"):
        assert line in again
    assert again.endswith("prune: 2 removed, 2 kept\n")
    prune.prune(on_disk)
    kept = "the best (accuracy) is step 4, the last step 8; nothing to remove"
    assert capsys.readouterr().out == f"prune: {on_disk}: {kept}\n"


@pytest.mark.parametrize(
    ("steps", "best", "kept", "words"),
    [
        ([4], 4, {4}, "run has one checkpoint, step 4: nothing to remove"),
        ([4], None, {4}, "run has one checkpoint, step 4: nothing to remove"),
        ([2, 4], None, {2, 4}, "run has no accuracy of any checkpoint: nothing is removed"),
        ([2, 4, 6], 2, {2, 6}, "run: the best (accuracy) is step 2, the last step 6"),
        ([2, 6], 2, {2, 6}, "run: the best (accuracy) is step 2, the last step 6; nothing to rem"),
    ],
)
def test_what_a_plan_says(steps, best, kept, words, capsys):
    plan = prune.Plan("accuracy", steps, best, [])
    assert plan.remaining == kept and plan.removed == [step for step in steps if step not in kept]
    prune._describe("run", plan)
    assert capsys.readouterr().out.startswith(f"prune: {words}")


def test_a_run_that_changed_meanwhile_is_left_alone(on_disk):
    plan = prune.Plan("accuracy", [2, 4, 6, 8], 5, [])
    with pytest.raises(CheckpointError, match="has changed meanwhile; nothing was removed"):
        prune._remove(on_disk, plan)
    assert complete(on_disk) == [2, 4, 6, 8]


@pytest.mark.long
def test_best_and_last_stay_on_gs(gcs, in_cloud, capsys):
    gcs.write(f"{in_cloud}/checkpoints/9/model/part", b"of a save that was cut short")
    prune.prune(in_cloud)
    left = {name.split("/")[0] for name in gcs.names(f"{in_cloud}/checkpoints")}
    assert left - {""} == {"4", "8"}
    assert complete(in_cloud) == [4, 8]
    assert "removing 9" in capsys.readouterr().out


@pytest.mark.long
def test_cut_short_on_gs_no_step_only_looks_complete(gcs, in_cloud):
    gcs.fault("DELETE .*/checkpoints/2/(?!commit_success)", times=-1, skip=1, status=403)
    with pytest.raises(CheckpointError, match="checkpoint 2 could not be deleted"):
        prune.prune(in_cloud)
    gcs.clear_faults()
    assert any(name.startswith("2/") for name in gcs.names(f"{in_cloud}/checkpoints"))
    assert complete(in_cloud) == [4, 6, 8]
    prune.prune(in_cloud)
    left = {name.split("/")[0] for name in gcs.names(f"{in_cloud}/checkpoints")}
    assert left - {""} == {"4", "8"}


@pytest.mark.parametrize(
    ("steps", "scores", "kept"),
    [
        ((2, 4, 6), {2: 0.9, 6: 0.1}, [2, 6]),
        ((2, 4, 6), {2: 0.1, 6: 0.9}, [6]),
        ((2, 4), {99: 0.9, 2: 0.2}, [2, 4]),  # the very best has no checkpoint
        ((2, 4, 6), {99: 0.9}, [2, 4, 6]),
        ((2, 4, 6), {2: None}, [2, 4, 6]),
        ((2, 4, 6), {}, [2, 4, 6]),
        ((4,), {2: 0.9}, [4]),
    ],
)
def test_what_stays(steps, scores, kept, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(metrics(scores))
    make_run(str(tmp_path), steps)
    prune.prune(str(tmp_path))
    assert complete(tmp_path) == kept


def test_a_run_that_still_writes_is_left_alone(on_disk, capsys):
    lock = take(on_disk)
    assert prune.main([on_disk]) == 1
    assert "trains in" in capsys.readouterr().err
    assert complete(on_disk) == [2, 4, 6, 8]
    lock.close()
    assert prune.main([on_disk]) == 0
    assert complete(on_disk) == [4, 8]


def test_a_damaged_best_one_keeps_all(on_disk, monkeypatch):
    manifest = Checkpointer.manifest

    def damaged(self, step):
        if step == 4:
            raise CheckpointError("4 is damaged")
        return manifest(self, step)

    monkeypatch.setattr(Checkpointer, "manifest", damaged)
    with pytest.raises(CheckpointError, match="4 is damaged"):
        prune.prune(on_disk)
    assert len(os.listdir(f"{on_disk}/checkpoints")) == 4


def test_killed_between_two_deletions(on_disk, monkeypatch):
    remove = Checkpointer.remove

    def killed(self, step):
        if step == 6:
            raise KeyboardInterrupt
        remove(self, step)

    monkeypatch.setattr(Checkpointer, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        prune.prune(on_disk)
    assert complete(on_disk) == [4, 6, 8]


@pytest.mark.parametrize("place", ["nowhere", "empty", "old"])
def test_the_command_line_refuses_in_one_line(place, tmp_path, capsys):
    workdir = tmp_path / place
    if place == "empty":
        (workdir / "checkpoints").mkdir(parents=True)
    if place == "old":
        make_run(str(workdir), facts=("benchmark", "resnet"))
    assert prune.main([str(workdir)]) == 1
    error = capsys.readouterr().err
    faults = {
        "nowhere": f"no checkpoint in {workdir}/checkpoints; is the workdir right?",
        "empty": f"no complete checkpoint in {workdir}/checkpoints",
        "old": f"{workdir}/checkpoints/8 does not name the target metric of its run: an older",
    }
    assert error.startswith(f"prune: {faults[place]}")
    assert error.count("\n") == 1
    assert str(workdir) in error
