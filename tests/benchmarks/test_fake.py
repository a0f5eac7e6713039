"""config.dataset='fake': every benchmark trains on one random batch, without data."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
import train
from benchmarks.uses import Sentences
from common.errors import ConfigError
from engine.plan import read_settings
from tests.benchmarks.test_benchmarks import ROWS, TINY

SCORED = ("ncf", "resnet")  # whose batches have the truth
FAKED = sorted(set(TINY) - {"languages"})


def config_of(name: str, **changes: Any) -> Any:
    config = importlib.import_module(TINY[name].config).get_config()
    config.update({**TINY[name].overrides, "data_dir": "/nowhere", "dataset": "fake", **changes})
    return config.lock()


def batch_of(name: str, shard: int = 0, shards: int = 1, step: int = 0, **changes: Any) -> Any:
    benchmark = benchmarks.load(config_of(name, **changes), "/nowhere")
    return next(benchmark.train_batches(ROWS, shard, shards, step))


@pytest.mark.parametrize("name", FAKED)
def test_a_random_batch_is_one_of_the_benchmarks(name):
    config = config_of(name)
    assert not benchmarks.needs_data_dir(config)
    benchmark = benchmarks.load(config, "/nowhere")
    stream = benchmark.train_batches(ROWS, 0, 1, 0)
    batch = next(stream)
    assert next(stream) is batch  # so the devices keep it
    kinds = benchmark.batch_spec("train", ROWS)
    shapes = {key: (x.shape, x.dtype) for key, x in batch.items()}
    assert shapes in [{key: (x.shape, x.dtype) for key, x in kind.items()} for kind in kinds]
    assert benchmark.train_ids(ROWS, 3) == batch["id"].tolist() == [*range(ROWS)]
    halves = [batch_of(name, shard, 2, step=5) for shard in (0, 1)]
    other = batch_of(name, seed=1)
    for key, x in batch.items():
        np.testing.assert_array_equal(x, np.concatenate([half[key] for half in halves]))
    assert any(np.any(x != other[key]) for key, x in batch.items())
    variables = jax.eval_shape(benchmark.init, jax.random.key(0))
    terms = jax.eval_shape(benchmark.loss, *variables, batch, jax.random.key(0))[0]
    assert all(total.shape == () for total, _ in terms.values())
    assert benchmark.num_examples("train") == benchmark.nominal_examples("train") > 0
    assert benchmark.check("train") == benchmark.run_notes(8, False) == [] != benchmark.groups
    assert all(size > 0 for size in benchmark.host_bytes("train", ROWS, 2).values())


@pytest.mark.parametrize("name", FAKED)
def test_only_what_the_batch_answers_is_scored(name):
    benchmark = benchmarks.load(config_of(name), "/nowhere")
    if name in SCORED:
        batches = [*benchmark.eval_batches(8, 0, 1)]
        assert sum(batch["mask"].sum() for batch in batches) == benchmark.num_examples("eval")
        assert all(map(np.array_equal, batches[0].values(), batches[1].values()))
        total = benchmark.num_examples("eval")
        masks = [[b["mask"] for b in benchmark.eval_batches(24, i, 3)] for i in range(3)]
        real = (np.arange(-(-total // 24) * 24) < total).reshape(-1, 3, 8)
        np.testing.assert_array_equal(np.swapaxes(masks, 0, 1), real)
        return
    with pytest.raises(ConfigError, match="dataset='fake' has no true answers .*--mode=train"):
        benchmark.open("eval")


def test_a_benchmark_may_draw_none():
    with pytest.raises(ConfigError, match="^config.dataset='fake': this benchmark draws no"):
        benchmarks.load(config_of("languages"), "").open("train")


def test_a_run_learns_its_batch_and_what_it_has_learnt_is_of_no_use(tmp_path):
    config = config_of("transformer", train_steps="6", log_step_count_steps="1")
    train.train_and_evaluate(read_settings(config, str(tmp_path)), evaluating=False)
    benchmark = benchmarks.load(config, str(tmp_path))
    with pytest.raises(ConfigError, match="trained with config.dataset='fake', so it"):
        benchmark.uses.check_files({}, str(tmp_path))
    assert not benchmark.uses.exhibits(iter([])) and not isinstance(benchmark.uses, Sentences)


@pytest.mark.parametrize("name", ["ssd", "gnmt", "ncf"])
def test_another_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"config\.dataset='fack'"):
        benchmarks.load(config_of(name, dataset="fack"), "")
