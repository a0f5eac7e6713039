"""A small ResNet on random images: kill -9 and resume, exact evaluation, saving."""

import contextlib
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from common.trees import by_name
from engine import step as steps
from engine.checkpoint.checkpointer import Checkpointer
from engine.evaluate import predict_all
from engine.run import Run
from tests import torture
from tests.device import training

pytestmark = pytest.mark.device
HELD_OUT = 101  # images: a prime, which no batch divides
STEPS, EVERY = 200, 10  # of the run that is killed, and between its checkpoints
WAIT = 600.0  # seconds for its first checkpoint


def small_run(case):
    """What makes configs/digits.py small, on random images."""
    return {
        **{"data_dir": training.make_images(case, "small_images", 256, HELD_OUT, (40, 48))},
        **{"num_label_classes": 4, "image_size": 16, "num_filters": 4, "input_streams": 8},
        **{"shuffle_buffer_size": 64, "train_batch_size": 16 * case.devices, "target": 0.0},
        **{"eval_batch_size": 2 * case.devices, "base_learning_rate": 0.02},
        **{"train_steps": str(STEPS), "steps_per_eval": str(STEPS), "keep_checkpoints": 2},
        **{"steps_per_checkpoint": str(EVERY), "log_step_count_steps": str(EVERY)},
        **{"compilation_cache": ""},
    }


@pytest.mark.slow
def test_kill_and_resume(case, answer):
    """A run that is killed with SIGKILL and resumed ends as an undisturbed one, bit for bit.

    This process leaves the devices to them: a TPU serves one process.
    """
    calm, killed = f"{case.workdir}/calm", f"{case.workdir}/killed"
    changes = small_run(case)
    keys = [f"--config.{key}={value}" for key, value in changes.items()]

    def words(workdir):
        main = [sys.executable, "main.py", "--config=configs/digits.py"]
        return [*main, f"--workdir={workdir}", *keys]

    training.command(words(calm))
    at = kill(words(killed), killed)
    output = training.command(words(killed))
    assert "resuming at step" in output, "the second start of the killed run does not resume"
    different = torture.differences(calm, killed)
    assert not different, f"the resumed run: {different[0]}"
    count = len(torture.results(calm)[1][str(STEPS)])
    answer(
        f"killed after step {at}, {STEPS} steps in all: {count} arrays have the same bits",
        {"steps": STEPS, "killed_after_checkpoint": at, "arrays": count},
    )


def kill(words, workdir):
    """Starts a run, kills it once it has a checkpoint, and returns that checkpoint's step."""
    folder, quiet, newest = epath.Path(workdir) / "checkpoints", subprocess.DEVNULL, 0
    process = subprocess.Popen(words, cwd=training.ROOT, stdout=quiet, stderr=quiet)
    try:
        deadline = time.monotonic() + WAIT
        while not newest and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            names = [path.name for path in folder.iterdir()] if folder.exists() else []
            newest = max((int(name) for name in names if name.isdigit()), default=0)
    finally:
        process.kill()
        code = process.wait()
    assert code == -signal.SIGKILL, f"the run ended with exit code {code}, before it was killed"
    assert newest, f"the run had no checkpoint after {WAIT:.0f} s"
    return newest


@pytest.mark.long
def test_every_image_is_evaluated_once(case, answer):
    """In batches of two sizes, which do not divide the number of images."""
    ids = {}
    for size in (2 * case.devices, 3 * case.devices):
        changes = small_run(case) | {"eval_batch_size": size}
        settings = training.settings("digits", f"{case.workdir}/counts", **changes)
        run = Run.open(settings, trains=False)
        run.open_data("eval")
        plan = training.plan_of(settings, run.benchmark)
        state = run.programs.abstract_state(plan)
        predict = steps.CompiledStep(run.programs.lower_predict(state))
        rows = predict_all(run, predict, run.programs.initial_state(plan))
        ids[size] = sorted(np.concatenate([batch["id"] for batch in rows]).tolist())
        count, distinct = len(ids[size]), len(set(ids[size]))
        problem = f"in batches of {size}, {count} rows of {distinct} images are evaluated"
        assert count == distinct == HELD_OUT, f"{problem} instead of {HELD_OUT}"
    one, other = ids.values()
    assert one == other, "batches of another size evaluate other images"
    sizes = " and ".join(map(str, ids))
    answer(f"{HELD_OUT} images in batches of {sizes}", {"images": HELD_OUT, "sizes": sizes})


def bits(tree):
    """{"params/conv/kernel": the bytes of the array, ...}: copies."""
    return {name: np.asarray(x).tobytes() for name, x in by_name(tree).items()}


@pytest.mark.slow
def test_a_save_while_training_goes_on(case, answer):
    """Saves a step while the next ones, which reuse its memory, are computed; then reads it."""
    small = case.short or jax.default_backend() == "cpu"
    devices = jax.device_count()
    changes: Any = {"train_batch_size": (2 if small else 64) * devices}
    changes |= {"eval_batch_size": devices}
    if small:
        changes |= {"num_filters": 16, "image_size": 64, "precision": "float32"}
    trained = training.Training(training.settings("fake_imagenet", **changes))
    before = [trained.step() for _ in range(5)][2:]
    abstract = steps.checkpoint_items(trained.abstract, trained.abstract_totals)
    items = steps.checkpoint_items(trained.state, trained.totals)
    expected = bits(items)  # the next step overwrites the memory
    folder = f"{case.workdir}/saved/checkpoints"
    with contextlib.closing(Checkpointer(folder, keep=2, best=lambda: None)) as checkpoints:
        started = time.monotonic()
        checkpoints.save(1, **items, manifest={})
        waited = time.monotonic() - started
        during = [trained.step() for _ in range(5)]
        checkpoints.wait()
        total = time.monotonic() - started
        restored = bits(checkpoints.restore(1, abstract))
    names = [name for name in expected if restored[name] != expected[name]]
    assert not names, f"the checkpoint has other bits than the state that was saved, in {names[0]}"
    size = sum(map(len, expected.values()))
    answer(
        f"{size / 1e6:.1f} MB; training waited {waited:.2f} s, the save took {total:.2f} s",
        {
            "bytes": size,
            "seconds_until_training_goes_on": waited,
            "seconds_until_saved": total,
            "step_seconds_before": statistics.median(before),
            "step_seconds_during": statistics.median(during),
        },
    )
