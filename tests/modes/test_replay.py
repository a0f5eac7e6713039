"""--replay: the very batch of a step whose loss was not finite, looked at closely; memory."""

import json
import math
from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
import run as runs
import saving
import train
from benchmarks.resnet import ResNet
from engine.checkpoint import CheckpointError
from engine.cluster import guard
from errors import RESTART, ConfigError
from modes import replay
from tests.conftest import make_tiny_config
from tests.test_train import fresh_signals, rows, state_on_disk  # noqa: F401

BAD = 5  # the step with the poisoned example; in the first epoch, in which all are different


@pytest.fixture
def poisoned(tiny_records, tmp_path, monkeypatch):
    """(config, workdir, message) of a run that met nan where one example comes again."""
    config = make_tiny_config(tiny_records, steps_per_eval="12")
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
        train.train_and_evaluate(runs.read(config, workdir))
    return config, workdir, str(caught.value), seen[BAD - 1]


@pytest.mark.long
def test_the_batch_is_named_and_replayed(poisoned, caplog):
    config, workdir, message, ids = poisoned
    assert f"step {BAD} is not finite" in message and f"--replay={BAD}" in message
    assert "checkpoint 3 is the last good one" in message and len(message.splitlines()) == 1
    with open(f"{workdir}/hosts/host-000.step-{BAD}.json") as file:
        record = json.load(file)
    assert set(record["ids"]) == ids and len(record["places"]) == 16
    assert all("train-0000" in place and "record" in place for place in record["places"])

    before = rows(workdir), state_on_disk(workdir, 3)
    with caplog.at_level("INFO", logger="tpu_suite"):
        replay.replay(runs.read(config, workdir), BAD)
    log = caplog.text
    assert f"replaying steps 4 to {BAD}" in log
    assert f"step {BAD}: the loss is NOT finite" in log and "gradients that are not finite" in log
    assert f"example {record['ids'][0]}: {record['places'][0]}" in log
    assert "parameters that are not finite" not in log
    assert rows(workdir) == before[0]
    assert state_on_disk(workdir, 3).keys() == before[1].keys()

    caplog.clear()
    with caplog.at_level("INFO", logger="tpu_suite"):
        replay.replay(runs.read(config, workdir), 3)  # its own checkpoint is too late
        replay.replay(runs.read(config, workdir), BAD - 1)
        replay.replay(runs.read(config, workdir), BAD + 1)
    assert "replaying steps 1 to 3" in caplog.text
    assert f"step {BAD - 1}: the loss is finite" in caplog.text
    assert f"step {BAD} is the first that is not finite: --replay={BAD}" in caplog.text


def test_a_replay_needs_a_run(tiny_records, tmp_path):
    with pytest.raises(CheckpointError, match="is --workdir right"):
        replay.replay(runs.read(make_tiny_config(tiny_records), str(tmp_path / "typo")), 3)
    assert not (tmp_path / "typo").exists()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="--replay=13: the run has 12 steps"):
        replay.replay(runs.read(make_tiny_config(tiny_records), str(tmp_path)), 13)


@pytest.mark.slow
def test_what_a_replay_computes_is_what_the_run_computed(tiny_records, tmp_path, caplog):
    config = make_tiny_config(tiny_records, log_step_count_steps="1")
    train.train_and_evaluate(runs.read(config, str(tmp_path)))
    expected = {r["step"]: r["loss"] for r in rows(str(tmp_path)) if r["split"] == "train"}
    with caplog.at_level("INFO", logger="tpu_suite"):
        replay.replay(runs.read(config, str(tmp_path)), 12)
    (loss,) = [text.split("loss: ")[1] for text in caplog.messages if text.startswith("loss: ")]
    np.testing.assert_allclose(float(loss), expected[12], rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.array([1.5, -2, 0.25]), "from -2 to 1.5"),
        (np.array([1.5, math.nan, 0.25, math.inf]), "from 0.25 to 1.5, 2 not finite"),
        (np.array([math.nan, -math.inf]), "nothing finite, 2 not finite"),
        (np.array([7, 3]), "from 3 to 7"),
    ],
)
def test_the_range_of_a_batch(values, text):
    assert replay._range(values) == text


def test_arrays_are_named_where_they_are_not_finite_and_where_they_are_largest():
    lines, nan = [], jax.numpy.float32([math.nan, 9])
    tree = {"a": jax.numpy.float32([0.5, -0.75]), "b": {"c": jax.numpy.float32([0.25]), "d": nan}}
    replay._describe_arrays(lines.append, "gradients", tree)
    assert lines == [
        "gradients that are not finite: b/d",
        "largest of the finite gradients: 0.75 in a",
    ]
    lines.clear()
    replay._describe_arrays(lines.append, "gradients", {"b": nan})
    assert lines[1:] == ["largest of the finite gradients: nan in none"]


@pytest.mark.long
def test_full_memory_saves_and_stops(tiny_records, tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "_MEMORY_PERIOD", 0.0)
    looks = iter(range(1000))
    monkeypatch.setattr(guard, "memory_used", lambda: 0.99 if next(looks) >= 4 else 0.1)
    config = make_tiny_config(tiny_records)
    with pytest.raises(guard.MemoryFull, match="memory is 99% full, more than") as caught:
        train.train_and_evaluate(runs.read(config, str(tmp_path)))
    assert caught.value.code == RESTART
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == 5 and state_on_disk(str(tmp_path), saved)
