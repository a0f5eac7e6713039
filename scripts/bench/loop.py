"""Measures what the training loop adds to its step: host time, checkpoints, evaluation.

python -m scripts.bench.loop [--set KEY=VALUE]

Runs train.py's loop on random images in a temporary workdir, and in turns with it the same compiled
step alone, on the devices of this machine. The model is tiny, so that the host is the narrow
place: where a step takes longer than "loop, ms per step" says, the host's part is hidden behind it.
--json prints an object instead of the table.
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

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import jax

from engine import mlperf
from engine.cluster import guard
from evaluate import Setup
from scripts.bench import settings
from train import Trainer

_TINY = {
    **{"resnet_depth": 18, "num_filters": 2, "image_size": 16, "num_label_classes": 10},
    **{"num_train_images": 6400, "num_eval_images": 640, "precision": "float32"},
    **{"steps_per_eval": "", "steps_per_checkpoint": "", "log_step_count_steps": "100"},
}
_ROWS = {
    "step": "the compiled step alone, ms",
    "loop": "loop, ms per step",
    "ratio": "the loop, of the step alone",
    "first_save": "checkpoint, s until training goes on",
    "whole_save": "checkpoint, s until it is complete",
    "checkpoint_bytes": "checkpoint, MB",
    "evaluation": "evaluation, ms per batch",
    "predict": "the compiled predict step alone, ms",
    "evaluation_ratio": "evaluation, of the predict step alone",
}


class _Timed(Trainer):
    """The trainer, with a clock at its parts."""

    def _loop(self, state: Any, totals: Any) -> Any:
        begun = time.monotonic()
        self.stall = self.save = self.evaluation = 0.0
        self.final = super()._loop(state, totals)
        self.loop_seconds = time.monotonic() - begun - self.save - self.evaluation
        return self.final

    def _save(self, step: int, state: Any, totals: Any) -> None:
        begun = time.monotonic()
        super()._save(step, state, totals)
        self.stall = time.monotonic() - begun
        self.checkpoints.wait()  # there is one save, at the end: nothing else is measured meanwhile
        self.save = time.monotonic() - begun

    def _evaluate(self, state: Any) -> None:
        begun = time.monotonic()
        super()._evaluate(state)
        self.evaluation = time.monotonic() - begun


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit code."""
    flags = _flags(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)
    config = _config(flags)
    rounds = []
    for turn in range(1, flags.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(config, folder))
        print(f"round {turn} of {flags.rounds}", file=sys.stderr, flush=True)
    found = {name: statistics.median(r[name] for r in rounds) for name in _ROWS}
    print(json.dumps(found) if flags.json else table(found, jax.devices()[0].device_kind))
    return 0


def one_round(config: Any, workdir: str) -> dict[str, float]:
    """A whole run in `workdir`, then its compiled steps alone; in ms, s and MB, as `_ROWS` says."""
    setup = Setup.make(config, workdir)
    with contextlib.closing(guard.Guard(workdir, setup.mesh, 1.0)) as watching:
        log = mlperf.begin(config, setup.benchmark, workdir, True, time.time())
        trainer = _Timed(setup, watching, True, log)
        with contextlib.closing(trainer):
            trainer.run()
            steps = trainer.recipe.total_steps
            alone, predict = _alone(trainer, steps)
    batches = -(-setup.benchmark.num_eval_examples // config.eval_batch_size)
    loop = trainer.loop_seconds / steps * 1e3
    state, totals = trainer.final
    size = sum(x.nbytes for x in jax.tree.leaves((state, totals)) if hasattr(x, "nbytes"))
    evaluation = trainer.evaluation / batches * 1e3
    return {
        **{"step": alone, "loop": loop, "ratio": loop / alone},
        **{"first_save": trainer.stall, "whole_save": trainer.save},
        "checkpoint_bytes": size / 1e6,
        **{"evaluation": evaluation, "predict": predict},
        "evaluation_ratio": evaluation / predict,
    }


def _alone(trainer: _Timed, steps: int) -> tuple[float, float]:
    """ms of the train step and of the predict step, the host two steps ahead as in the loop."""
    config, benchmark = trainer.config, trainer.benchmark
    batches = {
        split: jax.device_put(
            next(make(config[f"{split}_batch_size"], 0, 1, *start)),
            trainer.setup.specs(split)[0]["image"].sharding,
        )
        for split, make, start in (
            ("train", benchmark.train_batches, (0,)),
            ("eval", benchmark.eval_batches, ()),
        )
    }
    state, totals = trainer.final
    weights = state.params, state.model_state
    predicted = trainer._predict(*weights, batches["eval"])
    jax.block_until_ready(predicted)
    begun = time.monotonic()
    for _ in range(steps):
        predicted = trainer._predict(*weights, batches["eval"])
    jax.block_until_ready(predicted)
    predict = (time.monotonic() - begun) / steps * 1e3
    flights: list[Any] = []
    begun = time.monotonic()
    for _ in range(steps):
        state, totals, loss = trainer._train_step(state, totals, batches["train"])
        flights = [*flights, loss][-2:]
        flights[0].block_until_ready()
    jax.block_until_ready(state)
    return (time.monotonic() - begun) / steps * 1e3, predict


def table(found: dict[str, float], device: str) -> str:
    """The figures as a Markdown table."""
    lines = [f"| on {jax.device_count()} x {device} | |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {text} | {found[k]:.3g} |" for k, text in _ROWS.items())])


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
    parser.add_argument(
        *("--set",), action="append", default=[], metavar="KEY=VALUE", help="of the config"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
