"""scripts/bench/step.py: both steps side by side, from the compiler or from the clock."""

import dataclasses
import importlib.util
import itertools
import json
import math
import types

import jax
import pytest

from benchmarks.base import BATCH_AXES
from commands import preflight
from common.errors import ConfigError
from engine import mesh as meshes
from engine.aot import forecast
from engine.run import Programs, read_settings
from scripts.bench import batches
from scripts.bench import step as bench_step
from scripts.bench.peers import on_torch
from tests.helpers import torch_trees


def program(cycles, temporaries):
    sizes = {"arguments": 1, "outputs": 0, "code": 1, "temporaries": temporaries}
    counts = {"flops": 3e12, "traffic": 4e10, "collectives": {}, "loops": 0, "unknown_loops": 0}
    counts["names"] = {}
    return forecast.Program(**sizes, **counts, cycles=cycles, seconds=50.0)


@pytest.fixture
def asked(monkeypatch):
    """A compiler that answers at once; returns the (slice, config) that it was asked for."""
    calls = []

    def inspect(config, place, steps, worker):
        assert steps == ("train",)
        calls.append((place.name, config))
        if worker == "scripts.bench.peers.step":
            peer = dataclasses.replace(program(125_333_333, 4_000_000_000), moved=40_000_000_000)
            return forecast.Outcome(place, config.train_batch_size, train=peer)
        outcome = forecast.Outcome(place, config.train_batch_size)
        if place.name.startswith("v6e"):
            return forecast.Outcome(place, config.train_batch_size, error="signal 11")
        plain = config.config.get("batch_norm") == "plain"
        outcome = forecast.Outcome(
            place, outcome.batch, train=program(188_000_000 if plain else 94_000_000, 3_000_000_000)
        )
        assert outcome.train
        return dataclasses.replace(
            outcome, train=dataclasses.replace(outcome.train, moved=10_000_000_000)
        )

    monkeypatch.setattr(preflight, "inspect", inspect)
    return calls


def test_estimates_are_compared_slice_by_slice(asked, capsys):
    """A ratio is to the plain step of the same slice; v6e does not compile."""
    assert bench_step.main(["--tpu=v3-8,v6e-8,v5e-8", "--json", "--batch_norm=gram,plain"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("ratio") for row in rows] == [None, 1, None, None, None, 1]
    assert (rows[2]["slice"], rows[2]["error"]) == ("v6e:2x4", "signal 11")
    asked.clear()
    flags = ["--tpu=v3-8,v5e-8", "--batch_per_device=16", "--set", "image_size=64"]
    assert bench_step.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:4] == ["slice", "BatchNorm", "ms (estimate)", "ratio to plain"]
    assert cells[2][:5] == ["v3:2x2", "plain", "200.0", "1.00", "10.0"]
    assert cells[3][:5] == ["v3:2x2", "gram", "100.0", "0.50", "10.0"]
    assert [row[0] for row in cells[4:]] == ["v5e:2x4"] * 2
    sizes = {(c.train_batch_size, c.config["image_size"]) for _, c in asked}
    assert sizes == {(128, 64)}


def test_a_peer_is_compared_slice_by_slice(asked, capsys):
    flags = ["--tpu=v3-8", "--peer", "--config=configs/mlperf_ssd.py:2048", "--batch_per_device=16"]
    assert bench_step.main([*flags, "--json"]) == 0
    peer, ours = map(json.loads, capsys.readouterr().out.splitlines())
    assert (peer["step"], ours["step"]) == ("peer", "ours")
    assert peer["moved"] == 40e9 and ours["cycles"] == 94_000_000
    assert ours["ratio_to_peer"] == pytest.approx(0.75) and ours["temporaries_ratio"] == 0.75
    assert ours["moved_ratio"] == 0.25 and "moved_ratio" not in peer
    assert {(c.train_batch_size, c.config["base_learning_rate"]) for _, c in asked} == {
        (128, 0.00457)
    }
    assert bench_step.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[2:6]] == ["ours", "100.0", "0.750", "10.0"]


def test_a_peer_needs_a_benchmark_that_has_one(asked):
    with pytest.raises(ConfigError, match="ncf has none"):
        bench_step.main(["--peer", "--tpu=v3-8", "--config=ncf"])
    assert not asked
    with pytest.raises(ConfigError, match="ncf has none"):
        bench_step.main(["--peer", "--config=ncf"])


@pytest.mark.parametrize("analysis", [{"bytes accessed": 5e9, "flops": 7e12}, None])
def test_the_median_of_the_steps_without_the_first_two(analysis, monkeypatch):
    """The five steps take 9, 8, 3, 1 and 2 seconds."""
    ends = itertools.accumulate([10, 9, 1, 8, 1, 3, 1, 1, 1, 2])
    compiled = types.SimpleNamespace(
        memory_analysis=lambda: types.SimpleNamespace(temp_size_in_bytes=3e9),
        cost_analysis=lambda: analysis,
    )
    monkeypatch.setattr(bench_step, "make_step", lambda *_: (compiled, 4, lambda: None))
    clock = types.SimpleNamespace(monotonic=lambda: next(ends))
    monkeypatch.setattr(bench_step, "time", clock)
    config = bench_step.config_of(bench_step._flags(["--set=image_size=32"]), "plain", 8)
    assert bench_step.timed(config, 3) == {
        "ms": 2000,
        "temporaries": 3e9,
        "compile_seconds": 4,
        "traffic": analysis and 5e9,
        "flops": analysis and 7e12,
    }


def test_the_table_has_the_units_of_its_titles():
    row = {"slice": "cpu", "batch_norm": "gram", "estimate": False, "ms": 12.345}
    row |= {"ratio": 0.5, "temporaries": 3.456e9, "traffic": 40.26e9, "flops": 3.256e12}
    failed = {"slice": "cpu", "batch_norm": "plain", "estimate": False, "error": "no"}
    head, _, *lines = bench_step.table([row, {**row, "compile_seconds": 50.4}, failed]).splitlines()
    assert "| temporaries, GB | bytes accessed, GB | TFLOP | compile, s |" in head
    assert lines[0] == "| cpu | gram | 12.3 | 0.50 | 3.46 | 40.3 | 3.26 |  |  |"
    assert "| 50 |" in lines[1] and lines[2].endswith("| no |")


def test_without_pytorch_one_line_says_how_to_get_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "torch" else find(n))
    with pytest.raises(ConfigError, match="not installed: pip install torch"):
        bench_step.main(["--peer=torch", "--config=configs/digits.py"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "nokey=3"], "--set nokey=3: the config has no key"),
        (["--set", "seed=x"], "--set seed=x: the value must have the type of 0"),
        (["--peer=torch", "--set=optimizer=lars"], "config.optimizer='lars': .* only 'sgd'"),
        (["--peer=torch", "--set=blur_pool=True"], "config.blur_pool=True: .* only False"),
    ],
)
def test_refusals(flags, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    with pytest.raises(ConfigError, match=message):
        bench_step.main(flags)


def test_two_steps_alternate_and_the_least_of_each_counts(monkeypatch):
    """Two rounds warm up; ours then take 3 and 2 s, theirs 1 and 5."""
    seconds = iter([9, 9, 0, 9, 3, 1, 2, 5])
    now, calls = [0.0], []

    def step(name):
        calls.append(name)
        now[0] += next(seconds)

    monkeypatch.setattr(bench_step, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    found = bench_step.least(lambda: step("ours"), lambda: step("theirs"), 2)
    assert found == (2000, 1000) and calls == ["ours", "theirs"] * 4


SIZES = {
    "fake_imagenet": {"num_filters": 4, "image_size": 32},
    "phrases": {"width": 16, "mlp_width": 32, "vocabulary_size": 90, "row_length": 16},
    "gnmt_phrases": {"width": 16, "vocabulary_size": 90, "bucket_lengths": (8, 12)},
    "ncf": {"num_users": 40, "num_items": 30, "num_ratings": 400},
    "ssd_digits": {"num_filters": 4},
    "mask_rcnn_digits": {"num_filters": 4, "pyramid_levels": (3, 4, 5), "freeze": "stem"},
}


@pytest.mark.parity
@pytest.mark.parametrize("name", SIZES)
def test_a_step_in_pytorch_learns_our_batch_with_our_parameters(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    changes = [f"--set={key}={value}" for key, value in SIZES[name].items()]
    flags = [f"--config={name}", *changes, "--set=data_dir=", "--set=precision=float32"]
    flags = flags[: -1 if name == "ncf" else None]
    config = bench_step.config_of(bench_step._flags([*flags, "--batch_per_device=2"]), "", 1)
    benchmark = read_settings(config).load_benchmark("")
    made = Programs(read_settings(config), benchmark, meshes.make(BATCH_AXES, 1))
    step = on_torch.make_step(torch, made, batches.first(made))
    losses = [step() for _ in range(20)]
    assert losses[-1] < losses[0]
    shapes = jax.eval_shape(benchmark.init, jax.random.key(0))[0]
    network = on_torch.NETWORKS[config.benchmark](torch, benchmark)
    if config.benchmark in ("transformer", "gnmt"):  # whose tables have unused rows
        tree = getattr(torch_trees, config.benchmark)(torch, network)
    else:
        tree = list(network.parameters())
    assert count(tree) == count(shapes)


@pytest.mark.parametrize("peer", ["plain", "torch"])
def test_a_peer_is_timed_in_turn_with_ours(peer, capsys):
    if peer == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    sizes = {"width": 16, "vocabulary_size": 90, "bucket_lengths": (8,)}
    sizes |= {"num_encoder_layers": 2, "num_decoder_layers": 2}
    changes = [f"--set={key}={value}" for key, value in sizes.items()]
    flags = [f"--peer={peer}", "--config=gnmt_phrases", "--batch_per_device=1", "--steps=1"]
    assert bench_step.main([*flags, *changes, "--set=data_dir=", "--json"]) == 0
    theirs, ours = map(json.loads, capsys.readouterr().out.splitlines())
    assert theirs["step"] == {"plain": "flax", "torch": "PyTorch"}[peer]
    assert ours["ratio_to_peer"] == pytest.approx(ours["ms"] / theirs["ms"])
    assert ours["batch"] == jax.device_count() and not ours["estimate"]


def count(tree):
    """The number of values in a tree of arrays or tensors."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_times_on_the_devices_of_this_machine(capsys):
    small = {"resnet_depth": 18, "num_filters": 2, "image_size": 16, "precision": "float32"}
    flags = [f"--set={key}={value}" for key, value in small.items()]
    assert bench_step.main([*flags, "--batch_per_device=2", "--steps=1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["batch_norm"] for row in rows] == ["plain", "gram"]
    assert all(row["ms"] > 0 and not row["estimate"] for row in rows)
    assert rows[0]["ratio"] == 1
