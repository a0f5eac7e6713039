"""Rows reach Weights & Biases and MLflow once, and their faults never reach the run.

The libraries are stand-ins that write what they are told to a file.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import main as program
from engine.report import tracking
from errors import ConfigError, DataError
from scripts import track

ROOT = pathlib.Path(__file__).parents[2]
WANDB = """
import json, os
class Settings:
    def __init__(self, **options): pass
class Run:
    def __init__(self, id): self.id = id
    def log(self, values, step): note("log", step, values)
    def finish(self, exit_code): note("finish", exit_code)
def note(*words):
    with open(os.environ["NOTES"], "a") as file:
        print(json.dumps(words), file=file)
def init(project, name, id, resume, dir, config, settings):
    note("init", project, name, id, resume, config)
    return Run(id or "new")
"""
MLFLOW = """
import json, os, types
def note(*words):
    with open(os.environ["NOTES"], "a") as file:
        print(json.dumps(words), file=file)
def set_experiment(name): note("experiment", name)
def start_run(run_id=None, run_name=None):
    note("start", run_id, run_name)
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "first"))
def log_params(values): note("params", values)
def log_metrics(values, step): note("log", step, values)
def end_run(status): note("end", status)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package that this process and its children import; returns the file of notes."""
    folder = tmp_path / "packages"
    folder.mkdir()

    def make(name, text):
        (folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return tmp_path / "notes"

    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield make
    for name in track.TRACKERS:
        sys.modules.pop(name, None)


@pytest.fixture
def workdir(tmp_path):
    folder = tmp_path / "run_7"
    folder.mkdir()
    config = {"benchmark": "resnet", "mlperf": {"org": "us"}, "text": "x" * 600}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add(workdir, *rows):
    with open(workdir / "metrics.jsonl", "a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def train(step, **values):
    return {"split": "train", "step": step, **values}


def notes(file):
    """What the library was told, and forgets it."""
    words = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return words


def send(workdir, name="wandb"):
    return track.main([f"--workdir={workdir}", f"--tracker={name}"])


def test_wandb_gets_each_row_once(package, workdir):
    file = package("wandb", WANDB)
    evaluation = {"split": "eval", "step": 20, "top_1_accuracy": 0.5, "top_5_accuracy": None}
    add(workdir, train(10, loss=2.5), evaluation, train(20, loss=2, note="text", ok=True))
    assert send(workdir) == 0
    assert notes(file) == [
        [
            "init",
            "resnet",
            "run_7",
            None,
            "allow",
            json.loads((workdir / "config.json").read_text()),
        ],
        ["log", 10, {"train/loss": 2.5}],
        ["log", 20, {"eval/top_1_accuracy": 0.5}],
        ["log", 20, {"train/loss": 2.0}],
        ["finish", 0],
    ]
    assert send(workdir) == 0 and notes(file) == []
    # A resume at step 10 writes step 20 again.
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_text(lines[0])
    add(workdir, train(20, loss=2), train(30, loss=1))
    assert send(workdir) == 0
    begun, *rest = notes(file)
    assert begun[:4] == ["init", "resnet", "run_7", "new"]
    assert rest == [["log", 30, {"train/loss": 1.0}], ["finish", 0]]


def test_mlflow_gets_the_config_and_each_row_once(package, workdir):
    file = package("mlflow", MLFLOW)
    add(workdir, train(10, loss=2.5))
    assert send(workdir, "mlflow") == 0
    parameters = {"benchmark": "resnet", "mlperf.org": "us", "text": "x" * 500}
    assert notes(file) == [
        ["experiment", "resnet"],
        ["start", None, "run_7"],
        ["params", parameters],
        ["log", 10, {"train/loss": 2.5}],
        ["end", "FINISHED"],
    ]
    add(workdir, train(20, loss=2.0))
    assert send(workdir, "mlflow") == 0
    assert notes(file) == [
        ["experiment", "resnet"],
        ["start", "first", None],
        ["log", 20, {"train/loss": 2.0}],
        ["end", "FINISHED"],
    ]


def test_lines_that_are_no_rows_are_left_out(package, workdir):
    file = package("wandb", WANDB)
    add(workdir, train(10, loss=1.0), [1], {"step": "3", "split": "train"}, {"step": 4})
    with open(workdir / "metrics.jsonl", "a") as rows:
        rows.write('{"broken\n' + json.dumps(train(20, loss=3.0)))  # the last line is not complete
    assert send(workdir) == 0
    assert [row[1] for row in notes(file) if row[0] == "log"] == [10]


def test_what_failed_is_sent_by_the_next_call(package, workdir, capsys):
    faulty = MLFLOW + (
        "def log_metrics(values, step):\n"
        "    if step == 20: raise OSError('no network')\n"
        "    note('log', step, values)\n"
    )
    file = package("mlflow", faulty)
    add(workdir, *(train(step, loss=1.0) for step in (10, 20, 30)))
    assert send(workdir, "mlflow") == 1
    assert capsys.readouterr().err == "ERROR: OSError: no network\n"
    assert [row[1] for row in notes(file) if row[0] == "log"] == [10]
    package("mlflow", MLFLOW + "healthy = True\n")
    assert send(workdir, "mlflow") == 0
    assert [row[1] for row in notes(file) if row[0] == "log"] == [20, 30]


def test_mistakes_are_one_line(package, workdir, tmp_path, capsys):
    assert send(tmp_path / "nothing") == 1
    assert "has no metrics.jsonl: is it a run's folder?" in capsys.readouterr().err
    (workdir / "tracker.json").write_text("[1]")
    add(workdir, train(10, loss=1.0))
    with pytest.raises(DataError, match="delete it to send all rows to a new run"):
        track.Sender(str(workdir), "wandb")
    assert send(workdir) == 1 and "tracker.json is damaged" in capsys.readouterr().err


def follow(workdir, name="wandb", text=""):
    said = []
    with tracking.following(name, str(workdir), said.append):
        if text == "stop":
            raise KeyboardInterrupt
        add(workdir, train(10, loss=1.0))
    return said


def test_a_run_is_followed_to_its_end(package, workdir):
    file = package("wandb", WANDB)
    assert follow(workdir) == []
    assert [row[:2] for row in notes(file)] == [["init", "resnet"], ["log", 10], ["finish", 0]]


def test_a_run_that_stops_is_not_done(package, workdir):
    file = package("wandb", WANDB)
    add(workdir, train(5, loss=1.0))
    with pytest.raises(KeyboardInterrupt):
        follow(workdir, text="stop")
    assert notes(file)[-1] == ["finish", 1]


def test_no_tracker_starts_nothing(workdir, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert follow(workdir, name="") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ValueError('no key')", "NOTE wandb: ValueError: no key; python -m scripts.track "),
        ("import os; os.abort()", "NOTE wandb: its process ended with exit code -6; "),
        (
            "import time; print('asks for a login', flush=True); time.sleep(600)",
            "NOTE wandb: it did not send the last rows within 1 s; ",
        ),
    ],
)
def test_a_faulty_tracker_is_a_note(package, workdir, monkeypatch, text, says):
    package("wandb", text)
    monkeypatch.setattr(tracking, "PATIENCE", 1.0 if "sleep" in text else 60.0)
    (said,) = follow(workdir)
    assert said.startswith(says[:60].partition("; ")[0])
    assert said.endswith(f"--workdir={workdir} --tracker=wandb sends the rows that are missing")


def test_a_killed_run_leaves_no_process(package, workdir, tmp_path):
    """The end of standard input tells the tracker that its run is gone."""
    file = package("wandb", WANDB)
    add(workdir, train(10, loss=1.0))
    code = (
        "import os, signal, sys; from engine.report import tracking\n"
        "with tracking.following('wandb', sys.argv[1], print):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code, str(workdir)]
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while not (file.exists() and "finish" in file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert notes(file)[-1] == ["finish", 1]


def test_a_missing_package_ends_the_run_at_once(workdir):
    with pytest.raises(ConfigError, match="wandb, which is not installed: pip install wandb, or"):
        follow(workdir)
    with pytest.raises(ConfigError, match="pip install mlflow-skinny"):
        follow(workdir, "mlflow")


def test_only_training_modes_are_tracked():
    trained = [name for name, mode in program.MODES.items() if mode.trains]
    assert trained == ["train_and_eval", "train"]
