"""scripts/bench/step.py: both steps side by side, from the compiler or from the clock."""

import json

import pytest

from engine.aot import forecast
from modes import preflight
from scripts.bench import step as bench_step


def program(cycles, temporaries):
    sizes = {"arguments": 1, "outputs": 0, "code": 1, "temporaries": temporaries}
    counts = {"flops": 3e12, "traffic": 4e10, "collectives": {}, "loops": 0, "unknown_loops": 0}
    counts["names"] = {}
    return forecast.Program(**sizes, **counts, cycles=cycles, seconds=50.0)


@pytest.fixture
def asked(monkeypatch):
    """A compiler that answers at once; returns the (slice, config) that it was asked for."""
    calls = []

    def inspect(config, place, steps):
        assert steps == ("train",)
        calls.append((place.name, config))
        outcome = forecast.Outcome(place, config.train_batch_size)
        if place.name.startswith("v6e"):
            return forecast.Outcome(place, config.train_batch_size, error="signal 11")
        plain = config.recipe["batch_norm"] == "plain"
        return forecast.Outcome(
            place, outcome.batch, train=program(188_000_000 if plain else 94_000_000, 3_000_000_000)
        )

    monkeypatch.setattr(preflight, "inspect", inspect)
    return calls


def test_estimates_are_compared_slice_by_slice(asked, capsys):
    flags = ["--tpu=v3-8,v5e-8", "--batch_per_device=16", "--set", "image_size=64"]
    assert bench_step.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:4] == ["slice", "BatchNorm", "ms (estimate)", "ratio to plain"]
    assert cells[2][:5] == ["v3:2x2", "plain", "200.0", "1.00", "3.00"]
    assert cells[3][:5] == ["v3:2x2", "gram", "100.0", "0.50", "3.00"]
    assert [row[0] for row in cells[4:]] == ["v5e:2x4"] * 2
    sizes = {(c.train_batch_size, c.recipe["image_size"]) for _, c in asked}
    assert sizes == {(128, 64)}


def test_an_error_is_a_row_and_the_exit_code(asked, capsys):
    assert bench_step.main(["--tpu=v6e-8", "--batch_norm=gram", "--json"]) == 1
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["error"] == "signal 11" and row["slice"] == "v6e:2x4" and "ms" not in row


@pytest.mark.slow
def test_times_on_the_devices_of_this_machine(capsys):
    small = {"resnet_depth": 18, "num_filters": 2, "image_size": 16, "precision": "float32"}
    flags = [f"--set={key}={value}" for key, value in small.items()]
    assert bench_step.main([*flags, "--batch_per_device=2", "--steps=1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["batch_norm"] for row in rows] == ["plain", "gram"]
    assert all(row["ms"] > 0 and not row["estimate"] for row in rows)
    assert rows[0]["ratio"] == 1
