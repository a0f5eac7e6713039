"""The function `forecast`: where a program is found, and what follows from the worker's answer."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import INVALID, ConfigError
from engine.forecast import forecast, kernels, worker
from engine.forecast.forecasts import Answer

ROOT = Path(__file__).parents[3]


def make(devices: Any) -> None:
    """A program of a user's; the worker is replaced."""


class Inner:
    make = staticmethod(make)


@pytest.fixture
def asked(monkeypatch):
    """The requests that the workers get; all answer that they found no program."""
    requests: list[Any] = []

    def ask(module: str, request: Any, name: str) -> Answer:
        requests.append(request)
        return Answer(error=f"of {name}", used=3)

    monkeypatch.setattr(worker, "ask", ask)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv(kernels.FOLDER, raising=False)
    return requests


def test_a_request_for_each_slice(asked, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = forecast(make, "v5e-8, v4:2x2x1", examples=7, chip_hour_price=0.5)
    assert [one.target for one in asked] == [(__name__, "make")] * 2
    assert [one.topology for one in asked] == ["v5e:2x4", "v4:2x2x1"]
    assert asked[0].folder == asked[0].path[0] == str(tmp_path)
    assert str(ROOT) not in asked[0].path
    assert [(one.price, one.error, one.examples) for one in found] == [
        (4.0, "of v5e:2x4", 7),
        (2.0, "of v4:2x2x1", 7),
    ]


def test_a_compiler_that_dies_is_the_error_of_its_slice(asked, monkeypatch):
    def ask(module: str, request: Any, name: str) -> Answer:
        if name == "v5e:2x4":
            raise worker.CompilerDied("the compiler died")
        return Answer(fits=True, examples=64)

    monkeypatch.setattr(worker, "ask", ask)
    dead, alive = forecast("steps:make", "v5e-8,v3-8")
    assert (dead.error, dead.fits, alive.error, alive.examples) == (
        "the compiler died",
        None,
        "",
        64,
    )


def test_what_concerns_all_slices_is_raised(asked, monkeypatch):
    monkeypatch.setattr(worker, "ask", lambda *_: ConfigError("no module", INVALID))
    with pytest.raises(ConfigError, match="no module"):
        forecast("steps:make")


def nested() -> Any:
    def inner(devices: Any) -> None: ...

    return inner


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda devices: None, "write it to a file"),
        (nested(), "write it to a file"),
        ("steps", "steps: there is no such file; write module:make"),
        ("steps.py", "which function of it.*steps.py:make"),
        ("no_such.py:make", "there is no file no_such.py"),
        ("a/b:make", "there is no file a/b"),
        ("steps:", "'' is no name"),
        ("steps:a-b", "'a-b' is no name"),
    ],
)
def test_programs_that_no_other_process_can_find(program, words, asked):
    with pytest.raises(ConfigError, match=f"^[^\n]*{words}[^\n]*$"):
        forecast(program)
    assert not asked


def test_names_of_programs(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text("")
    (tmp_path / "step.mlir").write_text("")
    for program in ("steps.py:Models.make", "./steps.py:make", "package.steps:make", "step.mlir"):
        forecast(program)
    forecast(Inner.make)
    path = str(tmp_path / "steps.py")
    assert [one.target for one in asked] == [
        (path, "Models.make"),
        (path, "make"),
        ("package.steps", "make"),
        (str(tmp_path / "step.mlir"), ""),
        (__name__, "make"),
    ]


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'libtpu is not installed.*pip install "jax\[tpu\]=='):
        forecast("steps:make")


def test_no_forecast_starts_another_one(asked, monkeypatch):
    monkeypatch.setenv(kernels.FOLDER, "/tmp")
    with pytest.raises(ConfigError, match="if __name__ == '__main__':"):
        forecast("steps:make")


def test_without_a_program_nothing_is_known(asked):
    (found,) = forecast("steps:make")
    assert math.isnan(found.seconds) and math.isnan(found.dollars_per_million)
    assert found.memory is None and found.dearest() == []
    numbers = json.loads(json.dumps(found.numbers(), allow_nan=False))
    assert numbers["error"] == "of v5e:2x4" and numbers["fits"] is None


@pytest.mark.long
def test_only_jax_is_needed():
    """People have jax and libtpu in the environment of their program, and not our dependencies."""
    code = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {"tensorflow", "absl", "etils", "ml_collections", "flax", "clu", "optax"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import scripts.forecast, engine.forecast.user_program
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
