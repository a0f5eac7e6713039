"""Says how long a run takes on this machine, from its first steps; it takes main.py's flags.

python -m scripts.bench.pace --config=configs/ssd.py --config.data_dir=DIR --config.KEY=VALUE ...

It compiles the train step and takes three steps on a batch of the data, then an evaluation's first
batch. After each it prints a line that says more than the one before: whoever has no more time
takes the last. Nothing is written but compiled programs, which the run then finds.
"""

from __future__ import annotations

import math
import time
from typing import Any

import jax
from absl import app, flags

import main as program
from common import console, entry, pools
from engine import compiler, environment
from engine import mesh as meshes
from engine.run import Plan, Programs, evaluated_weights, make_plan, read_settings

_STEPS = 3  # the first one warms up


def main(argv: Any) -> None:
    """Prints the lines; UserError if the run could not start."""
    del argv
    config = flags.FLAGS.config
    config.init_from = ""  # with other weights a step takes as long
    settings = read_settings(config.lock())
    if meshes.open_platform() == "cpu":
        environment.keep_freed_memory()
    compiler.use_cache(settings.compilation_cache)
    programs = Programs.make(settings)
    benchmark = programs.benchmark
    plan = make_plan(settings, benchmark, benchmark.num_examples("train"))
    seed, state = programs.seed(plan.recipe), programs.initial_state(plan.recipe)
    abstract = programs.abstract_totals(state)
    totals, feed, seconds = programs.zeros(abstract)(), iter(_feed(programs, "train")), math.inf
    batch = next(feed)
    train = _compiled_for(batch, programs.lower_train(plan.recipe, state, abstract))
    for _ in range(_STEPS):
        started = time.monotonic()
        state, totals, loss = train(seed, state, totals, batch)
        next(feed)  # what the input takes; this batch may have another shape
        loss.block_until_ready()
        seconds = min(seconds, time.monotonic() - started)
        _say(plan, seconds)
    batch = next(iter(_feed(programs, "eval")))
    predict = _compiled_for(batch, programs.lower_predict(state))
    started = time.monotonic()
    jax.block_until_ready(predict(*evaluated_weights(state), batch))
    batches = -(-benchmark.num_examples("eval") // settings.eval_batch_size)
    _say(plan, seconds, batches * (time.monotonic() - started))


def _feed(programs: Programs, split: str) -> meshes.Feed:
    size = getattr(programs.settings, f"{split}_batch_size")
    batches = getattr(programs.benchmark, f"{split}_batches")
    return meshes.Feed(batches(size, 0, 1, *([0] if split == "train" else [])), programs.mesh)


def _compiled_for(batch: Any, lowered: list[Any]) -> Any:
    """The program for the shapes of a batch."""
    shapes = {name: x.shape for name, x in batch.items()}
    fits = (program for spec, program in lowered if {k: x.shape for k, x in spec.items()} == shapes)
    return next(fits).compile()


def _say(plan: Plan, step: float, evaluation: float = 0.0) -> None:
    """Prints what the run takes, for the seconds of a step and of an evaluation if it is known."""
    device, steps = jax.devices()[0], plan.recipe.total_steps
    kind = f"{jax.device_count()} x {device.device_kind}"
    if device.platform == "cpu":
        kind = f"{pools.cores()} CPU cores"
    work, total = f"{steps:,} steps", steps * step
    if evaluation:
        work += f" and {plan.evaluations:,} evaluations"
        total += plan.evaluations * evaluation
    print(
        f"on this machine ({kind}): {step:.3g} s/step measured, {work}: about "
        f"{console.duration(total)}",
        flush=True,
    )


if __name__ == "__main__":
    entry.run(lambda: app.run(main, flags_parser=program.parse_flags))
