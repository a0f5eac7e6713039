"""A run that must stop early: a step whose loss is not finite is named, and so is full memory."""

import json
import math
import os
from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
import train
from benchmarks.resnet import ResNet
from common.errors import RESTART
from engine import saving
from engine.cluster import guard
from engine.run import read_settings
from tests.conftest import make_tiny_config
from tests.test_train import fresh_signals, state_on_disk  # noqa: F401

BAD = 5  # the step with the poisoned example; in the first epoch, in which all are different


@pytest.mark.long
def test_the_batch_of_a_step_that_is_not_finite_is_named(tiny_records, tmp_path, monkeypatch):
    """The loss is nan wherever one example comes; the newest checkpoint is good."""
    config = make_tiny_config(tiny_records, steps_per_eval="12", steps_per_checkpoint="1")
    stream = ResNet.train_batches
    benchmark: Any = benchmarks.load(config, str(tmp_path / "index"))
    batches = stream(benchmark, 16, 0, 1, 0)
    seen = [set(next(batches)["id"].tolist()) for _ in range(BAD)]
    (example, *_) = sorted(seen[BAD - 1] - set().union(*seen[: BAD - 1]))
    loss = ResNet.loss

    def poison(self, params, model_state, batch, rng):
        terms, metrics, state = loss(self, params, model_state, batch, rng)
        bad = jax.numpy.where((batch["id"] == example).any(), math.nan, 1.0)
        return {k: (v * bad, w) for k, (v, w) in terms.items()}, metrics, state

    monkeypatch.setattr(ResNet, "loss", poison)
    workdir = str(tmp_path / "run")
    with pytest.raises(saving.Diverged) as caught:
        train.train_and_evaluate(read_settings(config, workdir))
    message = str(caught.value)
    assert f"step {BAD} is not finite (nan or inf), its examples are " in message
    assert "checkpoint 4 is the last good one" in message and len(message.splitlines()) == 1
    assert max(int(step) for step in os.listdir(f"{workdir}/checkpoints")) == 4
    for name, value in state_on_disk(workdir, 4).items():
        assert np.isfinite(value).all(), name
    with open(f"{workdir}/hosts/host-000.step-{BAD}.json") as file:
        record = json.load(file)
    assert set(record["ids"]) == seen[BAD - 1] and len(record["places"]) == 16
    assert all("train-0000" in place and "record" in place for place in record["places"])


@pytest.mark.long
def test_full_memory_saves_and_stops(tiny_records, tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "_MEMORY_PERIOD", 0.0)
    looks = iter(range(1000))
    monkeypatch.setattr(guard, "memory_used", lambda: 0.99 if next(looks) >= 4 else 0.1)
    config = make_tiny_config(tiny_records)
    with pytest.raises(guard.MemoryFull, match="memory is 99% full, more than") as caught:
        train.train_and_evaluate(read_settings(config, str(tmp_path)))
    assert caught.value.code == RESTART
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == 5 and state_on_disk(str(tmp_path), saved)
