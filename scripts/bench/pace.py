"""Says how long a run takes on this machine, from its first steps; it takes main.py's flags.

python -m scripts.bench.pace --config=configs/ssd.py --config.data_dir=DIR --config.KEY=VALUE ...

It compiles the train step and takes two steps on a batch of the data, then an evaluation's first
batch, and prints a line after each, so that one may stop it early. It writes nothing but compiled
programs, which the run then finds in the cache.
"""

import time
from typing import Any

import jax
from absl import app, flags

import main as program
from common import entry
from common.progress import duration
from engine import compiler, devices, environment, sharding
from engine.plan import Programs, evaluated_weights, make_plan, read_settings
from scripts.bench import batches
from scripts.bench.step import make_step


def main(argv: Any) -> None:
    """Prints the lines; UserError if the run could not start."""
    config = flags.FLAGS.config
    config.init_from = ""  # with other weights a step takes as long
    settings = read_settings(config.lock())
    if devices.open_platform() == "cpu":
        environment.keep_freed_memory()
    compiler.use_cache(settings.compilation_cache)
    programs = Programs.make(settings)
    benchmark = programs.benchmark
    plan = make_plan(settings, benchmark, benchmark.open("train"))
    stream = benchmark.train_batches(settings.train_batch_size, 0, 1, 0)
    step = make_step(programs, batches.without_clock(next(stream)))
    step()  # warms up
    started = time.monotonic()
    next(stream)  # measures the input; this batch may have another shape
    step()
    seconds, steps = time.monotonic() - started, plan.total_steps
    text = f"on this machine: {seconds:.3g} s/step measured, {steps:,} steps"
    print(f"{text}: about {duration(steps * seconds)}", flush=True)
    state = programs.initial_state(plan)
    count = -(-benchmark.open("eval") // settings.eval_batch_size)
    stream = benchmark.eval_batches(settings.eval_batch_size, 0, 1)
    batch = batches.without_clock(next(stream))
    predict = batches.fitting(programs.lower_predict(state), batch).compile()
    arrays = jax.device_put(batch, sharding.batch_sharding(programs.mesh))
    started = time.monotonic()
    jax.block_until_ready(predict(*evaluated_weights(state), arrays))
    total = steps * seconds + plan.evaluations * count * (time.monotonic() - started)
    text += f" and {plan.evaluations:,} evaluations"
    print(f"{text}: about {duration(total)}", flush=True)


if __name__ == "__main__":
    entry.run(lambda: app.run(main, flags_parser=program.parse_flags))
