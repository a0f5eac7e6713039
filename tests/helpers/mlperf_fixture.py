"""Tiny runs of MLPerf's, and logs and results of whole ones that nobody trained."""

import dataclasses
import importlib
import io
import logging
import time
import types
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from PIL import Image

from benchmarks.resnet.preparation.examples import tf_example
from engine import mlperf
from engine.plan import Programs, make_plan, read_settings
from scripts.mlperf import results as mlperf_results
from scripts.mlperf import run as mlperf_run
from tests.conftest import make_tiny_config
from tests.helpers.preparation import write_shards

# A narrow ResNet that learns four colours in a few epochs; see `write_records`.
TINY: dict[str, Any] = {
    **{"num_label_classes": 4, "num_train_images": 96, "num_eval_images": 40, "image_size": 16},
    **{
        "resnet_depth": 10,
        "num_filters": 4,
        "bn_span": 0,
        "bn_momentum": 0.8,
        "shuffle_buffer_size": 64,
    },
    **{"train_batch_size": 16, "eval_batch_size": 8, "input_streams": 8},
    **{"log_step_count_steps": "8", "train_steps": "16 epochs", "steps_per_eval": "4 epochs"},
    **{"steps_per_checkpoint": "", "target": 0.759, "stop_at_target": True},
    **{"learning_rate_schedule": "polynomial", "learning_rate_per": 0, "weight_decay": 2e-4},
}
TINY_LARS = {**TINY, "optimizer": "lars", "base_learning_rate": 4}
TINY_SGD = {**TINY, "optimizer": "sgd", "base_learning_rate": 0.1}
# Compiling takes most of a tiny run.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

RULESETS = ("0.7.0", "1.0.0", "2.0.0", "3.1.0", "4.0.0")
COUNTS = {"num_train_images": 1_281_167, "num_eval_images": 50_000}
SGD = {"optimizer": "sgd", "learning_rate_per": 0, "base_learning_rate": 1.6}
MLPERF = {"format": "mllog", "org": "nobody"}


def mlperf_config(recipe: str = "mlperf_resnet50:1632", **overrides: Any) -> Any:
    """A recipe with a log; keys of config.mlperf are given as mlperf={...}."""
    file, *argument = recipe.split(":")
    config = importlib.import_module(f"configs.{file}").get_config(*argument)
    chosen = MLPERF | overrides.pop("mlperf", {})
    config.update({**COUNTS, "stop_at_target": True, **overrides, "mlperf": chosen})
    return config.lock()


@dataclasses.dataclass
class Clock:
    """Stands for time.time."""

    seconds: float = 1.7e9

    def __call__(self) -> float:
        return self.seconds


def write_records(folder: str) -> str:
    """Writes 96 images of four colours to train, and 40 of which every tenth has a wrong label.

    So the best score is 0.9: the checkers want one of 0.759 or more, and below 1.
    """
    for split, count in (("train", 96), ("validation", 40)):
        draw = np.random.default_rng(len(split))
        rows = []
        for i in range(count):
            colour = i % 4
            label = (colour + (split == "validation" and i % 10 == 9)) % 4
            pixels = draw.normal(100, 30, (20, 24, 3))
            pixels[..., colour % 3] += 60 + 60 * (colour // 3)
            file = io.BytesIO()
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG")
            name = f"{i}.JPEG"
            rows.append(tf_example(file.getvalue(), label + 1, f"n{label}", name, (20, 24)))
        write_shards(folder, split, rows, 4)
    return folder


def tiny(data: str, **overrides: Any) -> Any:
    chosen = {"mlperf": MLPERF | overrides.pop("mlperf", {})}
    return make_tiny_config(data, **{**TINY_SGD, **chosen, **overrides})


_shapes: dict[str, Any] = {}


def shapes(name: str, benchmark: Any) -> Any:
    """The parameters of a benchmark at its real size, traced once per session."""
    if name not in _shapes:
        _shapes[name] = jax.eval_shape(benchmark.init, jax.random.key(0))[0]
    return _shapes[name]


def made_up_mesh(config: Any, per_chip: int = 1) -> Any:
    """What a log looks at of the fewest devices that a span in images fits; else of one."""
    span, _, batch = str(config.get("bn_span", 1)).partition("/")
    groups = int(batch) // int(span) if batch else 1
    devices = [
        types.SimpleNamespace(process_index=0, id=i, coords=(i // per_chip, 0, 0))
        for i in range(groups)
    ]
    return types.SimpleNamespace(devices=np.array(devices, object).reshape(groups, 1), size=groups)


HOST_LOG: Any = None  # nothing here writes to it


def write_run(config: Any, workdir: str, scores: list[Any], clock: Clock) -> None:
    """Writes workdir/mlperf.log of a run whose evaluations score `scores`, 40 minutes apart.

    A score is a number, or {metric: number} where there are several targets.
    """
    epath.Path(workdir).mkdir(parents=True, exist_ok=True)
    settings = read_settings(config, workdir)
    benchmark = settings.load_benchmark(workdir)
    examples = benchmark.declared_examples("train")
    plan = make_plan(settings, benchmark, examples)
    every, mesh = plan.eval_every, made_up_mesh(config)
    programs = Programs(settings, benchmark, mesh)
    mlperf.check_run(programs, True)
    log = mlperf.begin_log(programs, time.time())
    logger = logging.getLogger("tpu_suite")
    others, logger.handlers = logger.handlers, []  # logs of earlier runs in this process are slow
    try:
        log.describe(plan, shapes(config.benchmark, benchmark), mesh)
        clock.seconds += 60
        log.run_starts()
        step = 0
        for score in scores:
            step = min(every.next_after(step) or plan.total_steps, plan.total_steps)
            clock.seconds += 2400
            log.eval_starts(step)
            every_one = {target.metric: score for target in benchmark.targets}
            targets = score if isinstance(score, dict) else every_one
            log.eval_ends(step, {**targets, "top_5_accuracy": 1.0})
    finally:
        log.close()
        logger.handlers = others


# The recipe of 1632 evaluates after 3, 7, ... 35 epochs, where the reference converges in the mean.
SCORES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.7601]
LATE = [*SCORES[:-1], 0.758, 0.7602]


def requested(root: Any, **changes: Any) -> mlperf_run.Request:
    """What somebody asks of run_and_time.sh."""
    facts: dict[str, Any] = {"benchmark": "resnet", "model_dir": str(root), "data_dir": "/data"}
    facts |= {"runs": 5, "seed": 7, "flags": ["--config=a.py", "--config.b=1"], "is_first": True}
    return mlperf_run.Request(**facts | changes)


def make_package(
    root: Any,
    recipe: str = "mlperf_resnet50:1632",
    scores: Sequence[list[float]] = (LATE, *[SCORES] * 4),
    **chosen: Any,
) -> None:
    """Runs at ImageNet's size that nobody trained, collected as run_and_time.sh does.

    Args:
      root: the folder, local or gs://.
      recipe: theirs.
      scores: of each run's evaluations.
      chosen: keys of config.mlperf.
    """
    chosen = {"clear_caches": True, "platform": "tpu-v3-8", **chosen}
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(time, "time", clock)
        patch.setattr(mlperf, "clear_caches", lambda: True)
        for i, run_scores in enumerate(scores):
            config = mlperf_config(recipe, seed=i, mlperf=chosen)
            write_run(config, f"{root}/run_{i}", run_scores, clock)
            mlperf_results.collect(epath.Path(root), "resnet", i)
    mlperf_results.summarize(epath.Path(root), "resnet")
