"""Checks of a small ResNet on random images: kill -9 and resume, exact evaluation, saving."""

from __future__ import annotations

import contextlib
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from etils import epath

from commands.prove import training
from commands.prove.checks import ROOT, Case, Failed, Result, command, make_images
from common.trees import by_name
from engine import start
from engine import step as steps
from engine.checkpoint import Checkpointer
from engine.evaluate import predict_all
from engine.manifest import array_pieces
from engine.run import Programs, Settings, make_plan
from engine.start import Run

_HELD_OUT = 101  # images: a prime, which no batch divides
_STEPS, _EVERY = 200, 10  # of the run that is killed, and between its checkpoints
_WAIT = 600.0  # seconds for its first checkpoint


def kill_and_resume(case: Case) -> Result:
    """Kills a training run with SIGKILL, resumes it, and compares it with an undisturbed run."""
    calm, killed = f"{case.workdir}/calm", f"{case.workdir}/killed"
    changes = small_run(case)
    command(_main(calm, changes))
    at = _kill(_main(killed, changes), killed)
    output = command(_main(killed, changes))
    resumed = [line for line in output.splitlines() if "resuming at step" in line]
    if not resumed:
        raise Failed("the second start of the killed run does not resume; see the check's log")
    one, other = (training.settings("digits", path, **changes) for path in (calm, killed))
    count = compare_runs(one, other, _STEPS)
    return Result(
        f"killed after step {at}, {_STEPS} steps in all: {count} arrays have the same bits",
        {"steps": _STEPS, "killed_after_checkpoint": at, "arrays": count},
    )


def compare_runs(one: Settings, other: Settings, step: int) -> int:
    """Compares the checkpoints of a step of two runs, bit for bit; returns the number of arrays.

    Raises:
      Failed: an array differs; the message has its name.
      CheckpointError: a checkpoint is damaged.
    """
    return same_bits("the resumed run", _restored(one, step), _restored(other, step))


def same_bits(what: str, one: Any, other: Any) -> int:
    """Compares two trees of arrays bit for bit; returns the number of arrays.

    Raises:
      Failed: an array differs; the message has its name.
    """
    first, second = by_name(one), by_name(other)
    for name in first.keys() | second.keys():
        if name not in first or name not in second or _bits(first[name]) != _bits(second[name]):
            raise Failed(f"{what} has other bits in {name}")
    return len(first)


def exact_counts(case: Case) -> Result:
    """Evaluates 101 images in batches of two sizes: every image counts exactly once."""
    ids: dict[int, list[int]] = {}
    for per_device in (2, 3):
        size = per_device * case.devices
        changes = small_run(case) | {"eval_batch_size": size}
        rows = evaluated(training.settings("digits", f"{case.workdir}/counts", **changes))
        ids[size] = sorted(np.concatenate([batch["id"] for batch in rows]).tolist())
    for size, numbers in ids.items():
        if len(numbers) != _HELD_OUT or len(set(numbers)) != _HELD_OUT:
            raise Failed(
                f"in batches of {size}, {len(numbers)} rows of {len(set(numbers))} images are "
                f"evaluated instead of {_HELD_OUT}"
            )
    if len(set(map(tuple, ids.values()))) != 1:
        raise Failed("batches of another size evaluate other images")
    sizes = " and ".join(map(str, ids))
    return Result(
        f"{_HELD_OUT} images in batches of {sizes}", {"images": _HELD_OUT, "sizes": sizes}
    )


def evaluated(settings: Settings) -> list[dict[str, np.ndarray]]:
    """The rows that an evaluation with first, random weights predicts, without padding."""
    run = Run.open(settings, trains=False)
    examples = run.count_examples(evaluating=True)
    recipe = make_plan(settings, run.benchmark, examples).recipe
    predict = steps.CompiledStep(run.programs.lower_predict(run.programs.abstract_state(recipe)))
    return list(predict_all(run, predict, run.programs.initial_state(recipe)))


def save_while_training(case: Case) -> Result:
    """Saves a step while the next ones, which reuse its memory, are computed; then reads it."""
    small = case.short or jax.default_backend() == "cpu"
    devices = jax.device_count()
    changes: dict[str, Any] = {}
    if small:
        changes |= {"num_filters": 16, "image_size": 64, "precision": "float32"}
    batch = (2 if small else 64) * devices
    changes |= {"train_batch_size": batch, "eval_batch_size": devices}
    trained = training.Training(training.settings("fake_imagenet", **changes))
    figures = saved(trained, f"{case.workdir}/saved/checkpoints")
    waited, total = figures["seconds_until_training_goes_on"], figures["seconds_until_saved"]
    return Result(
        f"{figures['bytes'] / 1e6:.1f} MB; training waited {waited:.2f} s, the save took "
        f"{total:.2f} s",
        figures,
    )


def saved(trained: training.Training, folder: str) -> dict[str, Any]:
    """Saves the state in `folder` while training goes on; returns sizes and times.

    Raises:
      Failed: an array is restored with other bits than it had when it was saved.
      CheckpointError: the checkpoint is damaged.
    """
    before = [trained.step() for _ in range(5)][2:]
    abstract = steps.checkpoint_items(trained.abstract, trained.abstract_totals)
    items = steps.checkpoint_items(trained.state, trained.totals)
    # Copies of the bytes: the next step overwrites the memory.
    expected = {name: _bits(x) for name, x in by_name(items).items()}
    with contextlib.closing(Checkpointer(folder, keep=2, best=lambda: None)) as checkpoints:
        started = time.monotonic()
        checkpoints.save(1, **items, facts={})
        begun = time.monotonic() - started
        during = [trained.step() for _ in range(5)]
        checkpoints.wait()
        total = time.monotonic() - started
        restored = by_name(checkpoints.restore(1, abstract))
    for name, bits in expected.items():
        if _bits(restored[name]) != bits:
            raise Failed(f"the checkpoint has other bits than the state that was saved, in {name}")
    return {
        "bytes": sum(len(bits) for bits in expected.values()),
        "seconds_until_training_goes_on": begun,
        "seconds_until_saved": total,
        "step_seconds_before": statistics.median(before),
        "step_seconds_during": statistics.median(during),
    }


def small_run(case: Case) -> dict[str, Any]:
    """What makes configs/digits.py small, on random images."""
    return {
        **{"data_dir": make_images(case, "small_images", 256, _HELD_OUT, "40x48")},
        **{"num_label_classes": 4, "image_size": 16, "num_filters": 4, "input_streams": 8},
        **{"shuffle_buffer_size": 64, "train_batch_size": 16 * case.devices, "target": 0.0},
        **{"eval_batch_size": 2 * case.devices, "base_learning_rate": 0.02},
        **{"train_steps": str(_STEPS), "steps_per_eval": str(_STEPS), "keep_checkpoints": 2},
        **{"steps_per_checkpoint": str(_EVERY), "log_step_count_steps": str(_EVERY)},
        **{"compilation_cache": ""},
    }


def _main(workdir: str, changes: dict[str, Any]) -> list[str]:
    keys = [f"--config.{key}={value}" for key, value in changes.items()]
    words = [sys.executable, "main.py", "--config=configs/digits.py", f"--workdir={workdir}"]
    return words + keys


def _kill(words: list[str], workdir: str) -> int:
    """Starts a run, kills it once it has a checkpoint, and returns that checkpoint's step."""
    folder = epath.Path(workdir) / "checkpoints"
    quiet = subprocess.DEVNULL
    # In the process group of this check, which is killed where the check is stopped.
    process, newest = subprocess.Popen(words, cwd=ROOT, stdout=quiet, stderr=quiet), 0
    try:
        deadline = time.monotonic() + _WAIT
        while not newest and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            names = [path.name for path in folder.iterdir()] if folder.exists() else []
            newest = max((int(name) for name in names if name.isdigit()), default=0)
    finally:
        process.kill()
        code = process.wait()
    if code != -signal.SIGKILL:
        raise Failed(f"the run ended with exit code {code} before it could be killed")
    if not newest:
        raise Failed(f"the run had no checkpoint after {_WAIT:.0f} s")
    return newest


def _restored(settings: Settings, step: int) -> Any:
    programs = Programs.make(settings)
    examples = programs.benchmark.num_examples("train")
    recipe = make_plan(settings, programs.benchmark, examples).recipe
    state = programs.abstract_state(recipe)
    checkpoints = Checkpointer(f"{settings.workdir}/checkpoints", keep=1, best=None)
    with contextlib.closing(checkpoints):
        return start.restore_state(checkpoints, step, state, programs.abstract_totals(state))


def _bits(x: Any) -> bytes:
    return b"".join(array_pieces(x))
