"""--mode=prove runs each check in a process of its own, and writes down how it ends.

The complete run is slow: bash scripts/test.sh -m slow -k prove
"""

import getpass
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from commands import preflight, prove
from commands.prove import CHECKS, Check
from common.errors import ConfigError, UserError
from tests.device import test_speed, training

ROOT = pathlib.Path(__file__).parents[2]
SAMPLES = "tests/device/samples.py"


def checks(*names, limit=600.0):
    return [Check(n, f"{SAMPLES}::test_{n}", f"{n}.py", limit) for n in names]


@pytest.mark.long
def test_every_way_in_which_a_check_ends_is_a_row(tmp_path, capsys, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import sys\nsys.modules['tensorflow'] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    planned = checks("passes", "skips", "fails", "raises", "crashes", "is_gone")
    planned += [*checks("hangs", limit=5), Check("broken", f"{SAMPLES}x", "x.py")]
    assert prove.run("", True, str(tmp_path / "out"), planned) == 1
    text = (tmp_path / "out/prove.json").read_text()
    content = json.loads(text)
    rows = {row["name"]: row for row in content["checks"]}
    assert [row["status"] for row in rows.values()] == ["ok", "skipped", *["failed"] * 6]
    assert rows["passes"]["summary"] == "1 devices"
    assert rows["passes"]["figures"] == {"count": 3, "rate": 0.12346}
    assert rows["skips"]["summary"] == "no TensorFlow"
    assert rows["fails"]["summary"] == "the answer is 41" and rows["fails"]["look"] == "fails.py"
    assert rows["raises"]["summary"] == "DataError: no space in PATH"
    assert rows["crashes"]["summary"] == "the check's process ended with signal 6 (SIGABRT)"
    assert rows["is_gone"]["summary"] == rows["broken"]["summary"] == "no test ran"
    assert rows["hangs"]["summary"] == "not done after 0:05"
    assert content["programs"] == {"step": "ab" * 32}
    assert content["versions"]["jax"] == jax.__version__ and content["short"] is True
    assert "someone" not in text and str(tmp_path) not in text
    output = capsys.readouterr().out
    assert "prove: 6 of 8 checks failed, 1 skipped; wrote" in output
    assert "skipped: no TensorFlow" in output
    folder = output.split("logs of the checks: ")[1].split("\n")[0]
    assert {f"{name}.log" for name in rows} <= {*os.listdir(folder)}
    shutil.rmtree(folder)


def test_a_proof_without_a_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert prove.run(str(tmp_path / "work"), False, "", checks("passes")) == 0
    assert list(json.loads((tmp_path / "work/prove.json").read_text())) == [
        *("format", "date", "short", "commit", "devices", "host", "versions", "checks"),
        "programs",
    ]
    assert "prove: 0 of 1 checks failed" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_refused_before_the_checks(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"^cannot write to --out={tmp_path}/file/x: "):
        prove.run("/w", True, f"{tmp_path}/file/x", ())


def test_what_is_missing_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(prove, "_ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match="^--mode=prove runs tests, and this copy .* no folder"):
        prove.run("", True, str(tmp_path), ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pytest is not installed: bash scripts/setup.sh tpu"):
        prove.run("", True, str(tmp_path), ())


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("cannot read /home/ann/run/x.py: no", "cannot read PATH: no"),
        ("gs://my-bucket/run failed", "PATH failed"),
        ("~/data and ../up", "PATH and ../up"),
        ("token hf_AbCdEf0123456789AbCdEf0123 of ann@example.com", "token REMOVED of REMOVED"),
        ("host 10.0.0.7:8470", "host REMOVED:8470"),
        ("two\nlines\x1b[31m", "two lines\\x1b[31m"),
        ("resnet float32: gradient/bn1/bias has 0.5", "resnet float32: gradient/bn1/bias has 0.5"),
        ("marigold may not write", "NAME may not write"),
    ],
)
def test_nothing_private_is_written(text, kept, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "marigold")
    assert prove.anonymous(text) == kept


def test_every_check_has_tests_that_are_marked():
    """And every marked test is in a check, so that no chip misses it."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-n0"]
    names = [name for check in CHECKS for name in check.tests.split()]
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
    assert {row["name"] for row in content["checks"]} == {check.name for check in CHECKS}
