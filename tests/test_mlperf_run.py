"""run_and_time.sh and the verdict over its results."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlperf_check
import mlperf_logs
import mlperf_run
import mlperf_system
import pytest
from etils import epath
from mlperf_fixture import (
    QUICK,
    RULESETS,
    TINY_SGD,
    Clock,
    mlperf_config,
    write_records,
    write_run,
)
from test_main import environment

from engine import mlperf

ROOT = Path(__file__).parents[1]
LINES = ["STARTING TIMING RUN AT now", "ENDING TIMING RUN AT later", "RESULT,resnet,0,1,me,now"]
# The recipe evaluates after 3, 7, ... 35 epochs, where the reference converges in the mean.
SCORES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.7601]


def make_package(root: str) -> None:
    """Five runs at ImageNet's size that nobody trained, collected as run_and_time.sh does."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(time, "time", clock)
        patch.setattr(mlperf, "clear_caches", lambda: True)
        for i in range(5):
            chosen = {"clear_caches": True, "platform": "tpu-v3-8"}
            config = mlperf_config(seed=i, mlperf=chosen)
            scores = SCORES if i else [*SCORES[:-1], 0.758, 0.7602]
            write_run(config, f"{root}/run_{i}", scores, clock)
            mlperf_run._collect(epath.Path(root), "resnet", i, LINES)
    mlperf_run.summarize(epath.Path(root), "resnet")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    root = tmp_path_factory.mktemp("package")
    make_package(str(root))
    return root


@pytest.fixture
def copy(package, tmp_path):
    """One that may be spoiled."""
    shutil.copytree(package, tmp_path / "copy")
    return tmp_path / "copy"


def result(root: Path, index: int) -> Path:
    return root / "results" / "tpu-v3-8" / "resnet" / f"result_{index}.txt"


def verdict(root: Any, ruleset: str = "4.0.0") -> mlperf_check.Verdict:
    (found,) = mlperf_check.check(str(root), ruleset)
    return found


def edit(path: Path, pattern: str, text: str, count: int = 0) -> None:
    before = path.read_text()
    after = re.sub(pattern, text, before, count=count)
    assert after != before
    path.write_text(after)


# --- The verdict.


@pytest.mark.parametrize("ruleset", RULESETS)
def test_five_good_runs_pass(ruleset, package):
    found = verdict(package, ruleset)
    assert found.faults == [] and found.note == ""
    assert found.epochs == 35 and found.minutes == 9 * 40
    said = str(found)
    assert said == (
        f"PASS resnet on tpu-v3-8, rules {ruleset}: 5 runs, olympic mean 35.00 epochs, "
        "360.00 minutes"
    )


def test_all_of_it_may_lie_on_gs(gcs, package):
    root = f"{gcs.bucket()}/some/runs"
    make_package(root)
    found = verdict(root)
    assert found.faults == [] and (found.epochs, found.minutes) == (35, 360)
    here = json.loads((package / "summary.json").read_text())
    assert json.loads(gcs.read(f"{root}/summary.json")) == here
    assert here["olympic_mean"] == {"epochs": 35, "minutes": 360}


def test_the_verdict_is_printed_and_is_the_exit_code(package, copy, capsys):
    assert mlperf_check.main([str(package)]) == 0
    assert capsys.readouterr().out.startswith("PASS resnet on tpu-v3-8, rules 4.0.0: 5 runs")
    edit(result(copy, 1), r".*global_batch_size.*\n", "")
    assert mlperf_check.main([str(copy), "--ruleset=1.0.0"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL") and "result_1.txt: Required EXACTLY_ONE" in out
    assert "global_batch_size" in out


FAULTS = {
    "a missing key": (r".*\"lars_opt_momentum\".*\n", "", "of 'lars_opt_momentum' but found 0"),
    "an evaluation that is too early": (
        r'"epoch_num": 7\b',
        '"epoch_num": 5',
        "evaluations are to be 4 epochs apart, from 4 or before: 3, 5, 11",
    ),
    "a batch of images is left out": (
        r'"eval_samples", "value": 50000',
        '"eval_samples", "value": 49152',
        "eval_samples is 49152, not 50,000",
    ),
    "a seed of another run": (
        r'"seed", "value": 1\b',
        '"seed", "value": 2',
        "result_2.txt logs seed 2",
    ),
    "caches that were not dropped": (
        r'"cache_clear", "value": true',
        '"cache_clear", "value": false',
        "cache_clear is not true",
    ),
    "a weight decay that the rules do not have": (
        r'"lars_opt_weight_decay", "value": 5e-05',
        '"lars_opt_weight_decay", "value": 3e-05',
        "CHECK for 'lars_opt_weight_decay' failed",
    ),
    "another batch": (r'"global_batch_size", "value": 1632', '"global_batch_size", "value": 1', ""),
    "a damaged line": (r'"key": "run_start"', '"key: "run_start"', "is damaged"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_is_found(what, copy):
    pattern, text, says = FAULTS[what]
    edit(result(copy, 1), pattern, text)
    found = verdict(copy)
    assert [fault for fault in found.faults if says in fault and "\n" not in fault]
    assert str(found).startswith("FAIL")


def test_four_runs_are_too_few(copy):
    result(copy, 4).unlink()
    assert any("found 4, expected 5" in fault for fault in verdict(copy).faults)


def test_runs_that_converge_too_early_are_found(copy):
    """RCP: the mean of 35 epochs may be 33.80 at the least, and all of these have 31."""
    for i in range(5):
        edit(result(copy, i), r'"value": 0\.75, (.*"epoch_num": 31)', r'"value": 0.7605, \1')
        edit(result(copy, i), r'(?s)(\n[^\n]*"eval_stop"[^\n]*"epoch_num": 31\}\}).*?("run_stop")',
             r'\1\n:::MLLOG {"namespace": "", "time_ms": 1800000000000, "event_type": '
             r'"INTERVAL_END", "key": \2')  # fmt: skip
    found = verdict(copy)
    assert found.epochs == 31
    assert any("reference convergence points: " in fault for fault in found.faults)


def test_one_run_may_miss_the_target_and_not_two(copy):
    for i in (1, 2):
        edit(result(copy, i), "0.7601", "0.7401")
        edit(result(copy, i), '"status": "success"', '"status": "aborted"')
        found = verdict(copy)
        if i == 1:
            assert found.faults == [] and "result_1.txt: the target was not" in found.note
            assert found.epochs == pytest.approx((35 + 35 + 39) / 3)
    assert "result_1.txt: the target was not reached" in found.faults
    assert "result_2.txt: the target was not reached" in found.faults
    assert found.epochs is None and found.minutes is None


def test_a_description_that_lacks_something_is_found(copy):
    path = copy / "systems" / "tpu-v3-8.json"
    described = json.loads(path.read_text())
    del described["cooling"]
    path.write_text(json.dumps(described))
    assert any("Missing field cooling" in fault for fault in verdict(copy).faults)
    path.unlink()
    assert any("tpu-v3-8.json" in fault for fault in verdict(copy).faults)


def test_v05_has_no_official_checker(copy):
    for i in range(5):
        result(copy, i).write_text(":::MLPv0.5.0 resnet 1.000000000 (a.py:1) run_start\n")
    assert any("is in the format of v0.5" in fault for fault in verdict(copy).faults)


def test_checking_changes_nothing(package):
    def files() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(package.rglob("*")) if p.is_file()}

    before = files()
    verdict(package)
    assert files() == before


@pytest.mark.parametrize("made", ["", "results", "results/tpu/ssd"])
def test_nothing_to_check(made, tmp_path, capsys):
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    assert mlperf_check.main([str(tmp_path)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"ERROR: {tmp_path}")


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([1, 2, 3, 4, 100], 3),
        ([5, 1, 3], 3),
        ([None, 1, 2, 3, 4], 3),
        ([None, None, 2, 3, 4], None),
        ([1, 2], None),
        ([], None),
    ],
)
def test_olympic_mean(values, mean):
    assert mlperf_logs.olympic(values) == mean


def test_reading_finds_a_log_among_other_lines():
    row = {"time_ms": 60_000, "key": "run_start", "value": None, "metadata": {}}
    stop = {**row, "time_ms": 120_000, "key": "run_stop", "metadata": {"status": "aborted"}}
    run = mlperf_logs.read(f"step 1\nI0101 :::MLLOG {json.dumps(row)}\n:::MLLOG {json.dumps(stop)}")
    assert run.minutes == 1 and not run.success and run.epochs is None
    assert mlperf_logs.read("").minutes is None
    with pytest.raises(mlperf_logs.LogError, match="line 2 is damaged"):
        mlperf_logs.read("\n:::MLLOG {}")


# --- The system.


def test_the_description_is_whole_and_of_this_machine():
    said = {"submission_status": "cloud", "accelerators_per_node": 4, "number_of_nodes": 2}
    said |= {"accelerator_memory_bytes": 16 * 2**30, "accelerator_model_name": "TPU v4"}
    found = mlperf_system.describe("x", said)
    assert len(found) == 33 and all(type(value) is str for value in found.values())
    assert found["host_processor_vcpu_count"] == str(os.cpu_count())
    assert found["status"] == "Available cloud" and found["accelerator_memory_capacity"] == "16 GiB"
    assert (found["number_of_nodes"], found["accelerators_per_node"]) == ("2", "4")


def test_processors_of_two_sockets():
    one = "processor : {}\nmodel name : CPU X\nphysical id : {}\ncpu cores : 2\ncpu MHz : 2000.5\n"
    found = mlperf_system._processors("\n".join(one.format(i, i // 4) for i in range(8)))
    assert found["host_processors_per_node"] == "2" and found["host_processor_core_count"] == "4"
    assert found["host_processor_vcpu_count"] == "8"
    assert found["host_processor_frequency"] == "2000.5 MHz"
    assert mlperf_system._processors("")["host_processors_per_node"] == "1"


# --- Starting.


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_records(str(tmp_path_factory.mktemp("colours")))


@pytest.fixture
def env(data, tmp_path):
    return {"MLP_GCS_MODEL_DIR": str(tmp_path / "runs"), "MLP_PATH_GCS_IMAGENET": data}


def test_what_the_command_line_and_the_environment_say(env):
    request = mlperf_run.parse(["--config.target=0.8", "--runs=3", "--seed=7"], env)
    assert request.flags == ["--config=configs/mlperf_resnet50.py:1632", "--config.target=0.8"]
    seeds = request.seeds()
    assert len(set(seeds)) == 3 and seeds == mlperf_run.parse(["--runs=3", "--seed=7"], env).seeds()
    assert mlperf_run.parse([], env).seeds() != mlperf_run.parse([], env).seeds()
    words = mlperf_run.command(request, 1, seeds[1])
    assert f"--workdir={env['MLP_GCS_MODEL_DIR']}/run_1" in words and words[-1] == request.flags[-1]


def test_each_benchmark_has_its_data_recipe_and_log(tmp_path):
    env = {"MLP_GCS_MODEL_DIR": "/runs", "MLP_PATH_GCS_NCF": str(tmp_path)}
    with pytest.raises(mlperf_run.UsageError, match="there is no ratings.csv or ml-20m/ratings"):
        mlperf_run.parse(["--benchmark=ncf"], env)
    (tmp_path / "ml-20m").mkdir()
    (tmp_path / "ml-20m" / "ratings.csv").write_text("")
    request = mlperf_run.parse(["--benchmark=ncf"], env)
    assert (request.name, request.runs, request.data_dir) == ("ncf", 100, str(tmp_path))
    words = mlperf_run.command(request, 0, 1)
    assert {"--config=configs/ncf.py", "--config.mlperf.format=v0.5"} <= set(words)
    for entry in mlperf_run.BENCHMARKS.values():
        assert (ROOT / entry.recipe.partition(":")[0]).exists()


@pytest.mark.parametrize(
    ("changed", "words", "says"),
    [
        ({"MLP_GCS_MODEL_DIR": ""}, [], "MLP_GCS_MODEL_DIR is not set: a new folder"),
        ({"MLP_GCS_MODEL_DIR": "runs"}, [], "MLP_GCS_MODEL_DIR=runs: must be gs://BUCKET/FOLDER"),
        ({"MLP_PATH_GCS_IMAGENET": ""}, [], "MLP_PATH_GCS_IMAGENET is not set: the folder of Im"),
        ({"MLP_PATH_GCS_IMAGENET": "/nowhere"}, [], "/nowhere: there is no train-*"),
        ({}, ["--workdir=x"], "--workdir cannot be given here: every run has a folder"),
        ({}, ["--config.seed=1"], "--config.seed cannot be given here: it draws one"),
        ({}, ["--coordinator=a:1", "--num_processes=2", "--process_id=1"], "2 hosts needs --seed"),
        ({}, ["--coordinator=a:1"], "--num_processes and --process_id must be said"),
    ],
)
def test_what_is_wrong_is_named(changed, words, says, env, monkeypatch, capsys):
    for name, value in {**env, **changed}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["run_and_time.sh", *words])
    assert mlperf_run.main() == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("ERROR: ") and says in said


def test_all_variables_that_are_missing_are_named_at_once():
    with pytest.raises(mlperf_run.UsageError) as caught:
        mlperf_run.parse([], {})
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["MLP_GCS_MODEL_DIR", "MLP_PATH_GCS_IMAGENET"]


def test_of_several_hosts_only_the_first_collects(env):
    for index in (0, 1):
        place = ["--coordinator=a:1", "--num_processes=2", f"--process_id={index}"]
        assert mlperf_run.parse(["--seed=1", *place], env).first is (index == 0)


def run_and_time(env: dict[str, str], *words: str) -> Any:
    tiny = {**TINY_SGD, "mlperf.clear_caches": False, "mlperf.org": "nobody"}
    flags = [f"--config.{key}={value}" for key, value in tiny.items()]
    venv = {"VIRTUAL_ENV": sys.prefix, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    return subprocess.run(
        ["bash", "run_and_time.sh", "--config=configs/digits.py", *flags, *words],
        cwd=ROOT,
        env=environment(**env, **QUICK, **venv),
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_two_runs_from_beginning_to_end(env):
    """The results of a tiny job: the verdict finds what is tiny about it, and nothing else."""
    root = Path(env["MLP_GCS_MODEL_DIR"])
    done = run_and_time(env, "--runs=2")
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted((root / "results" / "2xcpu" / "resnet").iterdir())
    assert [file.name for file in files] == ["result_0.txt", "result_1.txt"]
    for file in files:
        lines = file.read_text().splitlines()
        assert lines[0].startswith("STARTING TIMING RUN AT 20") and lines[0] in done.stdout
        assert lines[-2].startswith("ENDING TIMING RUN AT 20") and lines[-2] in done.stdout
        assert re.fullmatch(r"RESULT,resnet,0,\d+,\S+,20\S+ \S+ [AP]M", lines[-1])
    summary = json.loads((root / "summary.json").read_text())
    rows = summary["runs"].values()
    assert len({row["seed"] for row in rows}) == 2 and all(row["success"] for row in rows)
    assert all(0.759 <= row["accuracy"] < 1 and row["epochs"] % 4 == 0 for row in rows)

    found = mlperf_check.check(str(root), "4.0.0")[0]
    said = "\n".join(found.faults)
    for file in files:
        assert f"{file.name}: train_samples is 96, not 1,281,167" in said
        assert f"{file.name}: eval_samples is 40, not 50,000" in said
        assert f"{file.name}: cache_clear is not true" in said
    tiny = ("_samples is", "cache_clear is not", "reference convergence", "package: ", "summary: ")
    assert [fault for fault in found.faults if not any(word in fault for word in tiny)] == []

    again = run_and_time(env, "--runs=2")
    assert again.returncode == 0 and again.stdout.count("has its result already") == 2


def test_a_run_that_was_cut_short_is_not_resumed(env):
    folder = Path(env["MLP_GCS_MODEL_DIR"]) / "run_0"
    folder.mkdir(parents=True)
    (folder / mlperf.LOG).write_text(":::MLLOG {}\n")
    done = run_and_time(env, "--runs=2")
    assert done.returncode == 1 and "may not be resumed" in done.stderr
    assert f"delete {folder}" in done.stdout and "RESULT" not in done.stdout
    assert not (folder.parent / "results").exists()
