"""What preflight prints, from numbers as the compiler gave them.

Also whether the hosts of a slice prepare examples as fast as the chips take them.
"""

import dataclasses
import math
from typing import Any

import pytest

from engine.forecast import calibration, estimates, topology
from engine.forecast.estimates import Job, Outcome, Stage
from engine.forecast.operations import Operation
from engine.forecast.program import Program, combine

V3, V5E = topology.parse_slices("v3:2x2,v5e:2x4")
JOB = Job("images", 1024, 128, 1_281_167, 50_000, 112_603, 90, 8_178_368_512)


def operation(seconds: float, **others: Any) -> Operation:
    """An operation of a program that runs it once."""
    texts = {"name": "fusion.1", "opcode": "fusion", "scopes": "a", "place": "train.py:7"}
    numbers = {"times": 1.0, "flops": 0, "moved": 0, "cycles": None}
    numbers["bf16_flops"] = others.get("flops", 0)
    return Operation(**{**texts, **numbers, **others}, seconds=seconds)


TRAIN = Program(
    topology=V3,
    arguments=225_020_928,
    outputs=3_072,
    temporaries=4_676_225_024,
    code=71_465_984,
    largest=(("f32[64] fusion.9", 300 * 2**20),),
    operations=(
        operation(0.12, flops=3_083_600_000_000, moved=30_000_000_000),
        operation(0.009, scopes="b", times=2.0, moved=2_300_000_000),
        operation(0.002, opcode="all-reduce", link_seconds=0.002),
    ),
    collectives={"all-reduce": (3, 102_425_264)},
    unknown_loops=0,
    branches=0,
    compile_seconds=90.5,
)
PREDICT = dataclasses.replace(
    TRAIN, operations=(operation(0.004),), temporaries=300_000_000, compile_seconds=20.0
)


def lasting(seconds: float, **others: Any) -> Program:
    """`TRAIN` with another time."""
    return dataclasses.replace(TRAIN, operations=(operation(seconds),), **others)


GOOD = Outcome(V3, 1024, JOB, TRAIN, PREDICT)


def test_the_numbers_of_a_slice():
    row = estimates.row(GOOD)
    seconds = 0.12 + 2 * 0.009 + 0.002
    assert row["step_seconds"] == pytest.approx(seconds)
    assert row["examples_per_second"] == pytest.approx(1024 / seconds)
    assert row["examples_per_second_per_chip"] == pytest.approx(1024 / seconds / 4)
    assert row["memory"] == 225_020_928 + 3_072 + 4_676_225_024 + 71_465_984
    assert row["memory_available"] == 16 * 2**30
    assert row["batch_per_device"] == 128
    peak = 123e12 / 2  # of one of a chip's two devices
    assert row["share_of_peak"] == pytest.approx(3 * 8_178_368_512 * 128 / seconds / peak)
    assert (row["bound"], row["bound_seconds"]) == ("HBM", pytest.approx(34.6e9 / 0.45e12))
    assert row["collective_seconds"] == 0.002
    run = 112_603 * seconds + 90 * 391 * 0.004
    assert row["run_seconds"] == pytest.approx(run)
    assert row["chip_hours"] == pytest.approx(4 * run / 3600)
    assert row["dollars"] == pytest.approx(4 * run / 3600 * 2.00)  # an hour of v3-8 is 8 dollars
    assert estimates.row(GOOD, 0.5)["dollars"] == pytest.approx(4 * run / 3600 * 0.5)
    busy = dataclasses.replace(TRAIN, operations=(operation(1.0, flops=60 * 10**12),))
    assert estimates.row(dataclasses.replace(GOOD, train=busy))["bound"] == "compute"


def test_times_prices_and_rates_have_an_interval(monkeypatch):
    monkeypatch.setattr(calibration, "error", lambda chip: calibration.Error(0.8, 1.25, "guess"))
    row = estimates.row(GOOD)
    assert row["step_seconds_interval"] == pytest.approx([0.112, 0.175])
    assert row["examples_per_second_interval"] == pytest.approx([1024 / 0.175, 1024 / 0.112])
    assert row["dollars_interval"] == pytest.approx([0.8 * row["dollars"], 1.25 * row["dollars"]])
    assert row["calibration"]["date"] and "libtpu" in row["calibration"]["forecasts_by"]
    assert row["versions"]["jax"]
    text = estimates.tables([row], "images")
    assert "140.0 (112.0 to 175.0)" in text and "7,314 (5,851 to 9,143)" in text
    assert "v3: guess." in text


def test_flops_that_depend_on_the_data_are_not_known():
    row = estimates.row(dataclasses.replace(GOOD, job=dataclasses.replace(JOB, forward_flops=None)))
    assert row["model_flops_per_step"] is row["share_of_peak"] is None
    assert " ? " in estimates.tables([row], "examples")


def test_stages_count_as_often_as_they_have_steps():
    """80 ms for 3,000 steps at 128 pixels, 200 ms for 1,000 at 224: 110 ms on average."""
    parts = [
        Stage("128 pixels", 3000, lasting(0.08)),
        Stage("224 pixels", 1000, lasting(0.2, code=8)),
        Stage("256 pixels", 0, lasting(0.3)),
    ]
    train = combine([part.program for part in parts], [part.steps for part in parts])
    assert train.seconds == pytest.approx(0.11)
    job = dataclasses.replace(JOB, steps=4000, evaluations=0)
    row = estimates.row(Outcome(V3, 1024, job, train, PREDICT, stages=tuple(parts)))
    assert row["run_seconds"] == pytest.approx(440)
    assert row["run_seconds"] == pytest.approx(sum(s["run_seconds"] for s in row["stages"]))
    assert [stage["step_seconds"] for stage in row["stages"]] == pytest.approx([0.08, 0.2, 0.3])
    assert row["stages"][1]["memory"] == TRAIN.memory - TRAIN.code + 8
    assert row["stages"][0]["examples_per_second"] == pytest.approx(12_800)
    text = estimates.tables([row], "images")
    (line,) = [line for line in text.splitlines() if line.startswith("v3:2x2  128 pixels")]
    assert "3,000" in line and " 80.0 (" in line and "12,800 (" in line and " 4:00 (" in line
    assert "stages" not in estimates.row(GOOD)


def test_a_loop_of_unknown_length_is_said():
    assert "too short" not in estimates.tables([estimates.row(GOOD)], "images")
    unknown = dataclasses.replace(TRAIN, unknown_loops=1)
    row = estimates.row(dataclasses.replace(GOOD, train=unknown))
    assert "v3:2x2: too short: 1 loop of unknown length" in estimates.tables([row], "images")


def test_tables():
    lost = Outcome(topology.parse_slices("v6e-8")[0], 1024, error="the compiler died", fits=None)
    full = Outcome(V5E, 8192, error="Ran out of memory", fits=False)
    text = estimates.tables([estimates.row(o) for o in (GOOD, lost, full)], "images")
    lines = [line.split() for line in text.splitlines()]
    sizes = ["0.21", "4.36", "0.07", "4.63", "16.00"]
    assert ["v3:2x2", "v3-8", "4", "8", "128", "1", *sizes, "yes"] in lines
    assert ["v6e:2x4", "v6e-8", "8", "8", "128", "1", "the", "compiler", "died"] in lines
    assert "Ran out of memory" in text
    (speed,) = [line for line in text.splitlines() if "3 all-reduce 102.4 MB" in line]
    assert speed.split()[:6] == ["v3:2x2", "24.7", "25.1", "277", "HBM", "76.9"]
    assert speed.endswith("3 all-reduce 102.4 MB: 2.0 ms")
    assert "v3:2x2  140.0 (" in text and "  7,314 (" in text and "36%" in text
    assert len([line for line in lines if line[:1] == ["v3:2x2"]]) == 4
    assert len([line for line in lines if line[:1] == ["v6e:2x4"]]) == 1
    assert max(map(len, text.splitlines())) <= 120
    alone = estimates.tables([estimates.row(lost)], "images")
    assert "one train step" not in alone and "the compiler died" in alone


def test_a_chip_without_a_price_has_times_and_no_dollars():
    (one,) = topology.parse_slices("tpu7x-8")
    good = Outcome(one, 1024, JOB, TRAIN, PREDICT)
    row = estimates.row(good)
    assert row["missing"] == ["price"]
    assert row["memory_available"] == 96 * 2**30  # of one of a chip's two devices
    assert row["step_seconds"] == pytest.approx(0.14)
    assert math.isnan(row["price"]) and math.isnan(row["dollars"])
    assert estimates.plain(row)["dollars"] is None
    text = estimates.tables([row], "images")
    assert "tpu7x:2x2x1: the price of its chips is not known" in text
    assert "give --chip_hour_price" in text and "nan" not in text
    priced = estimates.row(good, 3.0)
    assert priced["missing"] == [] and priced["dollars"] == pytest.approx(3 * row["chip_hours"])
    assert "not known" not in estimates.tables([priced], "images")


def test_a_stage_is_fed_or_not():
    """96 vCPUs count as 72; the chips take 12,800 examples/s, then 5,120."""
    stages = tuple(
        Stage(name, 10, lasting(seconds))
        for name, seconds in (("128 pixels", 0.08), ("224 pixels", 0.2))
    )
    rates = {"exact": 160.0, "fast": 200.0}, {"exact": 64.0, "fast": 80.0}
    job = dataclasses.replace(JOB, input_rates=rates)
    row = estimates.row(Outcome(V3, 1024, job, TRAIN, PREDICT, stages=stages))
    assert (row["input"]["hosts"], row["input"]["cpus_per_host"]) == (1, 96)
    small, large = row["input"]["stages"]
    assert small["needed"] == pytest.approx(12_800, rel=1e-6) and large["name"] == "224 pixels"
    assert small["prepared"] == pytest.approx({"exact": 11_520, "fast": 14_400})
    lines = [line.split() for line in estimates.tables([row], "images").splitlines()]
    head = ["v3:2x2", "128", "pixels", "1", "96", "12,800"]
    assert [*head, "11,520", "no", "14,400", "yes"] in lines
    head = ["v3:2x2", "224", "pixels", "1", "96", "5,120"]
    assert [*head, "4,608", "no", "5,760", "yes"] in lines
