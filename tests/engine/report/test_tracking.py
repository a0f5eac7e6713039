"""wandb follows the events that clu writes, and its faults never reach the run.

The package is a stand-in which finds the writers of events as wandb does.
"""

import sys
import types

import pytest

from engine.report import tracking
from engine.report.writers import Reporter

RECIPE = {"benchmark": "resnet", "seed": 3}


@pytest.fixture
def wandb(monkeypatch):
    """The stand-in; `calls` is what it was asked to do."""
    from tensorflow.python.ops import gen_summary_ops

    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    module, make = types.ModuleType("wandb"), gen_summary_ops.create_summary_file_writer
    calls = []

    def patch(root_logdir):
        def writer(*args, **kwargs):
            calls.append(("events", kwargs["logdir"].numpy().decode()))
            return make(*args, **kwargs)

        calls.append(("patch", root_logdir))
        monkeypatch.setattr(gen_summary_ops, "create_summary_file_writer", writer)

    def init(**options):
        calls.append(("init", options))
        finish = lambda exit_code: calls.append(("finish", exit_code))  # noqa: E731
        return types.SimpleNamespace(id=options["id"] or "new", finish=finish)

    tensorboard = types.SimpleNamespace(patch=patch)
    vars(module).update(calls=calls, init=init, tensorboard=tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def write(workdir):
    reporter = Reporter(workdir)
    reporter.train({"step": 1, "loss": 2.0}, "")
    reporter.close()


def test_wandb_follows_the_events_of_the_run_and_of_its_resumption(wandb, tmp_path, capsys):
    workdir = str(tmp_path / "run_7")
    (tmp_path / "run_7").mkdir()
    with tracking.synced(workdir, RECIPE, print):
        write(workdir)
    (patch, init, events, finish) = wandb.calls
    assert (patch, events, finish) == (("patch", workdir), ("events", workdir), ("finish", 0))
    options = init[1]
    assert options["sync_tensorboard"]
    assert (options["project"], options["name"], options["config"]) == ("resnet", "run_7", RECIPE)
    assert (options["id"], options["resume"], options["dir"]) == (None, "allow", workdir)
    wandb.calls.clear()
    with pytest.raises(KeyError), tracking.synced(workdir, RECIPE, print):
        raise KeyError
    assert wandb.calls[1][1]["id"] == "new"
    assert wandb.calls[-1] == ("finish", 1)
    assert capsys.readouterr().out == ""


def test_without_wandb_the_run_goes_on(wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with tracking.synced(str(tmp_path), RECIPE, print):
        write(str(tmp_path))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("NOTE config.tracker=wandb")
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("place", ["patch", "init", "finish"])
def test_a_failing_wandb_is_one_line(place, wandb, tmp_path, capsys):
    def fail(**_):
        raise ValueError("no key\nand more")

    if place == "patch":
        wandb.tensorboard.patch = fail
    else:
        run = types.SimpleNamespace(id="x", finish=fail)
        wandb.init = fail if place == "init" else lambda **_: run
    done = []
    with tracking.synced(str(tmp_path), RECIPE, print):
        done.append(1)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("NOTE config.tracker=wandb: no key; ")
    assert done
