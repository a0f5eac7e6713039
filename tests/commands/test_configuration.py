"""From a recipe and the command line to settings: what is changed, and what is said about it."""

import json
import os
import pathlib
import shutil

import pytest

from commands import configuration
from commands.recipe import Recipe
from common import keys
from common.errors import CheckpointError, ConfigError, UserError
from tests.conftest import make_tiny_config, resolved


def test_the_settings_say_what_differs_from_the_recipe(
    untrained_run, tmp_path, monkeypatch, caplog
):
    """The folders, the command line's values and the other model's; the recipe stays as it is."""
    monkeypatch.setenv("MLP_PATH_GCS_IMAGENET", "/photos")
    config = make_tiny_config("", num_filters=6, resnet_depth=18)
    own = keys.flat(config)
    config.update({"init_from": untrained_run, "resnet_depth": 34, "mlperf": {"org": "me"}})
    before = config.lock().to_dict()
    caplog.set_level("INFO", logger="tpu_suite")
    recipe = Recipe("configs/mine.py", config, own, {"init_from", "resnet_depth", "mlperf.org"})
    settings = configuration.resolve(recipe, "train_and_eval", str(tmp_path))
    changes = {
        "data_dir": ["", "/photos"],
        "init_from": ["", untrained_run],
        "resnet_depth": [18, 34],
    }
    changes |= {"num_filters": [6, 4], "mlperf.org": ["", "me"]}
    assert settings.origin == {"file": "configs/mine.py", "changes": changes}
    assert keys.flat(settings.config) == {**own, **{key: new for key, (_, new) in changes.items()}}
    assert config.to_dict() == before and settings.workdir == str(tmp_path)
    assert caplog.messages == [
        "data: /photos (from $MLP_PATH_GCS_IMAGENET)",
        "NOTE config.num_filters=4 instead of 6, as the weights want it",
    ]


def test_without_a_recipe_the_checkpoint_has_the_settings(untrained_run):
    settings = configuration.resolve(None, "report", untrained_run)
    assert settings.moving_average_decay == 0.9 and settings.workdir == untrained_run


def test_init_from_may_begin_with_a_tilde_where_there_is_no_workdir(untrained_run, monkeypatch):
    folder, name = os.path.split(untrained_run)
    monkeypatch.setenv("HOME", folder)
    config = make_tiny_config("", num_filters=6, init_from=f"~/{name}").lock()
    settings = configuration.resolve(Recipe("", config, {}, ()), "preflight", "")
    assert settings.config["num_filters"] == 4


def test_a_mistake_in_a_recipe_is_found_before_its_folders_are(tmp_path):
    config = make_tiny_config("", seed=-1, data_fallback="").lock()
    recipe = Recipe("", config, {}, ())
    with pytest.raises(ConfigError, match="config.seed=-1: must be at least 0"):
        configuration.resolve(recipe, "train", str(tmp_path))


@pytest.fixture
def finished(calm_run, tmp_path):
    """A copy of the files of the tiny run that say how it went."""
    source = pathlib.Path(calm_run[0])
    for name in ("metrics.jsonl", "checkpoints/12/manifest/metadata"):
        (tmp_path / "first" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, tmp_path / "first" / name)
    return tmp_path / "first"


def evaluations(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in lines if row["split"] == "eval"}


def put_evaluations(workdir, scores):
    """Gives the run evaluations with these values of top_1_accuracy, by step."""
    rows = [{"split": "eval", "step": n, "top_1_accuracy": x} for n, x in scores.items()]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def put_manifest(workdir, step, then, **values):
    """Gives a workdir the manifest of a checkpoint: that of `then` with other `values`."""
    facts = json.loads((then / "checkpoints/12/manifest/metadata").read_text())
    facts["config"].update(values)
    path = workdir / f"checkpoints/{step}/manifest/metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "step": step}))


def as_many_steps(source, workdir, given=(), **values):
    """(the number of steps, the notes) of a run as long as the best evaluation of another."""
    config = make_tiny_config("/photos", **{"steps_of": str(source), **values})
    settings, notes = resolved(config, workdir, given=given)
    assert settings.config["train_steps"] == settings.train_steps
    return int(settings.train_steps), notes


def test_a_run_is_as_long_as_the_best_evaluation_of_another(finished, tmp_path):
    put_evaluations(finished, {4: 0.25, 8: 0.5, 12: 0.5})
    steps, notes = as_many_steps(finished, tmp_path / "last", momentum=0.8)
    assert steps == 8  # the earliest of the best
    first = f"config.train_steps=8, the step of the best evaluation of {finished} ("
    assert notes[0] == first + "top_1_accuracy 0.5000)"
    (unlike,) = notes[1:]
    assert "config.momentum was 0.9, is now 0.8" in unlike and "train_steps" not in unlike
    assert "'/photos'" in unlike  # other data


def test_the_score_that_chooses_may_be_another(finished, tmp_path):
    """A loss is the better, the lower it is; the run's own rows, compared by hand."""
    rows = evaluations(finished)
    losses = {step: row["loss"] for step, row in rows.items()}
    lowest = min(losses.values())
    steps, _ = as_many_steps(finished, tmp_path / "last", best_by="loss")
    assert steps == min(step for step, loss in losses.items() if loss == lowest)
    with pytest.raises(CheckpointError, match="no evaluation with 'AP75'.* top_1_accuracy"):
        as_many_steps(finished, tmp_path / "last", best_by="AP75")


def test_a_best_evaluation_that_is_the_last_is_told(finished, tmp_path):
    put_evaluations(finished, {4: 0.25, 8: 0.3, 12: 0.5})
    steps, notes = as_many_steps(f"{finished}/", tmp_path / "last")
    assert steps == 12 and "more steps might" in notes[1]


def test_scores_that_metrics_lack_are_those_of_the_checkpoint(finished, tmp_path):
    """The checkpoint of step 12 was written before step 12 was evaluated."""
    rows = evaluations(finished)
    (finished / "metrics.jsonl").unlink()
    steps, _ = as_many_steps(finished, tmp_path / "last")
    scores = {step: rows[step]["top_1_accuracy"] for step in (4, 8)}
    assert steps == min(step for step in scores if scores[step] == max(scores.values()))


def test_a_run_that_has_begun_keeps_its_steps(finished, tmp_path, monkeypatch):
    """The other run may have gone on, or be gone; another one that is asked for counts."""
    last, other = tmp_path / "last", tmp_path / "other"
    put_manifest(last, 3, finished, steps_of=str(finished), train_steps="8")
    shutil.copytree(finished, other)
    put_evaluations(other, {4: 0.5, 8: 0.3})
    assert as_many_steps(other, last)[0] == 4
    shutil.rmtree(finished)
    monkeypatch.chdir(tmp_path)
    steps, notes = as_many_steps("first/", last)
    assert steps == 8 and notes == ["config.train_steps=8, as in the checkpoint of this run"]
    with pytest.raises(CheckpointError, match="steps_of=first holds no checkpoint"):
        as_many_steps("first", tmp_path / "new")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_size": 32}, "config.train_batch_size=16, not 32"),
        ({"given": ["steps_of", "train_steps"]}, "config.train_steps=12: give one alone"),
        ({"steps_of": "s3://bucket/run"}, "s3://bucket/run: s3:// is not supported"),
        ({"steps_of": "last"}, "steps_of=last is the workdir of this run"),
        ({"steps_of": "empty"}, "steps_of=empty holds no checkpoint of a run"),
    ],
)
def test_steps_that_cannot_be_taken_are_refused(values, message, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message) as refused:
        as_many_steps(**{"source": finished, "workdir": tmp_path / "last", **values})
    assert "\n" not in str(refused.value)


def test_steps_of_another_benchmark_and_of_a_run_without_evaluations(finished, tmp_path):
    put_evaluations(finished, {})
    put_manifest(finished, 12, finished)
    facts = json.loads((finished / "checkpoints/12/manifest/metadata").read_text())
    for changes, message in (
        ({"evaluations": []}, "no evaluation with 'top_1_accuracy'; its scores are: none"),
        ({"config": {**facts["config"], "benchmark": "ssd"}}, "config.benchmark='ssd', not "),
    ):
        path = finished / "checkpoints/12/manifest/metadata"
        path.write_text(json.dumps({**facts, **changes}))
        with pytest.raises(UserError, match=message):
            as_many_steps(finished, tmp_path / "last")
