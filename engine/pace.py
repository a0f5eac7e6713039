"""Measures how long a run takes on these devices, before it begins.

Each function compiles one program, which the run then finds in the cache. All processes of a run
call it together.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from engine import sharding
from engine.fit import Fit
from engine.plan import Plan, Programs, evaluated_weights
from engine.sharding import Feed
from engine.step import CompiledStep


def seconds_per_step(programs: Programs, plan: Plan) -> float:
    """The seconds of a train step and of its input, after a step that warms up.

    Of several shapes of batches, it is the first batch's step. The plan opened the training data.
    """
    size, shard = programs.settings.train_batch_size, (jax.process_index(), jax.process_count())
    batches = iter(Feed(programs.benchmark.train_batches(size, *shard, 0), programs.mesh, ahead=0))
    step = make_step(programs, plan, next(batches))
    step()
    started = time.monotonic()
    next(batches)  # measures the input; this batch may have another shape
    step()
    return time.monotonic() - started


def seconds_per_evaluation(programs: Programs, plan: Plan) -> float:
    """The seconds of the predictions for all evaluation examples; their score is not in it.

    It is the time of the first batch times the number of batches. Opens the evaluation data.
    """
    benchmark, size = programs.benchmark, programs.settings.eval_batch_size
    benchmark.open("eval")
    rows, shard = benchmark.eval_rows, (jax.process_index(), jax.process_count())

    def first(size: int) -> Any:
        return next(iter(Feed(benchmark.eval_batches(size, *shard), programs.mesh, ahead=0)))

    batch, abstract = first(size), programs.abstract_state(plan)
    _, predict = Fit.of_run(programs, abstract, "train", "eval").predict(
        lambda size: CompiledStep(alike(programs.lower_predict(abstract, size), batch))
    )
    if predict.batch_size < size:
        batch = first(predict.batch_size)
    state = programs.initial_state(plan)
    started = time.monotonic()
    jax.block_until_ready(predict(*evaluated_weights(state), batch))
    return -(-rows // predict.batch_size) * (time.monotonic() - started)


def make_step(programs: Programs, plan: Plan, batch: Mapping[str, Any]) -> Callable[[], None]:
    """A function that takes a train step on a global batch, each time the same, and waits for it.

    `batch` is on the host or on the devices, of one of the shapes that the benchmark declares.
    """
    abstract = programs.abstract_state(plan)
    abstract_totals = programs.abstract_totals(plan, abstract)
    _, compiled = Fit.of_run(programs, abstract, "train").train(
        lambda cut: CompiledStep(alike(cut.lower_train(plan, abstract, abstract_totals), batch))
    )
    seed = programs.seed()
    state, totals = programs.initial_state(plan), programs.zeros(abstract_totals)()
    arrays = jax.device_put(batch, sharding.batch_sharding(programs.mesh))

    def step() -> None:
        nonlocal state, totals
        state, totals, loss = compiled(seed, state, totals, arrays)
        loss.block_until_ready()

    return step


def alike(lowered: Iterable[Any], batch: Mapping[str, Any]) -> list[Any]:
    """The program for batches of the kind of `batch`, of any size, out of [(batch, program), ...].

    The others would take time to compile.
    """
    shapes = {name: x.shape[1:] for name, x in batch.items()}
    return [
        (specs, program)
        for specs, program in lowered
        if all(x.shape[1:] == shapes[name] for name, x in specs.items())
    ]
