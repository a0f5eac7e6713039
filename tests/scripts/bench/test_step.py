"""scripts/bench/step.py: both steps side by side, from the compiler or from the clock."""

import dataclasses
import importlib.util
import json
import math
import types

import jax
import pytest

from benchmarks.base import BATCH_AXES
from commands import preflight
from common.errors import ConfigError
from engine import sharding
from engine.forecast import estimates
from engine.plan import Programs, read_settings
from scripts.bench import step as bench_step
from scripts.bench.peers import on_torch
from tests.engine.forecast.test_estimates import TRAIN, operation
from tests.helpers import torch_trees


def program(seconds, moved, temporaries):
    operations = (operation(seconds, moved=moved),)
    sizes = {"operations": operations, "temporaries": temporaries, "compile_seconds": 50.0}
    return dataclasses.replace(TRAIN, **sizes)


@pytest.fixture
def asked(monkeypatch):
    """A compiler that answers at once; returns the (slice, config) that it was asked for."""
    calls = []

    def inspect(config, place, steps, worker):
        assert steps == ("train",)
        calls.append((place.name, config))
        outcome = estimates.Outcome(place, config.train_batch_size)
        if place.name.startswith("v6e"):
            return dataclasses.replace(outcome, error="signal 11")
        if worker == "scripts.bench.peers.step":
            return dataclasses.replace(outcome, train=program(0.4 / 3, 40e9, 4e9))
        assert worker == "commands.preflight"
        return dataclasses.replace(outcome, train=program(0.1, 10e9, 3e9))

    monkeypatch.setattr(preflight, "inspect", inspect)
    return calls


def test_a_peer_is_compared_slice_by_slice(asked, capsys):
    """v6e does not compile."""
    flags = ["--peer", "--config=configs/mlperf_ssd.py:2048", "--batch_per_device=16"]
    assert bench_step.main([*flags, "--tpu=v3-8,v6e-8", "--json"]) == 1
    peer, ours, *failed = map(json.loads, capsys.readouterr().out.splitlines())
    assert (peer["step"], ours["step"]) == ("flax", "ours")
    assert peer["moved"] == 40e9 and "ratio" not in peer
    assert ours["ratio"] == pytest.approx(0.75) and ours["batch_per_device"] == 16
    assert [row["error"] for row in failed] == ["signal 11"] * 2
    assert {(c.train_batch_size, c.config["base_learning_rate"]) for _, c in asked} == {
        (128, 0.00457)
    }
    assert bench_step.main([*flags, "--tpu=v3-8"]) == 0
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert cells[0][:5] == [
        "where",
        "step",
        "batch per device",
        "ms (estimate)",
        "ratio to the baseline",
    ]
    assert cells[2] == ["v3:2x2", "flax", "16", "133.3", "", "40.0", "4.00", "50"]
    assert cells[3] == ["v3:2x2", "ours", "16", "100.0", "0.750", "10.0", "3.00", "50"]


def test_our_step_alone_with_other_keys(asked, capsys):
    flags = ["--tpu=v3-8", "--batch_per_device=16", "--set", "image_size=64"]
    assert bench_step.main([*flags, "--set=batch_norm=plain", "--json"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["step"] == "ours" and "ratio" not in row
    ((_, config),) = asked
    assert (config.train_batch_size, config.config["image_size"]) == (128, 64)
    assert config.config["batch_norm"] == "plain"


def test_a_peer_needs_a_benchmark_that_has_one(asked):
    with pytest.raises(ConfigError, match="ncf has none"):
        bench_step.main(["--peer", "--tpu=v3-8", "--config=ncf"])
    assert not asked
    with pytest.raises(ConfigError, match="ncf has none"):
        bench_step.main(["--peer", "--config=ncf"])


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
    found = bench_step.least([lambda: step("ours"), lambda: step("theirs")], 2)
    assert found == [2000, 1000] and calls == ["ours", "theirs"] * 4


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
    pytest.importorskip("torch", reason="PyTorch is not installed")
    changes = [f"--set={key}={value}" for key, value in SIZES[name].items()]
    flags = [f"--config={name}", *changes, "--set=data_dir=", "--set=precision=float32"]
    flags = flags[: -1 if name == "ncf" else None]
    config = bench_step.config_of(bench_step._flags([*flags, "--batch_per_device=2"]), 1)
    benchmark = read_settings(config).load_benchmark("")
    made = Programs(read_settings(config), benchmark, sharding.make(BATCH_AXES, 1))
    networks = on_torch.load(config)
    step = on_torch.make_step(networks, made, bench_step.first_batch(made))
    losses = [step() for _ in range(20)]
    assert losses[-1] < losses[0]
    shapes = jax.eval_shape(benchmark.init, jax.random.key(0))[0]
    network = networks.NETWORKS[config.benchmark](benchmark).module
    if config.benchmark in ("transformer", "gnmt"):  # whose tables have unused rows
        tree = getattr(torch_trees, config.benchmark)(networks.torch, network)
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
    assert ours["ratio"] == pytest.approx(ours["ms"] / theirs["ms"])
    assert ours["batch_per_device"] == 1 and not ours["estimate"]
    assert ("an LSTM for each layer" in theirs.get("differs", "")) == (peer == "torch")


def count(tree):
    """The number of values in a tree of arrays or tensors."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
