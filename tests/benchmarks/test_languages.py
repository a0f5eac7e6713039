"""A benchmark from outside, unlike the six in every way, goes through the complete program.

It lives outside the repository's own folder of benchmarks (tests/fixtures), as docs/tour.md
builds it, and touches nothing but the protocol.
"""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import train
from benchmarks.languages import Languages  # type: ignore[import-not-found]
from commands import doctor
from common.errors import CheckpointError
from engine.checkpoint.saver import first_state
from engine.cluster import watchdog
from engine.plan import make_plan, read_settings
from engine.run import Run
from tests.conftest import FIXTURES
from tests.fixtures.recipes import languages
from tests.test_main import ROOT, environment, wait_for
from tests.test_train import assert_same_state, fresh_signals, rows, state_on_disk  # noqa: F401


def settings(data_dir, workdir, **overrides):
    config = languages.get_config()
    config.update({"data_dir": data_dir, "num_train_texts": 72, "num_eval_texts": 23, **overrides})
    return read_settings(config.lock(), str(workdir))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_texts):
    """(workdir, scores) of a run that nobody disturbed."""
    workdir = str(tmp_path_factory.mktemp("finished"))
    return workdir, train.train_and_evaluate(settings(tiny_texts, workdir))


def last_step(workdir):
    return max(int(name) for name in os.listdir(f"{workdir}/checkpoints"))


@pytest.mark.long
def test_it_stops_when_both_targets_are_reached(finished):
    workdir, scores = finished
    assert scores["accuracy"] >= 0.95 and scores["rare_accuracy"] >= 0.9
    evaluations = [row for row in rows(workdir) if row["split"] == "eval"]
    for row in evaluations[:-1]:
        assert row["accuracy"] < 0.95 or row["rare_accuracy"] < 0.9
    assert last_step(workdir) == evaluations[-1]["step"] < 200


@pytest.mark.long
def test_one_target_alone_does_not_stop_it(finished, tiny_texts, tmp_path):
    job = settings(tiny_texts, tmp_path, rare_target=1.5, train_steps="80")
    assert train.train_and_evaluate(job)["accuracy"] >= 0.95
    assert last_step(str(tmp_path)) == 80


def test_throughput_counts_letters(finished):
    row = next(row for row in rows(finished[0]) if row["split"] == "train")
    assert {"letters_per_second", "letters_per_second_per_chip"} <= row.keys()
    texts = 24 / row["step_seconds"]
    assert 4 < row["letters_per_second"] / texts <= 16


def test_groups_of_parameters(finished, tiny_texts, tmp_path):
    """The embedding never changes and has no optimizer state."""
    job = settings(tiny_texts, tmp_path)
    run = Run.open(job)
    state, _ = first_state(run.programs, make_plan(job, run.benchmark, 72))
    saved = state_on_disk(finished[0], last_step(finished[0]))
    embedding = saved["['model']['params']['embedding']"]
    np.testing.assert_array_equal(embedding, state.params["embedding"])
    optimizer = [name for name in saved if "opt_state" in name]
    assert any("kernel" in name for name in optimizer)
    assert not any("embedding" in name for name in optimizer)
    batches = saved["['model']['model_state']['batches']"]
    assert (batches.dtype, int(batches)) == (np.int32, last_step(finished[0]))


@pytest.mark.long
def test_signal_and_resume_change_nothing(finished, tiny_texts, tmp_path, monkeypatch):
    workdir, scores = finished
    job, stream = settings(tiny_texts, tmp_path), Languages.train_batches

    def interrupted(self, *arguments):
        for number, batch in enumerate(stream(self, *arguments)):
            if number == 17:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Languages, "train_batches", interrupted)
        with pytest.raises(BaseException, match="SIGTERM"):
            train.train_and_evaluate(job)
    monkeypatch.setattr("engine.cluster.preemption._requested", None)
    assert 10 < last_step(str(tmp_path)) < 40
    assert train.train_and_evaluate(job) == scores
    step = last_step(workdir)
    assert last_step(str(tmp_path)) == step
    assert_same_state(state_on_disk(str(tmp_path), step), state_on_disk(workdir, step))


def command(data_dir, workdir, *flags):
    recipe = "--config=tests/fixtures/recipes/languages.py"
    counts = "--config.num_train_texts=72", "--config.num_eval_texts=23"
    folders = f"--config.data_dir={data_dir}", f"--workdir={workdir}"
    return [sys.executable, "main.py", recipe, *counts, *folders, *flags]


def own_environment(**more):
    return environment(PYTHONPATH=str(FIXTURES), **more)


@pytest.mark.slow
def test_kill_9_and_resume_change_nothing(finished, tiny_texts, tmp_path):
    """While process 0 scores in its thread: the step is evaluated again."""
    words = command(tiny_texts, tmp_path, "--config.score_seconds=600")
    with subprocess.Popen(
        words, cwd=ROOT, env=own_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for(process, tmp_path / "checkpoints/20/manifest/metadata", '"step"')
        process.kill()
    assert not [row for row in rows(str(tmp_path)) if row["split"] == "eval"]
    done = subprocess.run(
        command(tiny_texts, tmp_path),
        cwd=ROOT,
        env=own_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming at step" in done.stdout
    step = last_step(finished[0])
    assert_same_state(state_on_disk(str(tmp_path), step), state_on_disk(finished[0], step))
    expected = [row["step"] for row in rows(finished[0]) if row["split"] == "eval"]
    assert [row["step"] for row in rows(str(tmp_path)) if row["split"] == "eval"] == expected


def test_devices_train_on_while_the_score_is_computed(tiny_texts, tmp_path, monkeypatch, caplog):
    """And the run ends with the step that was evaluated, whatever was trained after it."""
    score, release, steps = Languages.score, threading.Event(), []
    loss_report = train.Intervals.show_progress

    def slow(self, rows):
        assert threading.current_thread() is not threading.main_thread()
        assert release.wait(600)
        return score(self, rows) | {"accuracy": 1.0, "rare_accuracy": 1.0}

    def watch(self, step):
        steps.append(step)
        if step == 27:
            release.set()
        return loss_report(self, step)

    monkeypatch.setattr(Languages, "score", slow)
    monkeypatch.setattr(train.Intervals, "show_progress", watch)
    job = settings(tiny_texts, tmp_path, steps_per_checkpoint="")
    with caplog.at_level(logging.INFO, logger="tpu_suite"):
        assert train.train_and_evaluate(job)["accuracy"] == 1.0
    assert max(steps) >= 27
    assert last_step(str(tmp_path)) == 20
    assert max(row["step"] for row in rows(str(tmp_path))) == 20
    assert "finished: step 20 of 200" in caplog.text


def test_a_score_that_fails_ends_the_run(tiny_texts, tmp_path, monkeypatch):
    monkeypatch.setattr(Languages, "score", lambda self, rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.train_and_evaluate(settings(tiny_texts, tmp_path))
    assert last_step(str(tmp_path)) == 20  # what was trained is saved


def test_a_score_without_a_target_is_one_line(tiny_texts, tmp_path, monkeypatch):
    monkeypatch.setattr(Languages, "score", lambda self, rows: {"accuracy": math.nan})
    with pytest.raises(Exception, match="score.. returned no 'rare_accuracy', which is a target"):
        train.train_and_evaluate(settings(tiny_texts, tmp_path))


def test_computing_a_score_is_a_sign_of_life(tiny_texts, tmp_path, monkeypatch):
    """The watchdog sees the activity change while the thread of the score computes."""
    score, seen = Languages.score, []

    def busy(self, rows):
        while len(set(seen)) < 3:
            seen.append(watchdog.activity().time)
            sum(i * i for i in range(20_000))
        return score(self, rows)

    monkeypatch.setattr(Languages, "score", busy)
    monkeypatch.setattr(Languages, "scores_in_background", False)
    train.train_and_evaluate(settings(tiny_texts, tmp_path, train_steps="20"))
    assert len(set(seen)) >= 3


def test_the_doctor_reads_the_other_model(finished, tiny_texts, tmp_path, capsys):
    assert doctor.run(settings(tiny_texts, tmp_path, init_from=finished[0]), False) == 0
    assert "ok    initial weights: " in capsys.readouterr().out
    wrong = settings(tiny_texts, tmp_path, init_from=finished[0], width=3, num_languages=3)
    assert doctor.run(wrong, False) == 1
    assert "FAIL  initial weights: " in capsys.readouterr().out
    with pytest.raises(CheckpointError):
        train.train_and_evaluate(wrong)


@pytest.mark.long
def test_its_mlperf_log(tiny_texts, tmp_path):
    """Both scores are in the log, and the clock stops when both targets are reached."""
    log = {"format": "mllog", "org": "us"}
    train.train_and_evaluate(settings(tiny_texts, tmp_path, mlperf=log))
    lines = [
        json.loads(line.partition(" ")[2])
        for line in (tmp_path / "mlperf.log").read_text().splitlines()
    ]
    scores = [line["value"] for line in lines if line["key"] == "eval_accuracy"]
    assert all(score.keys() == {"accuracy", "rare_accuracy"} for score in scores)
    stop = [line for line in lines if line["key"] == "run_stop"]
    assert [line["metadata"]["status"] for line in stop] == ["success"]
    assert scores[-1]["accuracy"] >= 0.95 and scores[-1]["rare_accuracy"] >= 0.9
