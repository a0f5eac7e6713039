"""The hosts of a slice, and whether they prepare examples as fast as the chips take them."""

import dataclasses

import pytest

from engine.aot import forecast, hosts, topology
from engine.aot.forecast import Outcome, Stage
from tests.engine.aot.test_forecast import JOB, PREDICT, TRAIN, V3


@pytest.mark.parametrize(
    ("slice_", "count", "cpus"),
    [
        *(("v2-8", 1, 96), ("v3-8", 1, 96), ("v3-32", 4, 96), ("v4-8", 1, 240), ("v4-32", 4, 240)),
        *(("v5e-1", 1, 24), ("v5e-4", 1, 112), ("v5e-8", 1, 224), ("v5e-16", 4, 112)),
        *(("v5p-8", 1, 208), ("v5p-16", 2, 208)),
        *(("v6e-1", 1, 44), ("v6e-4", 1, 180), ("v6e-8", 1, 180), ("v6e-16", 4, 180)),
        *(("tpu7x-8", 1, 224), ("tpu7x-16", 2, 224)),
    ],
)
def test_the_machines_of_a_slice(slice_, count, cpus):
    (one,) = topology.parse(slice_)
    assert hosts.machines(one) == (count, cpus)


def test_a_stage_is_fed_or_not():
    """96 vCPUs count as 72; the chips take 12,800 examples/s, then 5,120."""
    clock = V3.chip.clock
    stages = tuple(
        Stage(name, 10, dataclasses.replace(TRAIN, cycles=round(seconds * clock)))
        for name, seconds in (("128 pixels", 0.08), ("224 pixels", 0.2))
    )
    rates = {"exact": 160.0, "fast": 200.0}, {"exact": 64.0, "fast": 80.0}
    job = dataclasses.replace(JOB, input_rates=rates)
    row = forecast.row(Outcome(V3, 1024, job, TRAIN, PREDICT, stages=stages))
    assert (row["input"]["hosts"], row["input"]["cpus_per_host"]) == (1, 96)
    small, large = row["input"]["stages"]
    assert small["needed"] == pytest.approx(12_800, rel=1e-6) and large["name"] == "224 pixels"
    assert small["prepared"] == pytest.approx({"exact": 11_520, "fast": 14_400})
    lines = [line.split() for line in forecast.tables([row], "images").splitlines()]
    head = ["v3:2x2", "128", "pixels", "1", "96", "12,800"]
    assert [*head, "11,520", "no", "14,400", "yes"] in lines
    head = ["v3:2x2", "224", "pixels", "1", "96", "5,120"]
    assert [*head, "4,608", "no", "5,760", "yes"] in lines


def test_just_enough_is_enough():
    stages = [
        {"name": name, "needed": 100.0, "prepared": {"exact": rate}}
        for name, rate in (("a", 100.0), ("", 99.0))
    ]
    row = {"slice": "v3:2x2", "input": {"hosts": 1, "cpus_per_host": 96, "stages": stages}}
    head, *lines = hosts.table([row], "images")
    assert head == ["slice", "stage", "hosts", "vCPUs each", "images/s needed", "exact"]
    assert lines == [
        ["v3:2x2", "a", "1", "96", "100", "100 yes"],
        ["v3:2x2", "all", "1", "96", "100", "99 no"],
    ]


def test_a_run_without_stages_or_without_rates():
    job = dataclasses.replace(JOB, input_rates=({"exact": 160.0},))
    row = forecast.row(Outcome(V3, 1024, job, TRAIN, PREDICT))
    (stage,) = row["input"]["stages"]
    assert stage["needed"] == row["examples_per_second"]
    assert stage["prepared"] == pytest.approx({"exact": 11_520})
    plain = forecast.row(Outcome(V3, 1024, JOB, TRAIN, PREDICT))
    assert "input" not in plain
    assert "hosts prepare" not in forecast.tables([plain], "images")
    text = forecast.tables([plain, row], "images")
    assert ["v3:2x2", "all", "1", "96", "7,400", "11,520", "yes"] in [
        line.split() for line in text.splitlines()
    ]
