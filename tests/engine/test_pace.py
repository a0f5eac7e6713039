"""How long a run takes, by a clock that programs and input turn on, and with shapes that change."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.base import BATCH_AXES
from engine import pace, sharding
from engine.plan import Programs, make_plan
from tests.benchmarks.translation import test_translators as translators

LENGTHS = (6, 12)  # of the rows of two kinds of batches


@pytest.fixture
def programs(clock) -> Any:
    """Programs that take the seconds in `takes`; 20 rows in batches of 8 have 12, 6, 6 words.

    The seconds of the batches are in `inputs`.
    """
    stub = types.SimpleNamespace(mesh=sharding.make(BATCH_AXES, 1), takes=[], inputs=[])

    def batches(*shard: int) -> Any:
        for length, seconds in zip((12, 6, 6), stub.inputs, strict=False):
            clock.seconds += seconds
            yield {"words": np.zeros((8, length), np.int32), "host_seconds": np.zeros(8)}

    def lowered(length: int) -> Any:
        def run(*arguments: Any) -> Any:
            assert arguments[-1].keys() == {"words"} and arguments[-1]["words"].shape[1] == length
            clock.seconds += stub.takes.pop(0)
            return None, None, jnp.zeros(())

        specs = {"words": jax.ShapeDtypeStruct((8, length), np.int32)}
        return specs, types.SimpleNamespace(compile=lambda: run)

    stub.settings = types.SimpleNamespace(
        train_batch_size=8, eval_batch_size=8, gradient_accumulation_steps=1
    )
    stub.benchmark = types.SimpleNamespace(
        train_batches=batches, eval_batches=batches, open=lambda split: 10, eval_rows=20
    )
    stub.lower_train = stub.lower_predict = lambda *_: [*map(lowered, LENGTHS)]
    state = types.SimpleNamespace(params=None, model_state=None, ema={})
    stub.abstract_state = stub.initial_state = lambda plan: state
    stub.abstract_totals, stub.zeros, stub.seed = lambda plan, state: None, lambda totals: int, int
    return stub


def test_a_step_counts_with_its_input_after_one_that_warms_up(programs):
    programs.takes, programs.inputs = [50, 3], [100, 7]
    plan: Any = None
    assert pace.seconds_per_step(programs, plan) == 3 + 7


def test_an_evaluation_takes_as_long_as_the_predictions_of_its_batches(programs):
    programs.takes, programs.inputs = [5], [100]
    plan: Any = None
    assert pace.seconds_per_evaluation(programs, plan) == 3 * 5


@pytest.mark.long
def test_buckets_of_sentences_are_measured(tiny_bpe, tmp_path):
    """The first two batches are of two buckets."""
    settings = translators.settings("gnmt", tiny_bpe, tmp_path)
    programs = Programs.make(settings)
    benchmark = programs.benchmark
    plan = make_plan(settings, benchmark, benchmark.open("train"))
    stream = benchmark.train_batches(8, 0, 1, 0)
    assert next(stream)["inputs"].shape != next(stream)["inputs"].shape
    assert pace.seconds_per_step(programs, plan) > 0
    assert pace.seconds_per_evaluation(programs, plan) > 0
