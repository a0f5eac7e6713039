"""A train step on a batch of random values, and small runs on random images."""

import importlib
import importlib.util
import pathlib
import subprocess
import time
from typing import Any

import jax
import ml_collections
import numpy as np
import pytest

from commands.prove import Case
from engine.plan import Plan, Programs, Settings, make_plan, read_settings
from tests.helpers import photographs

ROOT = pathlib.Path(__file__).parents[2]


def settings(recipe: str, workdir: str = "", **changes: Any) -> Settings:
    """The settings of a run with the recipe `configs/RECIPE.py` and other values of its keys."""
    config: ml_collections.ConfigDict = importlib.import_module(f"configs.{recipe}").get_config()
    config.update({"compilation_cache": "", **changes})
    return read_settings(config.lock(), workdir)


def plan_of(run_settings: Settings, benchmark: Any) -> Plan:
    """The plan of a run, for as many examples as its data are said to have."""
    examples = benchmark.declared_examples("train") or benchmark.nominal_examples("train")
    return make_plan(run_settings, benchmark, examples)


class Training:
    """The compiled train step of a run, with a state and a batch of random values."""

    def __init__(self, run_settings: Settings):
        """Compiles the step and draws the weights and the batch."""
        self.programs = programs = Programs.make(run_settings)
        plan = plan_of(run_settings, programs.benchmark)
        self.abstract = programs.abstract_state(plan)
        self.abstract_totals = programs.abstract_totals(plan, self.abstract)
        started = time.monotonic()
        self.lowered = programs.lower_train(plan, self.abstract, self.abstract_totals)[0][1]
        self.compiled = self.lowered.compile()
        self.compile_seconds = time.monotonic() - started
        self.state = programs.initial_state(plan)
        self.totals = programs.zeros(self.abstract_totals)()
        self._seed = programs.seed()
        draw = np.random.default_rng(0)

        def values(x: Any) -> jax.Array:
            if np.issubdtype(x.dtype, np.floating):
                array = draw.uniform(0, 1, x.shape)
            else:  # of labels and tokens every model knows 0 and 1
                array = draw.integers(0, 256 if x.dtype == np.uint8 else 2, x.shape)
            return jax.device_put(array.astype(x.dtype), x.sharding)

        self._batch = jax.tree.map(values, programs.batch_specs("train")[0])

    def step(self) -> float:
        """Runs one step to its end; returns its seconds."""
        started = time.monotonic()
        self.state, self.totals, loss = self.compiled(
            self._seed, self.state, self.totals, self._batch
        )
        jax.block_until_ready((loss, self.state))
        return time.monotonic() - started


def make_images(case: Case, name: str, train: int, held_out: int, size: tuple[int, int]) -> str:
    """Writes records of images of (height, width), unless an earlier check has; their folder."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow")
    folder = pathlib.Path(case.folder) / name
    if not (folder / ".complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        photographs.write(str(folder), {"train": train, "validation": held_out}, *size)
        (folder / ".complete").touch()
    return str(folder)


def command(words: list[str]) -> str:
    """Runs a command of this repository, which has to end well, and returns its output."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", flush=True)  # the check's log
    *_, last = ["no output", *f"{done.stdout}\n{done.stderr}".strip().splitlines()]
    assert done.returncode == 0, f"{words[1]} ended with exit code {done.returncode}: {last}"
    return done.stdout
