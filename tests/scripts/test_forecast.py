"""scripts.forecast: its flags, what it prints, its exit codes. The worker is replaced."""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import INVALID, UserError
from engine.forecast import calibration, forecasts, worker
from engine.forecast.forecasts import Answer, Operation
from scripts import forecast
from tests.engine.forecast.test_estimates import TRAIN, operation

ROOT = Path(__file__).parents[2]
MIB = 2**20


def named(name: str, seconds: float, **others: Any) -> Operation:
    texts = {"name": f"{name}.1", "scopes": f"jit(step)/{name}", "place": f"/home/me/{name}.py:7"}
    return operation(seconds, **texts, **others)


PROGRAM = dataclasses.replace(
    TRAIN,
    arguments=1024 * MIB,
    outputs=10 * MIB,
    temporaries=2048 * MIB,
    code=MIB,
    operations=(
        *(named(f"op{i}", 0.0066) for i in range(10)),
        named("loop", 0.004, times=8.0, flops=25 * 10**9, moved=375 * 10**6),
        named("sum", 0.002, link_seconds=0.002),
    ),
    largest=(("fusion.9", 300 * MIB),),
    collectives={"all-reduce": (3.0, 4e6)},
    unknown_loops=1,
    compile_seconds=12,
)
FITS = Answer(PROGRAM, 8, (("params['w']", 512 * MIB), ("x", 100)), 2, None, "", True)
FULL = Answer(None, 8, (("params['w']", 512 * MIB),), 0, None, "the program does not fit", False)


@pytest.fixture
def answers(monkeypatch):
    """What the workers answer, by slice."""
    found = {"v5e:2x4": FITS, "v3:2x2": FULL, "v4:2x2x1": FITS._replace(used=1)}
    monkeypatch.setattr(worker, "ask", lambda module, request, name: found[name])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(calibration, "error", lambda chip: calibration.Error(0.8, 1.25, "guess"))
    return found


@pytest.mark.usefixtures("answers")
def test_what_is_printed(capsys):
    assert forecast.main(["steps:make", "--tpu=v5e-8", "--examples=1000"]) == 0
    out = capsys.readouterr().out
    for line in (
        "v5e:2x4 (v5litepod-8): 8 chips, 8 devices",
        "  fits: 3.01 GiB of 16 GiB on each device, 19% (arguments 1 GiB, results 10 MiB, "
        "temporaries 2 GiB, program 1 MiB)",
        "    largest arguments: params['w'] 0.5 GiB, x 100 bytes",
        "    largest results and temporaries: fusion.9 0.293 GiB",
        "  bound by HBM: 0.2 TFLOP and 3 GB of HBM traffic on each device",
        "  collectives: 2 ms on the links, some beside other work; sent: 3 all-reduce (3.81 MiB)",
        "  price: 9.60 USD an hour; at 1,000 examples a call 10,000 examples/s (8,000 to 12,500) "
        "and 0.267 USD for a million (0.213 to 0.333)",
        "  too short: 1 loop of unknown length, which may depend on the data; each counts once",
        "  too short: 2 callbacks to the host, such as jax.debug.print, for which the device may "
        "wait",
    ):
        assert f"{line}\n" in out
    assert "  time: 100 ms a call (80 to 125: guess)" in out
    table = out.split("share")[1].splitlines()
    assert table[1].split() == ["32.0%", "32", "8", "loop.1", "me/loop.py:7", "jit(step)/loop"]
    assert len([line for line in table if "jit(step)" in line]) == 10
    assert out.endswith(f"{forecast.NOTE}\n")


@pytest.mark.usefixtures("answers")
def test_one_slice_is_too_small(capsys):
    assert forecast.main(["steps:make", "--tpu=v3-8,v4-8"]) == 1
    full, good, _ = capsys.readouterr().out.split("\n\n")
    assert full.splitlines() == [
        "v3:2x2 (v3-8): 4 chips, 8 devices",
        "  the program does not fit",
        "  largest arguments: params['w'] 0.5 GiB",
    ]
    assert good.startswith("v4:2x2x1 (v4-8): 4 chips, on 1 of the 4 devices\n")
    assert "examples/s" not in good


@pytest.mark.usefixtures("answers")
def test_json(capsys):
    assert forecast.main(["steps:make", "--tpu=v5e-8,v3-8", "--json", "--examples=50"]) == 1
    good, full = json.loads(capsys.readouterr().out)
    assert good["memory"] == 3083 * MIB and good["memory_available"] == 16 * 2**30
    seconds = [good[f"seconds{end}"] for end in ("", "_least", "_most")]
    assert seconds == pytest.approx([0.1, 0.08, 0.125])
    assert (good["examples_per_second_least"], good["examples_per_second"]) == (400, 500)
    assert good["dollars_per_million"] == pytest.approx(9.6 / 3600 / 500 * 1e6)
    assert good["dollars_per_million_most"] == pytest.approx(1.25 * good["dollars_per_million"])
    assert good["operations"][0]["place"] == "/home/me/loop.py:7" and len(good["operations"]) == 12
    assert good["operations"][0]["seconds"] == pytest.approx(0.032)
    assert good["collectives"] == {"all-reduce": {"count": 3, "bytes": 4_000_000}}
    assert good["versions"]["jax"] and good["calibration"]["date"]
    assert (full["fits"], full["error"]) == (False, "the program does not fit")
    assert full["versions"] == good["versions"] and "seconds" not in full


def test_what_was_done_is_printed_if_the_rest_is_interrupted(answers, monkeypatch, capsys):
    def ask(module: str, request: Any, name: str) -> Answer:
        if name == "v3:2x2":
            raise KeyboardInterrupt
        return FITS

    monkeypatch.setattr(worker, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        forecast.main(["steps:make", "--tpu=v5e-8,v3-8", "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_numbers():
    texts = [forecast._number(x) for x in (0, 0.01234, 1.999, 34.25, 99.96, 123.4, 1_583_763.2)]
    assert texts == ["0", "0.0123", "2", "34.2", "100", "123", "1,583,763"]
    sizes = [forecast._size(x) for x in (0, 100, 2048, 0.5 * MIB, 15 * MIB, 3 * 2**40)]
    assert sizes == ["0 bytes", "100 bytes", "2 KiB", "0.5 MiB", "15 MiB", "3,072 GiB"]


@pytest.mark.parametrize(
    "argument", ["--examples=0", "--examples=x", "--chip_hour_price=nan", "--chip_hour_price=-1"]
)
def test_arguments_that_are_wrong(argument, capsys):
    with pytest.raises(SystemExit) as caught:
        forecast.main(["steps:make", argument])
    assert caught.value.code == INVALID
    name, _, value = argument.partition("=")
    err = capsys.readouterr().err
    assert f"{name}: " in err and f"'{value}'" in err and err.count("\n") == 1


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("words", [["steps"], ["steps:make", "--tpu=v5e:3x3"]])
def test_a_program_or_a_slice_that_there_is_not(words):
    with pytest.raises(UserError) as caught:
        forecast.main(words)
    assert caught.value.code == INVALID


def test_a_price_that_is_not_known():
    one = forecasts.Forecast(
        topology=forecasts.parse_slices("v5e-8")[0], price=math.nan, examples=5, used=8, fits=True,
        error="", arguments=(), callbacks=0, program=PROGRAM,
    )  # fmt: skip
    assert "  price: not known for this chip; give --chip_hour_price\n" in forecast.text(one)
    assert one.numbers()["dollars_per_million"] is None
    assert "examples/s" not in forecast.text(dataclasses.replace(one, price=1, examples=None))


@pytest.mark.long
def test_a_file_of_this_repository_starts_in_a_folder_with_packages_of_its_names(tmp_path):
    for name in ("common", "scripts", "engine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    command = [sys.executable, str(ROOT / "scripts/forecast.py"), "no_such.py:make"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode in (INVALID, 1) and done.stderr.count("\n") == 1
    assert "no_such.py" in done.stderr or "libtpu is not installed" in done.stderr
