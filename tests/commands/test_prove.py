"""--mode=prove runs each check in a process of its own, and writes down how it ends.

The complete run is slow: bash scripts/test.sh -m slow -k prove
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from commands import preflight, prove
from commands.prove import CHECKS
from common.errors import ConfigError, UserError
from tests.device import test_speed, training

ROOT = pathlib.Path(__file__).parents[2]
SAMPLES = "tests/device/samples.py"


def checks(*names):
    return {name: f"{SAMPLES}::test_{name}" for name in names}


@pytest.mark.long
def test_every_way_in_which_a_check_ends_is_a_row(tmp_path, capsys, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import sys\nsys.modules['tensorflow'] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(prove, "_LIMIT", 30.0)
    planned = checks("passes", "skips", "fails", "raises", "crashes", "is_gone", "hangs")
    planned["broken"] = f"{SAMPLES}x"
    assert prove.run("", True, str(tmp_path / "out"), planned) == 1
    content = json.loads((tmp_path / "out/prove.json").read_text())
    assert {row["name"]: (row["status"], row["summary"]) for row in content["checks"]} == {
        "passes": ("ok", "1 devices"),
        "skips": ("skipped", "no TensorFlow"),
        "fails": ("FAILED", "test_fails: AssertionError: the answer is 41"),
        "raises": ("FAILED", "test_raises: common.errors.DataError: no space"),
        "crashes": ("FAILED", "the check's process ended with SIGABRT"),
        "is_gone": ("FAILED", "no test ran"),
        "hangs": ("FAILED", "not done after 0:30"),
        "broken": ("FAILED", "no test ran"),
    }
    assert content["checks"][0]["figures"] == {"count": 3, "rate": 0.1234567}
    assert content["checks"][0]["programs"] == {"step": "ab" * 32}
    assert content["versions"]["jax"] == jax.__version__ and content["short"] is True
    output = capsys.readouterr().out
    assert "prove: 6 of 8 checks failed, 1 skipped; wrote" in output
    assert ": no TensorFlow" in output
    folder = output.split("by their numbers: ")[1].split("\n")[0]
    assert {f"{number}.log" for number in range(1, 9)} <= {*os.listdir(folder)}
    shutil.rmtree(folder)


def test_a_proof_without_a_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert prove.run(str(tmp_path / "work"), False, "", checks("passes")) == 0
    assert list(json.loads((tmp_path / "work/prove.json").read_text())) == [
        *("format", "date", "short", "commit", "devices", "host", "versions", "checks")
    ]
    assert "prove: 0 of 1 checks failed" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_refused_before_the_checks(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"^cannot write to --out={tmp_path}/file/x: "):
        prove.run("/w", True, f"{tmp_path}/file/x", {})


def test_what_is_missing_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(prove, "_ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match="^--mode=prove runs tests: use a clone .*install pytest"):
        prove.run("", True, str(tmp_path), {})


def test_every_check_has_tests_that_are_marked():
    """And every marked test is in a check, so that no chip misses it."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-n0"]
    names = [name for tests in CHECKS.values() for name in tests.split()]
    files = {name.partition("::")[0] for name in names}
    done = subprocess.run(
        [*words, "-m", "device", *files], cwd=ROOT, capture_output=True, text=True, check=True
    )
    marked = [line for line in done.stdout.splitlines() if "::" in line]
    assert [name for name in names if not any(test.startswith(name) for test in marked)] == []
    assert [test for test in marked if not test.startswith(tuple(names))] == []
    paths = ROOT.glob("tests/**/test_*.py")
    found = {path for path in paths if "mark." + "device" in path.read_text()}
    assert found == {ROOT / file for file in files}


@pytest.mark.parametrize(
    ("kind", "count", "name"), [("TPU v3", 8, "v3:2x2"), ("TPU v4", 4, "v4:2x2x1")]
)
def test_the_estimate_is_of_the_slice_that_is_here(kind, count, name, monkeypatch):
    def inspect(settings, one, parts):
        return preflight.Outcome(one, 8, error=f"of {one.name}", fits=None)

    monkeypatch.setattr(preflight, "inspect", inspect)
    settings = training.settings("ncf", train_batch_size=24, eval_batch_size=8)
    assert test_speed.estimate(settings, kind, count) == {"no_estimate": f"of {name}"}
    assert "TPU v99" in test_speed.estimate(settings, "TPU v99", 8)["no_estimate"]
    assert test_speed.estimate(settings, "cpu", 8) == {}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_the_complete_proof(count, tmp_path):
    flags = f"--xla_force_host_platform_device_count={count}"
    done = subprocess.run(
        [sys.executable, "main.py", "--mode=prove", "--short", f"--out={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "prove.json").read_text())
    assert content["devices"]["count"] == count
    assert {row["name"] for row in content["checks"]} == {*CHECKS}
