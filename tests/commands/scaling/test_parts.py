"""--mode=scaling: its parts are runs, it goes on after a stop, and says what a law allows."""

import json
import pathlib

import pytest

import train
from commands.scaling import parts as scaling
from commands.scaling import summary
from commands.scaling.summary import Result
from common.errors import CheckpointError, ConfigError, DataError
from engine import pace
from engine.checkpoint import model_source
from engine.cluster import preemption
from engine.plan import read_settings
from tests.conftest import make_tiny_config
from tests.fixtures.recipes import languages
from tests.test_train import stop_at_batch


@pytest.fixture
def settings_for(tiny_records, monkeypatch):
    """Makes the settings of a run of four steps; a step and an evaluation take no time here."""
    for name in ("seconds_per_step", "seconds_per_evaluation"):
        monkeypatch.setattr(pace, name, lambda *_: 1.0)

    def make(workdir, **values):
        values = {"train_steps": "0.8 epochs", "steps_per_checkpoint": "2", **values}
        return read_settings(make_tiny_config(tiny_records, **values), str(workdir))

    return make


def content_of(workdir):
    """scaling.json without the paths of the runs."""
    content = json.loads((pathlib.Path(workdir) / "scaling/scaling.json").read_text())
    for part in content["parts"]:
        del part["workdir"]
    return content


@pytest.mark.long
def test_parts_are_runs_that_are_continued(settings_for, tmp_path, monkeypatch, caplog, capsys):
    """One that was stopped and continued says what an undisturbed one says."""
    caplog.set_level("INFO")
    calm, stopped = (settings_for(tmp_path / name) for name in ("calm", "stopped"))
    scaling.run(calm, 1)
    content = content_of(calm.workdir)
    assert [part["part"] for part in content["parts"]] == ["1/8", "1/4", "1/2", "all"]
    assert [part["images"] for part in content["parts"]] == [12, 24, 46, 90]
    steps = [round(90 * fraction**0.5 * 0.8 / 16) for fraction in scaling.FRACTIONS]
    for part, count, last in zip(("1-of-8", "1-of-4", "1-of-2"), (12, 24, 46), steps, strict=False):
        manifest = model_source.peek(f"{calm.workdir}/scaling/{part}") or {}
        assert (manifest["num_train_examples"], manifest["step"]) == (count, last)
    assert {row["name"] for row in content["groups"]} == {f"n{label}" for label in range(4)}
    assert "all   0" in capsys.readouterr().out
    assert (tmp_path / "calm/scaling/scaling.png").read_bytes().startswith(b"\x89PNG")
    (shown,) = summary.exhibits(calm.workdir)
    assert len(shown.rows) >= 4 and shown.pictures

    with monkeypatch.context() as patch:
        patch.setattr(preemption, "_requested", None)
        preemption.listen(lambda *_: None)
        stop_at_batch(patch, "train_batches", 5)  # only the last part reads so many
        with pytest.raises(preemption.Preempted):
            scaling.run(stopped, 1)
    caplog.clear()
    scaling.run(stopped, 1)
    assert sum(text.startswith("already finished") for text in caplog.messages) == 3
    assert content_of(stopped.workdir) == content


@pytest.mark.usefixtures("nothing_held_out")
def test_a_law_needs_something_to_evaluate(settings_for, tmp_path):
    with pytest.raises(DataError, match="config.hold_out=0.* nothing to evaluate"):
        scaling.run(settings_for(tmp_path), 1)


def test_a_finished_run_is_the_last_part(settings_for, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    settings = settings_for(tmp_path / "run")
    train.train_and_evaluate(settings)
    asked = []
    monkeypatch.setattr(scaling, "_measure", lambda part, metric: asked.append(part) or made(part))
    scaling.run(settings, 2)
    assert [part.settings.workdir.rpartition("/")[2] for part in asked] == [
        *("1-of-8", "1-of-8_seed-1", "1-of-4", "1-of-4_seed-1", "1-of-2", "run")
    ]
    assert [part.settings.train_fraction_seed for part in asked] == [0, 1, 0, 1, 0, 0]
    assert {part.settings.seed for part in asked} == {0}

    asked.clear()
    scaling.run(settings_for(tmp_path / "run", label_smoothing=0.3), 1)
    assert asked[-1].settings.workdir.endswith("/run/scaling/all")
    assert any("label_smoothing" in text and "not taken" in text for text in caplog.messages)
    train.train_and_evaluate(asked[0].settings)
    with pytest.raises(CheckpointError, match="1-of-8 .*label_smoothing.*--workdir"):
        scaling.run(settings, 1)


def test_a_target_stops_no_part(settings_for, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(scaling, "_measure", lambda part, metric: asked.append(part) or made(part))
    scaling.run(settings_for(tmp_path, stop_at_target=True), 1)
    assert not any(part.settings.stop_at_target for part in asked)
    assert asked[-1].settings.workdir == f"{tmp_path}/scaling/all"


def test_what_cannot_be_trained_is_left_out_and_said(settings_for, tmp_path, monkeypatch, capsys):
    def measure(part, metric):
        if part.fraction <= 1 / 4:
            raise DataError("config.train_batch_size=16: there are only 12")
        return made(part)

    monkeypatch.setattr(scaling, "_measure", measure)
    scaling.run(settings_for(tmp_path), 1)
    out = capsys.readouterr().out
    assert "Left out: 1/8 of the data: config.train_batch_size=16" in out
    assert "Cannot tell" in out and len(content_of(tmp_path)["left_out"]) == 2
    monkeypatch.setattr(scaling, "_measure", lambda part, metric: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaling.run(settings_for(tmp_path), 1)
    with pytest.raises(ConfigError):
        scaling.run(settings_for(tmp_path, base_learning_rate=-1.0), 1)


def test_parts_of_nearly_one_size_are_left_out(settings_for, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(scaling, "_measure", lambda part, metric: asked.append(part) or made(part))
    monkeypatch.setattr(scaling, "_APART", 0.515)  # a quarter has 24 of the 46 of the half
    scaling.run(settings_for(tmp_path), 1)
    assert [part.fraction for part in asked] == [1 / 8, 1 / 2, 1.0]
    asked.clear()
    monkeypatch.setattr(scaling, "_APART", 0.3)
    with pytest.raises(DataError, match="three parts, and there are 2: 1/2 of the data"):
        scaling.run(settings_for(tmp_path), 1)
    assert not asked


def test_a_benchmark_outside_needs_no_index_of_its_data(tiny_texts, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(scaling, "_measure", lambda part, metric: asked.append(part) or made(part))
    for name in ("seconds_per_step", "seconds_per_evaluation"):
        monkeypatch.setattr(pace, name, lambda *_: 1.0)
    config = languages.get_config()
    config.update({"data_dir": tiny_texts, "num_train_texts": 72, "num_eval_texts": 23})
    config.update({"train_batch_size": 24, "eval_batch_size": 8, "train_steps": "20"})
    scaling.run(read_settings(config, str(tmp_path)), 1)
    assert [part.count for part in asked] == [9, 18, 37, 72]  # the share of each language, rounded


@pytest.mark.long
def test_another_target_needs_no_other_runs(settings_for, tmp_path, monkeypatch, caplog):
    """But other data do."""
    caplog.set_level("INFO")
    trained = []

    def measure(part, metric):
        trained.append(part)
        train.train_and_evaluate(part.settings)
        return made(part)

    monkeypatch.setattr(scaling, "_measure", measure)
    scaling.run(settings_for(tmp_path), 1)
    caplog.clear()
    scaling.run(settings_for(tmp_path, target=0.9), 1)
    assert sum(text.startswith("already finished") for text in caplog.messages) == 4
    assert trained[-1].settings.workdir == str(tmp_path)
    monkeypatch.setattr(scaling, "_difference", lambda settings, data: "other train records")
    with pytest.raises(CheckpointError, match="scaling.* holds .*other train records"):
        scaling.run(settings_for(tmp_path), 1)


def made(part, groups=()):
    seed = part.settings.train_fraction_seed
    return Result(part.fraction, seed, part.count, 0.5, 4, dict(groups), "")
