"""Measures what the training loop adds to its step: host time, checkpoints, evaluation.

python -m scripts.bench.loop [--set KEY=VALUE]

It alternates train.py's loop on random images in a temporary workdir with the same compiled step
alone, on the devices of this machine. The model is tiny, so that the host is the slower part. A
step that takes longer than "loop, ms per step" hides the host's part. Figures are medians of the
rounds; of ratios the least and the largest are shown as well, and where 1 lies between them there
is no verdict: other work disturbed the rounds. --json prints an object instead of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import jax

import run as runs
import train
from engine import mesh as meshes
from scripts.bench import settings, spread
from start import Run

_TINY = {
    **{"resnet_depth": 18, "num_filters": 2, "image_size": 16, "num_label_classes": 10},
    **{"num_train_images": 6400, "num_eval_images": 640, "precision": "float32"},
    **{"steps_per_eval": "", "steps_per_checkpoint": "", "log_step_count_steps": "100"},
}
_ROWS = {
    "step": "the compiled step alone, ms",
    "loop": "loop, ms per step",
    "ratio": "ratio of the loop to the step alone",
    "first_save": "checkpoint, s until training goes on",
    "whole_save": "checkpoint, s until it is complete",
    "checkpoint_bytes": "checkpoint, MB",
    "evaluation": "evaluation, ms per batch",
    "predict": "the compiled predict step alone, ms",
    "evaluation_ratio": "ratio of evaluation to the predict step alone",
}
_RATIOS = ("ratio", "evaluation_ratio")


class _Clock:
    """Measures the parts of one run; `classes` replace train.py's own."""

    def __init__(self):
        self.loop = self.stall = self.save = self.evaluation = 0.0  # seconds
        self.programs: Any = None
        self.end: Any = None  # the run's last position

    def classes(self) -> dict[str, type]:
        """Returns subclasses of train.py's classes whose methods measure time."""
        clock = self

        class Loop(train.Loop):
            def train(self, start: Any) -> Any:
                started = time.monotonic()
                clock.programs, clock.end = self.programs, super().train(start)
                clock.loop = time.monotonic() - started - clock.save - clock.evaluation
                return clock.end

        class Saver(train.Saver):
            def save(self, position: Any) -> float:
                started = time.monotonic()
                super().save(position)
                clock.stall = time.monotonic() - started
                self.checkpoints.wait()  # the only save, at the end of the run
                clock.save = time.monotonic() - started
                return clock.save

        class Evaluator(train.Evaluator):
            def start(self, step: int, state: Any) -> float:
                clock.evaluation += (seconds := super().start(step, state))
                return seconds

            def finish(self) -> float:
                clock.evaluation += (seconds := super().finish())
                return seconds

        return {"Loop": Loop, "Saver": Saver, "Evaluator": Evaluator}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the figures, and returns the exit code."""
    flags = _flags(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)
    config = _config(flags)
    rounds = []
    for turn in range(1, flags.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(config, folder))
        print(f"round {turn} of {flags.rounds}", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {name: statistics.median(r[name] for r in rounds) for name in _ROWS}
    figures["ranges"] = {name: spread.span([r[name] for r in rounds]) for name in _RATIOS}
    print(json.dumps(figures) if flags.json else table(figures, jax.devices()[0].device_kind))
    return 0


def one_round(config: Any, workdir: str) -> dict[str, float]:
    """Measures a run in `workdir` and its compiled steps alone, in the units of `_ROWS`."""
    clock, job = _Clock(), runs.read(config, workdir)
    with contextlib.ExitStack() as patches:
        for name, timed in clock.classes().items():
            patches.enter_context(mock.patch.object(train, name, timed))
        train.train_and_evaluate(job)
    run = Run.open(job)
    step, predict = _alone(run, clock)
    batches = -(-run.benchmark.num_examples("eval") // job.eval_batch_size)
    loop, evaluation = clock.loop / clock.end.step * 1e3, clock.evaluation / batches * 1e3
    size = sum(x.nbytes for x in jax.tree.leaves(clock.end) if hasattr(x, "nbytes"))
    return {
        **{"step": step, "loop": loop, "ratio": loop / step},
        **{"first_save": clock.stall, "whole_save": clock.save},
        "checkpoint_bytes": size / 1e6,
        **{"evaluation": evaluation, "predict": predict},
        "evaluation_ratio": evaluation / predict,
    }


def _alone(run: Run, clock: _Clock) -> tuple[float, float]:
    """The ms of the train step and of the predict step, with the host two steps ahead."""
    sharding, sizes = meshes.batch_sharding(run.mesh), run.settings
    train_batches = run.benchmark.train_batches(sizes.train_batch_size, 0, 1, 0)
    eval_batches = run.benchmark.eval_batches(sizes.eval_batch_size, 0, 1)
    train_batch = jax.device_put(next(train_batches), sharding)
    eval_batch = jax.device_put(next(eval_batches), sharding)
    steps, state, totals = clock.end
    weights = state.params, state.model_state
    rows = jax.block_until_ready(clock.programs.predict(*weights, eval_batch))
    started = time.monotonic()
    for _ in range(steps):
        rows = clock.programs.predict(*weights, eval_batch)
    jax.block_until_ready(rows)
    predict = (time.monotonic() - started) / steps * 1e3
    in_flight: list[Any] = []
    started = time.monotonic()
    for _ in range(steps):
        state, totals, loss = clock.programs.train(state, totals, train_batch)
        in_flight = [*in_flight, loss][-2:]
        in_flight[0].block_until_ready()
    jax.block_until_ready(state)
    return (time.monotonic() - started) / steps * 1e3, predict


def table(figures: dict[str, Any], device: str) -> str:
    """Formats the figures as a Markdown table."""
    lines = [f"| on {jax.device_count()} x {device} | |", "| --- | --- |"]
    for name, text in _ROWS.items():
        of = figures["ranges"].get(name)
        value = spread.text(figures[name], of) if of else f"{figures[name]:.3g}"
        lines.append(f"| {text} | {value} |")
    return "\n".join(lines)


def _config(flags: argparse.Namespace) -> Any:
    config = importlib.import_module("configs.fake_imagenet").get_config()
    devices = jax.device_count()
    sizes = {"train_batch_size": 8 * devices, "eval_batch_size": 8 * devices}
    config.update({**_TINY, **sizes, "train_steps": str(flags.steps)})
    settings.change(config, flags.set)
    return config.lock()


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    add("--steps", type=int, default=400)
    add("--rounds", type=int, default=3)
    add("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
