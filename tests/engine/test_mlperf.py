"""The log of an MLPerf run: its content, and what the official checkers say about it."""

import importlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.compliance_checker import mlp_compliance

import train
from common.errors import DataError
from engine import evaluate, mlperf
from engine.plan import make_plan, read_settings
from scripts.mlperf import results as mlperf_logs
from tests.helpers.mlperf_fixture import (
    QUICK,
    RULESETS,
    SGD,
    TINY_LARS,
    TINY_SGD,
    Clock,
    mlperf_config,
    tiny,
    write_records,
    write_run,
)
from tests.test_main import command, environment, fails_with, started, wait_for
from tests.test_main import run as run_main
from tests.torture import Group, xla_flags

LOGGED = {"mlperf.format": "mllog", "mlperf.org": "nobody"}


def complaints(path: Any, ruleset: str) -> list[str]:
    """The faults that the official compliance checker finds in a log."""
    checker = mlp_compliance.make_checker("training", ruleset, False, True)
    valid = checker.check_file(str(path), f"training_{ruleset}/common.yaml")
    faults = [*checker.overwritable.values(), *checker.not_overwritable]
    assert bool(faults) != bool(valid)
    return faults


def rows(path: Any) -> list[dict[str, Any]]:
    lines = Path(path).read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def keys(path: Any) -> list[str]:
    return [row["key"] for row in rows(path)]


# --- Real runs, through main.py.


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_records(str(tmp_path_factory.mktemp("colours")))


def main_py(workdir: Any, **overrides: Any) -> Any:
    env = QUICK | {"XLA_FLAGS": xla_flags(2)}
    return run_main(f"--workdir={workdir}", env=env, **LOGGED, **overrides)


@pytest.fixture(scope="module")
def lars(data, tmp_path_factory):
    """A run of one process with LARS: (its workdir, what it printed)."""
    workdir = tmp_path_factory.mktemp("lars")
    done = main_py(workdir, **TINY_LARS, data_dir=data)
    assert done.returncode == 0, done.stdout + done.stderr
    return workdir, done.stdout


@pytest.fixture(scope="module")
def sgd(data, tmp_path_factory):
    """A run of two processes with SGD."""
    overrides = {**LOGGED, **TINY_SGD, "data_dir": data}
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    workdir = str(tmp_path_factory.mktemp("sgd") / "run")
    with pytest.MonkeyPatch.context() as patch:
        for name in {*os.environ} - {*environment()}:  # they would choose the workdir
            patch.delenv(name)
        for name, value in QUICK.items():
            patch.setenv(name, value)
        group = Group(workdir, ["--config=configs/digits.py", *flags], 2, devices=2).start()
    assert group.wait() == [0, 0], group.said() + group.said(1)
    return group


@pytest.mark.long
@pytest.mark.parametrize("ruleset", RULESETS)
@pytest.mark.parametrize("kind", ["lars", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_real_run_satisfies_the_official_checker(ruleset, kind, request):
    run = request.getfixturevalue(kind)
    workdir = run[0] if kind == "lars" else run.workdir
    faults = complaints(f"{workdir}/{mlperf.LOG}", ruleset)
    if ruleset == "2.0.0":  # wants the tensors of ResNet-50, and this is a ResNet-10
        assert len(faults) == 1 and "initialized_tensors" in faults[0]
    else:
        assert faults == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [TINY_LARS, TINY_SGD])
def test_a_real_run_with_fifty_layers(recipe, data, tmp_path):
    done = main_py(tmp_path, **recipe, resnet_depth=50, data_dir=data)
    assert done.returncode == 0, done.stdout + done.stderr
    for ruleset in RULESETS:
        assert complaints(tmp_path / mlperf.LOG, ruleset) == []


@pytest.mark.long
def test_compilation_is_before_the_clock_and_data_are_after_it(lars):
    _, out = lars
    order = ['"init_start"', "compiled in", '"init_stop"', '"run_start"', "data: 96 images"]
    places = [out.index(word) for word in order]
    assert places == sorted(places)
    assert out.count("images to train") == 1


@pytest.mark.long
def test_what_the_log_says_is_what_happened(lars):
    workdir, _ = lars
    lines = rows(workdir / mlperf.LOG)
    evals = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evals = [row for row in evals if row["split"] == "eval"]
    logged = [row for row in lines if row["key"] == "eval_accuracy"]
    assert [row["value"] for row in logged] == [row["top_1_accuracy"] for row in evals]
    assert all(row["examples"] == 40 for row in evals)
    epochs = [row["metadata"]["epoch_num"] for row in logged]
    assert epochs == [4, 8, 12, 16][: len(epochs)]
    assert logged[-1]["value"] >= 0.759 > max([r["value"] for r in logged[:-1]], default=0)
    assert lines[-1]["key"] == "run_stop" and lines[-1]["metadata"]["status"] == "success"
    blocks = [r["metadata"] for r in lines if r["key"] == "block_start"]
    assert [(b["first_epoch_num"], b["epoch_count"]) for b in blocks] == [
        (epoch - 3, 4) for epoch in epochs
    ]
    values = {row["key"]: row["value"] for row in lines}
    assert values["train_samples"] == 96 and values["eval_samples"] == 40
    assert values["model_bn_span"] == 16 and values["lars_opt_base_learning_rate"] == 4
    assert [values[k] for k in ("number_of_nodes", "accelerators_per_node")] == [1, 2]
    assert values["cache_clear"] is False


@pytest.mark.long
def test_a_run_is_not_resumed(lars, data):
    workdir, _ = lars
    before = (workdir / mlperf.LOG).read_text()
    again = main_py(workdir, **TINY_LARS, data_dir=data)
    fails_with(again, workdir, "may not be resumed")
    assert (workdir / mlperf.LOG).read_text() == before


@pytest.mark.slow
def test_sigterm_aborts_the_run(data, tmp_path):
    """After the clock has started; the state is saved as ever, but the run is over."""
    overrides = {**LOGGED, **TINY_SGD, "train_steps": "400 epochs", "target": 0.999}
    process = started(command(f"--workdir={tmp_path}", **overrides, data_dir=data), **QUICK)
    wait_for(process, tmp_path / mlperf.LOG, "block_stop")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 143, out
    last = rows(tmp_path / mlperf.LOG)[-1]
    assert last["key"] == "run_stop" and last["metadata"]["status"] == "aborted"


# --- Runs within this process.


@pytest.mark.long
def test_a_run_that_misses_the_target_is_aborted(data, tmp_path):
    config = tiny(data, target=1.0, train_steps="4 epochs")
    train.train_and_evaluate(read_settings(config, str(tmp_path)))
    last = rows(tmp_path / mlperf.LOG)[-1]
    assert last["key"] == "run_stop" and last["metadata"]["status"] == "aborted"
    assert keys(tmp_path / mlperf.LOG).count("eval_accuracy") == 1
    run = mlperf_logs.load(tmp_path / mlperf.LOG)
    assert run.complete and not run.success


@pytest.mark.long
def test_a_run_that_fails_is_aborted(data, tmp_path, monkeypatch):
    def broken(*_: Any) -> Any:
        raise DataError("broken")

    monkeypatch.setattr(evaluate, "begin_evaluation", broken)
    with pytest.raises(DataError, match="broken"):
        train.train_and_evaluate(read_settings(tiny(data), str(tmp_path)))
    lines = rows(tmp_path / mlperf.LOG)
    assert [row["key"] for row in lines[-3:]] == ["block_stop", "eval_start", "run_stop"]
    assert not mlperf_logs.load(tmp_path / mlperf.LOG).complete
    assert lines[-1]["metadata"]["status"] == "aborted"


_LINE = re.compile(r":::MLPv0\.5\.0 resnet (\d+\.\d{9}) \(\S+\.py:\d+\) (\w+)(?:: (.*))?")


@pytest.mark.long
def test_v05(data, tmp_path):
    """The order and the tags of 2018; the package of that time knows every tag."""
    tags = importlib.import_module("mlperf_compliance.tags")
    config = tiny(data, learning_rate_schedule="step", target=0.749, mlperf={"format": "v0.5"})
    train.train_and_evaluate(read_settings(config, str(tmp_path)))
    text = (tmp_path / mlperf.LOG).read_text()
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    entries: list[tuple[str, Any]] = [
        (m[2], None if m[3] is None else json.loads(m[3])) for m in lines if m
    ]
    assert len(entries) == len(lines)
    names = [name for name, _ in entries]
    assert set(names) <= set(tags.RESNET_TAGS)
    missing = set(tags.RESNET_TAGS) - set(names) - {"run_clear_caches"}
    about_losses = {"model_hp_loss_fn"}  # the other tags model_hp_* are the shapes of the layers
    assert missing == {tag for tag in tags.RESNET_TAGS if "model_hp_" in tag} - about_losses
    assert names[:2] == ["run_start", "run_set_random_seed"]  # the clock runs while compiling
    assert names[-2:] == ["run_stop", "run_final"]
    values: dict[str, Any] = dict(entries)
    assert values["run_stop"] == {"success": "true"} and values["eval_target"] == 0.749
    assert values["eval_offset"] == 0  # as in 2018 for 3, 7, ..., which count from 0
    assert values["eval_size"] == 40 and values["eval_accuracy"]["value"] >= 0.749
    epochs = [value["epoch"] for name, value in entries if name == "eval_accuracy"]
    assert epochs == [3, 7, 11, 15][: len(epochs)]
    run = mlperf_logs.load(tmp_path / mlperf.LOG)
    assert run.success and run.complete and run.form == "v0.5" and run.epochs == epochs[-1] + 1
    assert run.minutes is not None and 0 < run.minutes < 5


def test_the_schedule_in_the_log_is_the_one_of_the_run(tmp_path, clock):
    for name in ("4096", "64480"):
        config = mlperf_config(f"mlperf_resnet50:{name}")
        write_run(config, str(tmp_path / name), [0.76], clock)
        values = {row["key"]: row["value"] for row in rows(tmp_path / name / mlperf.LOG)}
        settings = read_settings(config)
        plan = make_plan(settings, settings.load_benchmark(""), 1_281_167)
        rate = plan.learning_rate
        warm = values["lars_opt_learning_rate_warmup_epochs"] * 1_281_167 / int(name)
        end = warm + values["lars_opt_learning_rate_decay_steps"]
        assert rate(warm) == pytest.approx(values["lars_opt_base_learning_rate"], rel=1e-5)
        assert rate(end) == pytest.approx(values["lars_opt_end_learning_rate"], rel=1e-3)
        half = values["lars_opt_base_learning_rate"] / 4  # a power of 2, at half of the way
        assert rate((warm + end) / 2) == pytest.approx(half, rel=1e-3)
        assert values["lars_opt_learning_rate_decay_poly_power"] == 2
        assert values["model_bn_span"] == {"4096": 64, "64480": 155}[name]


def test_all_targets_must_be_reached(tmp_path, clock):
    """A good AP of the boxes alone does not stop the clock; the official checker agrees."""
    counts = {"num_train_images": 117_266, "num_eval_images": 5_000}
    config = mlperf_config("mlperf_mask_rcnn:128", **counts)
    write_run(config, str(tmp_path), [{"mAP": 0.4, "mask_mAP": 0.3}], clock)
    path = tmp_path / mlperf.LOG
    assert rows(path)[-1]["metadata"]["status"] == "aborted"
    assert any("eval_accuracy" in fault for fault in complaints(path, "0.7.0"))


# --- The recipes.


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Logs of both optimizers at ImageNet's size, from the recipes."""
    folder, paths = tmp_path_factory.mktemp("written"), {}
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(time, "time", clock)
        for name, overrides in {"lars": {}, "sgd": SGD}.items():
            config = mlperf_config(**overrides)
            write_run(config, str(folder / name), [0.5, 0.7, 0.7601], clock)
            paths[name] = folder / name / mlperf.LOG
    return paths


@pytest.mark.parametrize("name", ["lars", "sgd"])
@pytest.mark.parametrize("ruleset", RULESETS)
def test_the_recipes_satisfy_the_official_checker(name, ruleset, written):
    assert complaints(written[name], ruleset) == []
