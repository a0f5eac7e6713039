"""run_and_time.sh: what it is asked for, what it starts, collects and refuses."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mlperf as rules
from benchmarks.resnet import mlperf as resnet_mlperf
from engine import mlperf
from errors import UserError
from scripts.job.run import Children
from scripts.mlperf import check as mlperf_check
from scripts.mlperf import logs as mlperf_logs
from scripts.mlperf import request as mlperf_request
from scripts.mlperf import run as mlperf_run
from scripts.mlperf import system as mlperf_system
from tests.mlperf_fixture import (
    QUICK,
    SCORES,
    TINY_SGD,
    Clock,
    mlperf_config,
    requested,
    write_records,
    write_run,
)
from tests.test_main import environment

ROOT = Path(__file__).parents[2]


# --- Starting.


DATA = "MLP_PATH_GCS_IMAGENET"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_records(str(tmp_path_factory.mktemp("colours")))


@pytest.fixture
def env(data, tmp_path):
    return {"MLP_GCS_MODEL_DIR": str(tmp_path / "runs"), "MLP_PATH_GCS_IMAGENET": data}


def test_what_the_command_line_and_the_environment_say(env):
    request = mlperf_request.parse(["--config.target=0.8", "--runs=3", "--seed=7"], env)
    assert request.flags == ["--config=configs/mlperf_resnet50.py:1632", "--config.target=0.8"]
    seeds = request.seeds()
    assert len(set(seeds)) == 3
    assert seeds == mlperf_request.parse(["--runs=9", "--seed=7"], env).seeds()[:3]
    words = mlperf_request.command(request, 1, seeds[1])
    assert f"--workdir={env['MLP_GCS_MODEL_DIR']}/run_1" in words and words[-1] == request.flags[-1]


def test_each_benchmark_has_its_data_recipe_and_log(tmp_path):
    env = {"MLP_GCS_MODEL_DIR": str(tmp_path / "runs"), "MLP_PATH_GCS_NCF": str(tmp_path)}
    with pytest.raises(UserError, match="there is no ratings.csv or ml-20m/ratings"):
        mlperf_request.parse(["--benchmark=ncf"], env)
    (tmp_path / "ml-20m").mkdir()
    (tmp_path / "ml-20m" / "ratings.csv").write_text("")
    request = mlperf_request.parse(["--benchmark=ncf"], env)
    assert (request.name, request.runs, request.data_dir) == ("ncf", 100, str(tmp_path))
    words = mlperf_request.command(request, 0, 1)
    assert {"--config=configs/ncf.py", "--config.mlperf.format=v0.5"} <= set(words)
    assert "--config.num_ratings=20000263" in words
    for entry in rules.entries().values():
        assert (ROOT / entry.recipe.partition(":")[0]).exists()


def test_a_checkpoint_to_start_from_comes_from_the_environment(env, monkeypatch):
    """Of an entry that names the variable: it must be set, and is part of the request."""
    entry = rules.entry("resnet")
    variable = {"init_variable": "MLP_GCS_RESNET_CHECKPOINT", "init_meaning": "a ResNet-34"}
    monkeypatch.setattr(resnet_mlperf, "ENTRY", dataclasses.replace(entry, **variable))
    with pytest.raises(UserError, match="MLP_GCS_RESNET_CHECKPOINT is not set: a ResNet-34"):
        mlperf_request.parse([], env)
    request = mlperf_request.parse([], env | {"MLP_GCS_RESNET_CHECKPOINT": "gs://b/resnet34/"})
    assert "--config.init_from=gs://b/resnet34" in mlperf_request.command(request, 0, 1)
    request = mlperf_request.settle(request)
    assert mlperf_request.settle(request) == request
    with pytest.raises(UserError, match="init_from gs://b/resnet34 before, /other now"):
        mlperf_request.settle(dataclasses.replace(request, init_from="/other"))


@pytest.mark.parametrize(
    ("changed", "words", "says"),
    [
        ({"MLP_GCS_MODEL_DIR": ""}, [], "MLP_GCS_MODEL_DIR is not set"),
        ({"MLP_GCS_MODEL_DIR": "runs"}, [], "MLP_GCS_MODEL_DIR=runs: must be gs://"),
        ({DATA: ""}, ["--benchmark=resnet"], f"{DATA} is not set"),
        ({DATA: __file__}, [], f"{DATA}={__file__}: there is no "),
        ({}, ["--workdir=x"], "--workdir cannot be given here"),
        ({}, ["--config.seed=1"], "--config.seed cannot be given here"),
        ({}, ["--coordinator=a:1", "--num_processes=2", "--process_id=1"], "2 hosts needs --seed"),
    ],
)
def test_what_is_wrong_is_named(changed, words, says, env, monkeypatch, capsys):
    for name, value in {**env, **changed}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["run_and_time.sh", *words])
    assert mlperf_run.main() == 1
    (output,) = capsys.readouterr().err.splitlines()
    assert output.startswith("ERROR: ") and says in output


VARIABLES = {name: entry.variable for name, entry in rules.entries().items()}


@pytest.mark.parametrize("name", VARIABLES)
def test_the_only_data_variable_chooses_the_benchmark(name, tmp_path, monkeypatch):
    monkeypatch.setattr(mlperf_request, "_holds", lambda path, patterns: True)
    env = {"MLP_GCS_MODEL_DIR": str(tmp_path), "MLP_GCS_RESNET_CHECKPOINT": "/weights"}
    env |= dict.fromkeys(VARIABLES.values(), "") | {VARIABLES[name]: "/d"}
    request = mlperf_request.parse([], env)
    assert (request.benchmark, request.data_dir) == (name, "/d")


@pytest.mark.parametrize(
    ("names", "first"),
    [((), "which benchmark? no variable"), (("ssd", "gnmt"), "which benchmark? several bench")],
)
def test_which_benchmark_is_asked_where_the_data_do_not_say(names, first):
    with pytest.raises(UserError) as caught:
        mlperf_request.parse([], {VARIABLES[name]: "/d" for name in names})
    line, *others = str(caught.value).splitlines()
    assert line.startswith(first)
    expected = {f"--benchmark={name}: {VARIABLES[name]}" for name in names or VARIABLES}
    assert {other.strip() for other in others} == expected


def test_nothing_that_is_wrong_hides_the_rest(tmp_path, monkeypatch):
    """A flag, an unreadable folder, one that cannot be written, and a place without its number."""

    def unreadable(*_: Any) -> Any:
        raise PermissionError("not yours")

    monkeypatch.setattr(mlperf_request, "_holds", unreadable)
    env = {"MLP_GCS_MODEL_DIR": "/dev/null/runs", DATA: str(tmp_path)}
    with pytest.raises(UserError) as caught:
        mlperf_request.parse(["--mode=eval", "--coordinator=a:1"], env)
    mode, model, data, place = str(caught.value).splitlines()
    assert mode.startswith("--mode cannot be given") and "--process_id missing" in place
    assert model.startswith("MLP_GCS_MODEL_DIR=/dev/null/runs cannot be written (")
    assert data.startswith(f"{DATA}={tmp_path} cannot be read (not yours)")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_both_splits_must_be_there(split, tmp_path):
    data = tmp_path / "data"
    env = {"MLP_GCS_MODEL_DIR": str(tmp_path / "runs"), "MLP_PATH_GCS_IMAGENET": str(data)}
    other = {"train": "validation", "validation": "train"}[split]
    (data / other).mkdir(parents=True)
    (data / other / f"{other}-00000-of-00001").write_text("")
    with pytest.raises(UserError) as caught:
        mlperf_request.parse([], env)
    (line,) = str(caught.value).splitlines()
    assert f"there is no {split}-* or {split}/{split}-*; it is the folder of" in line
    (data / f"{split}-00000-of-00001").write_text("")
    assert mlperf_request.parse([], env).data_dir == str(data)
    assert os.listdir(tmp_path / "runs") == []  # looking leaves nothing


def test_of_several_hosts_only_the_first_collects(env):
    for index in (0, 1):
        place = ["--coordinator=a:1", "--num_processes=2", f"--process_id={index}"]
        assert mlperf_request.parse(["--seed=1", *place], env).is_first is (index == 0)


# --- The folder remembers what it was begun with.


def test_a_folder_keeps_its_seed(tmp_path):
    first = mlperf_request.settle(requested(tmp_path, seed=None))
    again = mlperf_request.settle(requested(tmp_path, seed=None, runs=9))
    assert again == dataclasses.replace(first, runs=9)
    other = mlperf_request.settle(requested(tmp_path / "other", seed=None))
    assert other.seed != first.seed
    assert mlperf_request.settle(requested(tmp_path, seed=first.seed)) == first


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data_dir": "/other"}, "(data /data before, /other now)"),
        ({"benchmark": "ncf"}, "(benchmark resnet before, ncf now)"),
        ({"seed": 8}, "(seed 7 before, 8 now)"),
        ({"flags": ["--config=b.py", "--config.b=1"]}, "(config a.py before, b.py now)"),
        ({"flags": ["--config=a.py"]}, "(--config.b=1 before, none now)"),
        ({"flags": ["--config=a.py", "--config.b=1", "--config.c=3"]}, "(no --config.c before, "),
    ],
)
def test_another_request_needs_another_folder(changes, says, tmp_path):
    mlperf_request.settle(requested(tmp_path))
    with pytest.raises(UserError) as caught:
        mlperf_request.settle(requested(tmp_path, **changes))
    output = str(caught.value)
    assert output.startswith(f"MLP_GCS_MODEL_DIR={tmp_path} holds runs of another kind (")
    assert says in output and "\n" not in output


def test_every_host_has_the_same_request(tmp_path):
    """But for its place; only the first one writes it."""
    flags = ["--config=a.py", "--config.b=1"]
    mlperf_request.settle(requested(tmp_path, is_first=False, flags=[*flags, "--process_id=1"]))
    assert not (tmp_path / mlperf_request.FILE).exists()
    mlperf_request.settle(requested(tmp_path, flags=[*flags, "--process_id=0"]))
    mlperf_request.settle(requested(tmp_path, is_first=False, flags=[*flags, "--process_id=1"]))


def test_a_folder_of_unknown_or_damaged_origin_is_refused(tmp_path):
    (tmp_path / "run_0").mkdir()
    (tmp_path / "run_0" / "mlperf.log").touch()
    with pytest.raises(UserError, match="holds runs, but no request.json"):
        mlperf_request.settle(requested(tmp_path))
    (tmp_path / mlperf_request.FILE).write_text("{")
    with pytest.raises(UserError, match="request.json is damaged"):
        mlperf_request.settle(requested(tmp_path))


def test_an_index_that_the_doctor_has_left_is_no_run(tmp_path):
    (tmp_path / "run_0" / "data_index").mkdir(parents=True)
    mlperf_request.settle(requested(tmp_path))
    assert (tmp_path / mlperf_request.FILE).exists()


def test_records_without_a_manifest_are_noted(tmp_path):
    (note,) = mlperf_request.notes(requested(tmp_path, data_dir=str(tmp_path)))
    assert note.startswith(f"NOTE {tmp_path}/manifest.json does not exist: every run reads all")
    (tmp_path / "manifest.json").write_text("{}")
    assert mlperf_request.notes(requested(tmp_path, data_dir=str(tmp_path))) == []
    ncf = requested(tmp_path, data_dir=str(tmp_path), benchmark="ncf")
    assert mlperf_request.notes(ncf) == []


# --- Nothing that has run is lost.


class FakeRuns(Children):
    """Stands for the processes: each writes the log of a run that nobody trained."""

    def __init__(self, scores: list[float], codes: list[int] | None = None):
        super().__init__()
        self.scores, self.codes, self.commands = scores, codes or [], []

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        self.commands.append(command)
        (workdir,) = [w.partition("=")[2] for w in command if w.startswith("--workdir=")]
        if self.scores:
            write_run(mlperf_config(seed=len(self.commands)), workdir, self.scores, Clock())
        return self.codes.pop(0) if self.codes else 0


def launch(root: Any, fake: FakeRuns, runs: int = 1, **changes: Any) -> int:
    return mlperf_run.run(requested(root, runs=runs, **changes), fake)


def full(*_: Any) -> Any:
    raise OSError("no space left")


def results(root: Path) -> list[Path]:
    return sorted(root.glob("results/*/resnet/*"))


def test_a_run_that_ended_is_collected_at_the_next_start(tmp_path, monkeypatch, capsys):
    """The launcher dies, or a file system does, between the end of a run and its result."""

    with monkeypatch.context() as patch:
        patch.setattr(mlperf_system, "describe", full)
        with pytest.raises(UserError) as caught:
            launch(tmp_path, FakeRuns(SCORES))
    assert str(caught.value).startswith(f"{tmp_path / 'run_0'}: no space left; remove the cause")
    assert "\n" not in str(caught.value) and not results(tmp_path)
    begun = (tmp_path / "run_0" / mlperf_run.TIMING).read_text().strip()
    assert "RESULT" not in capsys.readouterr().out

    fake = FakeRuns(SCORES)
    assert launch(tmp_path, fake, runs=2) == 0 and len(fake.commands) == 1  # the second one
    first, second = results(tmp_path)
    lines = first.read_text().splitlines()
    assert lines[0] == begun and lines[-1].startswith("RESULT,resnet,0,")
    assert mlperf_logs.load(first).success
    (description,) = (tmp_path / "systems").glob("*.json")
    assert second.name == "result_1.txt"
    for path in (description, tmp_path / "summary.json"):
        assert path.read_text().startswith('{\n  "') and path.read_text().endswith("}\n")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["runs"]) == ["result_0.txt", "result_1.txt"]
    again = FakeRuns([])
    assert launch(tmp_path, again, runs=2) == 0 and again.commands == []


def test_a_result_is_whole_or_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(type(mlperf_run.epath.Path(tmp_path)), "replace", full)
    with pytest.raises(OSError, match="no space left"):
        mlperf_request.write(mlperf_run.epath.Path(tmp_path) / "result_0.txt", "text")
    assert not list(tmp_path.glob("result_*"))


def test_a_run_that_missed_the_target_is_collected_and_one_cut_short_is_not(tmp_path, capsys):
    for scores, count in (([0.1] * 12, 1), (SCORES[:3], 0)):
        root = tmp_path / str(count)
        write_run(mlperf_config(), str(root / "run_0"), scores, Clock())
        fake = FakeRuns([], [1])
        assert launch(root, fake) == (0 if count else 1)
        assert len(results(root)) == count and len(fake.commands) == 1 - count
    assert f"delete {tmp_path / '0' / 'run_0'}, and the same command" in capsys.readouterr().out


def test_what_to_do_about_a_failure_depends_on_what_there_is(tmp_path, capsys):
    assert launch(tmp_path, FakeRuns([], [3])) == 3
    output = capsys.readouterr().out
    assert "exit code 3 before it began; remove the cause" in output and "delete" not in output
    assert launch(tmp_path, FakeRuns(SCORES, [4])) == 4
    output = capsys.readouterr().out
    assert "after its clock had stopped: the same command collects it" in output
    assert launch(tmp_path, FakeRuns([])) == 0 and len(results(tmp_path)) == 1


def test_the_lines_around_a_log(tmp_path, monkeypatch):
    monkeypatch.setattr(mlperf_run, "_clock", lambda seconds: f"<{seconds:.0f}>")
    monkeypatch.setattr(mlperf_run, "_user", lambda: "me")

    def lines(ended: float | None, /, **log: Any) -> list[str]:
        return mlperf_run._lines("ncf", tmp_path, mlperf_logs.Run({}, [], **log), ended)

    start, end = "STARTING TIMING RUN AT <{}>", "ENDING TIMING RUN AT <{}>"
    assert lines(None) == [start.format(0), end.format(0), "RESULT,ncf,0,0,me,<0>"]
    times: Any = {"started": 100.0, "ended": 160.0}
    assert lines(None, **times) == [start.format(100), end.format(160), "RESULT,ncf,0,60,me,<100>"]
    assert lines(170.0, **times)[1:] == [end.format(170), "RESULT,ncf,0,70,me,<100>"]
    assert lines(170.0) == [start.format(170), end.format(170), "RESULT,ncf,0,0,me,<170>"]
    first = "STARTING TIMING RUN AT 2024-05-03 02:00:00 PM"
    (tmp_path / mlperf_run.TIMING).write_text(f"{first}\n")
    began = time.mktime((2024, 5, 3, 14, 0, 0, 0, 0, -1))
    result = f"RESULT,ncf,0,90,me,<{began:.0f}>"
    assert lines(began + 90) == [first, end.format(int(began) + 90), result]


def test_a_row_has_the_last_score(capsys):
    run = mlperf_logs.Run({"seed": 7}, [(4, 0.5), (8, 0.75)], 0.0, 90.0, success=True)
    row = {"seed": 7, "success": True, "epochs": run.epochs, "minutes": 1.5, "accuracy": 0.75}
    assert mlperf_run._row("result_0.txt", run) == row
    none = mlperf_logs.Run({}, [])
    row = mlperf_run._row("result_1.txt", none)
    assert set(row.values()) == {None, False}
    assert capsys.readouterr().out.splitlines() == [
        "mlperf: result_0.txt: 1.50 minutes, epoch 8",
        "mlperf: result_1.txt: ? minutes, target NOT reached",
    ]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_command_settles_what_was_asked_and_runs_it(is_first, tmp_path, monkeypatch, capsys):
    request = requested(tmp_path, is_first=is_first)
    monkeypatch.setattr(mlperf_run, "parse", lambda words, env: "asked")
    monkeypatch.setattr(mlperf_run, "settle", {"asked": request}.get)
    monkeypatch.setattr(mlperf_run, "notes", lambda asked: ["a note"])
    monkeypatch.setattr(Children, "listen", lambda self: None)
    monkeypatch.setattr(mlperf_run, "run", lambda asked, children: 17 if asked is request else 0)
    assert mlperf_run.main() == 17
    lines = ["a note", f"mlperf: --seed={request.seed}"] if is_first else []
    assert capsys.readouterr().out.splitlines() == lines


def test_after_a_failure_there_is_a_summary_of_the_rest(tmp_path, capsys):
    assert launch(tmp_path, FakeRuns(SCORES, [0, 1]), runs=2) == 1
    assert list(json.loads((tmp_path / "summary.json").read_text())["runs"]) == ["result_0.txt"]
    assert ", epoch 35" in capsys.readouterr().out


def test_only_the_first_host_says_when_runs_start_and_end(tmp_path, capsys):
    words = ("STARTING", "ENDING", "RESULT")
    assert launch(tmp_path / "a", FakeRuns(SCORES)) == 0
    output = capsys.readouterr().out
    assert all(output.count(word) == 1 for word in words)
    assert launch(tmp_path / "b", FakeRuns(SCORES), is_first=False) == 0
    output = capsys.readouterr().out
    assert not any(word in output for word in words) and not (tmp_path / "b" / "results").exists()


def test_a_damaged_log_is_one_line(tmp_path):
    folder = tmp_path / "run_0"
    folder.mkdir()
    (folder / mlperf.LOG).write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"^.*mlperf.log: is damaged: byte 0 is not"):
        launch(tmp_path, FakeRuns([]))


# --- Whole jobs.


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
    )


@pytest.mark.long
def test_a_run_from_beginning_to_end(env):
    """The results of a tiny job: the verdict finds what is tiny about it, and nothing else."""
    root = Path(env["MLP_GCS_MODEL_DIR"])
    done = run_and_time(env, "--runs=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "manifest.json does not exist: every run reads all records" in done.stdout
    (file,) = sorted((root / "results" / "2xcpu" / "resnet").iterdir())
    lines = file.read_text().splitlines()
    assert lines[0].startswith("STARTING TIMING RUN AT 20") and lines[0] in done.stdout
    assert lines[-2].startswith("ENDING TIMING RUN AT 20") and lines[-2] in done.stdout
    assert re.fullmatch(r"RESULT,resnet,0,\d+,\S+,20\S+ \S+ [AP]M", lines[-1])
    (row,) = json.loads((root / "summary.json").read_text())["runs"].values()
    assert row["success"] and 0.759 <= row["accuracy"] < 1 and row["epochs"] % 4 == 0
    seed = json.loads((root / "request.json").read_text())["seed"]
    assert [row["seed"]] == requested(root, seed=seed, runs=1).seeds()
    described = json.loads((root / "systems" / "2xcpu.json").read_text())
    assert described["status"].startswith("Research")

    outcome = mlperf_check.check(str(root), "4.0.0")[0]
    output = "\n".join(outcome.faults)
    assert f"{file.name}: train_samples is 96, not 1,281,167" in output
    assert f"{file.name}: eval_samples is 40, not 50,000" in output
    assert f"{file.name}: cache_clear is not true" in output
    tiny = ("_samples is", "cache_clear is not", "number of runs: found 1, expected 5")
    assert [fault for fault in outcome.faults if not any(word in fault for word in tiny)] == []
