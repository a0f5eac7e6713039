"""A loss that is not finite: what to say of it, and --replay=STEP, which looks closely."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
import numpy as np
from etils import epath

from engine.checkpoint import Checkpointer, CheckpointError
from engine.cluster import preemption, processes, watchdog
from engine.cluster.guard import start_watchdog
from engine.mesh import Feed
from engine.step import Compiled, TrainState, make_gradients
from evaluate import Setup, make_recipe, restore, waiting

_SHOWN = 8  # examples and arrays named


def replay(config: Any, workdir: str, step: int) -> None:
    """Trains up to `step` once more and looks closely at that step; nothing is saved.

    It begins at the newest checkpoint before the step, so the arrays and the batch are those that
    the run had.

    Args:
      config: the configuration of the run.
      workdir: the run's workdir.
      step: counted from 1.

    Raises:
      USER_ERRORS: something that the person can mend; the message says what.
    """
    folder = epath.Path(workdir) / "checkpoints"
    if not folder.exists():  # before anything is made in a mistyped place
        raise CheckpointError(f"no checkpoint in {folder}; is --workdir right?")
    setup = Setup.make(config, workdir)
    watched = start_watchdog(config.watchdog_seconds, setup.log, waiting, lambda: "nothing to save")
    with contextlib.closing(watched):
        _replay(setup, str(folder), step)


def _replay(setup: Setup, folder: str, step: int) -> None:
    config = setup.config
    checkpoints = Checkpointer(folder, keep=config.keep_checkpoints, best=None)
    processes.first_process_first(lambda: setup.benchmark.num_train_examples)
    recipe = make_recipe(config, setup.benchmark.num_train_examples)
    abstract = setup.state(recipe)
    totals = setup.totals(abstract)
    before = [s for s in checkpoints.steps() if s < step]
    sums = setup.zeros(totals)()
    if before:
        state, _ = restore(checkpoints, before[-1], abstract, totals)
    else:
        state = setup.fresh(recipe)
    begun = before[-1] if before else 0
    setup.log_line(f"replaying steps {begun + 1} to {step}")
    train_step = Compiled(setup.lower_train(recipe, abstract))
    place = jax.process_index(), jax.process_count()
    feed = Feed(setup.benchmark.train_batches(config.train_batch_size, *place, begun), setup.mesh)
    batches = iter(feed)
    for number in range(begun + 1, step):
        watchdog.doing("replaying", number)
        preemption.raise_if_requested()
        state, sums, _ = train_step(state, sums, next(batches))
    if bad := int(sums["bad_step"]):
        setup.log_line(f"step {bad} is the first that is not finite: --replay={bad}")
    _look(setup, recipe, state, next(batches), step)


def _look(setup: Setup, recipe: Any, state: TrainState, batch: Any, step: int) -> None:
    """Says what goes into a step and what comes out."""
    say = setup.log_line
    for name, values in sorted(batch.items()):
        local = np.concatenate([np.asarray(s.data) for s in values.addressable_shards])
        say(f"batch {name}: {values.dtype}{list(values.shape)}, {_range(local)}")
    if "id" in batch:
        ids = np.concatenate([np.asarray(s.data) for s in batch["id"].addressable_shards]).tolist()
        for example, where in list(zip(ids, setup.benchmark.places(ids), strict=True))[:_SHOWN]:
            say(f"  example {example}: {where}")
    key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
    compute = jax.jit(make_gradients(setup.benchmark.loss, setup.mesh, recipe.accumulation))
    gradients, sums, model_state = compute(state.params, state.model_state, batch, key)
    for name, (total, weight) in sorted(sums.items()):
        say(f"{name}: {float(total) / float(weight):.6g}")
    groups = {"parameters": state.params, "gradients": gradients, "statistics": model_state}
    for what, tree in groups.items():
        rows = [
            (
                jax.tree_util.keystr(path, simple=True, separator="/"),
                np.asarray(x.addressable_data(0)),
            )
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        ]
        bad = [name for name, x in rows if not np.isfinite(x).all()]
        if bad:
            more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            say(f"{what} that are not finite: {', '.join(bad[:_SHOWN])}{more}")
        finite = [(float(np.abs(x).max(initial=0)), name) for name, x in rows if name not in bad]
        largest, name = max(finite, default=(math.nan, "none"))
        say(f"largest of the finite {what}: {largest:.6g} in {name}")
    verdict = math.isfinite(float(sums["loss"][0]))
    say(f"step {step}: the loss {'is finite' if verdict else 'is NOT finite'}")


def _range(x: np.ndarray) -> str:
    finite = x[np.isfinite(x)] if x.dtype.kind == "f" else x
    text = f"from {finite.min():g} to {finite.max():g}" if finite.size else "nothing finite"
    return text + (f", {x.size - finite.size} not finite" if finite.size < x.size else "")
