"""Says how long a run takes on this machine, from its first steps; it takes main.py's flags.

python -m scripts.bench.pace --config=configs/ssd.py --config.data_dir=DIR --config.KEY=VALUE ...

It compiles the train step and takes two steps on a batch of the data, then an evaluation's first
batch, and prints a line after each, so that one may stop it early. It writes nothing but compiled
programs, which the run then finds in the cache.
"""

from typing import Any

from absl import app, flags

import main as program
from common import entry
from common.progress import duration
from engine import compiler, devices, pace
from engine.plan import Programs, make_plan, read_settings


def main(argv: Any) -> None:
    """Prints the lines; UserError if the run could not start."""
    config = flags.FLAGS.config
    config.init_from = ""  # with other weights a step takes as long
    settings = read_settings(config.lock())
    devices.open_platform()
    compiler.use_cache(settings.compilation_cache)
    programs = Programs.make(settings)
    plan = make_plan(settings, programs.benchmark, programs.benchmark.open("train"))
    seconds, steps = pace.seconds_per_step(programs, plan), plan.total_steps
    text = f"on this machine: {seconds:.3g} s/step measured, {steps:,} steps"
    print(f"{text}: about {duration(steps * seconds)}", flush=True)
    evaluations = plan.evaluations
    total = steps * seconds + evaluations * pace.seconds_per_evaluation(programs, plan)
    print(f"{text} and {evaluations:,} evaluations: about {duration(total)}", flush=True)


if __name__ == "__main__":
    entry.run(lambda: app.run(main, flags_parser=program.parse_flags))
