"""--replay=STEP: trains again up to a step and prints the batch, the loss and the gradients."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from etils import epath

import run as runs
from engine import compiler
from engine.checkpoint import Checkpointer
from engine.cluster import preemption, processes, watchdog
from engine.mesh import Feed
from engine.step import Compiled, TrainState, make_gradients
from errors import CheckpointError, ConfigError, some
from ops.trees import by_name
from run import Plan, Settings
from start import Run, first_state, restore

_NAMED = 8  # examples and arrays that a message names


def replay(settings: Settings, step: int) -> None:
    """Trains again up to `step` and prints that step's batch, loss and gradients.

    The replay begins at the newest checkpoint before the step, so that the arrays and the batch
    are those of the run. It saves nothing.

    Args:
      settings: the settings of the run.
      step: counted from 1.

    Raises:
      UserError: a mistake of the user's.
    """
    folder = epath.Path(settings.workdir) / "checkpoints"
    if not folder.exists():  # a mistyped folder must not be created
        raise CheckpointError(f"no checkpoint in {folder}; is --workdir right?")
    run = Run.open(settings)
    with run.watched():
        count = processes.first_process_first(lambda: run.benchmark.num_examples("train"))
        plan = runs.plan(settings, run.benchmark, count)
        if step > plan.recipe.total_steps:
            raise ConfigError(f"--replay={step}: the run has {plan.recipe.total_steps:,} steps")
        state, batch = _state_before(run, plan, step)
        _describe_step(run, plan, state, batch, step)


def _state_before(run: Run, plan: Plan, step: int) -> tuple[TrainState, Any]:
    """The state before `step`, and the batch of the step."""
    settings, programs, recipe = run.settings, run.programs, plan.recipe
    checkpoints = Checkpointer(run.checkpoints_dir, keep=settings.keep_checkpoints, best=None)
    abstract = programs.abstract_state(recipe)
    abstract_totals = programs.abstract_totals(abstract)
    totals = programs.zeros(abstract_totals)()
    first = max([saved for saved in checkpoints.steps() if saved < step], default=0)
    if first:
        state, _ = restore(checkpoints, first, abstract, abstract_totals)
    else:
        state, _ = first_state(run, plan)
    run.say(f"replaying steps {first + 1} to {step}")
    train_step = Compiled(programs.lower_train(recipe, abstract, abstract_totals))
    seed = programs.seed(recipe)
    shard = jax.process_index(), jax.process_count()
    batches = run.benchmark.train_batches(settings.train_batch_size, *shard, first)
    feed = iter(Feed(batches, run.mesh))
    for number in range(first + 1, step):
        watchdog.doing("replaying", number)
        preemption.raise_if_requested()
        state, totals, _ = train_step(seed, state, totals, next(feed))
    if bad := int(totals["bad_step"]):
        run.say(f"step {bad} is the first that is not finite: --replay={bad}")
    return state, next(feed)


def _describe_step(run: Run, plan: Plan, state: TrainState, batch: Any, step: int) -> None:
    """Prints the ranges of the batch, the loss, the gradients and the parameters."""
    say, recipe = run.say, plan.recipe
    for name, values in sorted(batch.items()):
        local = np.concatenate([np.asarray(s.data) for s in values.addressable_shards])
        say(f"batch {name}: {values.dtype}{list(values.shape)}, {_range(local)}")
    if "id" in batch:
        ids = np.concatenate([np.asarray(s.data) for s in batch["id"].addressable_shards]).tolist()
        locations = run.benchmark.describe(ids[:_NAMED])
        for example, location in zip(ids, locations, strict=False):
            say(f"  example {example}: {location}")
    key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
    gradients_of = make_gradients(
        run.benchmark.loss, run.mesh, recipe.accumulation, recipe.device_clip, recipe.sum_dtype
    )
    compute = jax.jit(gradients_of, compiler_options=compiler.options(run.mesh))
    arguments = state.params, state.model_state, batch, key
    gradients, sums, model_state = compute(*arguments)
    for name, (total, weight) in sorted(sums.items()):
        mean = float(total) / float(weight) if float(weight) else math.nan
        say(f"{name}: {mean:.6g}")
    groups = {"parameters": state.params, "gradients": gradients, "statistics": model_state}
    for name, tree in groups.items():
        _describe_arrays(say, name, tree)
    verdict = math.isfinite(float(sums["loss"][0]))
    say(f"step {step}: the loss {'is finite' if verdict else 'is NOT finite'}")


def _describe_arrays(say: Any, name: str, tree: Any) -> None:
    """Prints which arrays of a tree are not finite, and the largest finite value."""
    arrays = {name: np.asarray(x.addressable_data(0)) for name, x in by_name(tree).items()}
    bad = [path for path, x in arrays.items() if not np.isfinite(x).all()]
    if bad:
        say(f"{name} that are not finite: {some(bad, _NAMED)}")
    finite = [
        (float(np.abs(x).max(initial=0)), path) for path, x in arrays.items() if path not in bad
    ]
    largest, path = max(finite, default=(math.nan, "none"))
    say(f"largest of the finite {name}: {largest:.6g} in {path}")


def _range(x: np.ndarray) -> str:
    finite = x[np.isfinite(x)] if x.dtype.kind == "f" else x
    text = f"from {finite.min():g} to {finite.max():g}" if finite.size else "nothing finite"
    return text + (f", {x.size - finite.size} not finite" if finite.size < x.size else "")
