"""A train step on a batch of random values: no data are read."""

from __future__ import annotations

import importlib
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from engine.run import Programs, Settings, make_plan, read_settings


def settings(recipe: str, workdir: str = "", **changes: Any) -> Settings:
    """The settings of a run with the recipe `configs/RECIPE.py` and other values of its keys."""
    config: ml_collections.ConfigDict = importlib.import_module(f"configs.{recipe}").get_config()
    config.update({"compilation_cache": "", **changes})
    return read_settings(config.lock(), workdir)


class Training:
    """The compiled train step of a run, with a state and a batch on the devices.

    Attributes:
      programs: the programs of the run.
      lowered: the train step, `jax.stages.Lowered`, for the first shape of its batches.
      compiled: the same, compiled.
      compile_seconds: how long that took.
      state: the `engine.step.TrainState` after the steps so far.
      totals: those of `engine.step.make_train_step`.
    """

    def __init__(self, run_settings: Settings):
        """Compiles the step and draws the weights and the batch."""
        self.programs = programs = Programs.make(run_settings)
        benchmark = programs.benchmark
        examples = benchmark.declared_examples("train") or benchmark.nominal_examples("train")
        recipe = make_plan(run_settings, benchmark, examples).recipe
        self.abstract = programs.abstract_state(recipe)
        self.abstract_totals = programs.abstract_totals(self.abstract)
        started = time.monotonic()
        self.lowered = programs.lower_train(recipe, self.abstract, self.abstract_totals)[0][1]
        self.compiled = self.lowered.compile()
        self.compile_seconds = time.monotonic() - started
        self.state = programs.initial_state(recipe)
        self.totals = programs.zeros(self.abstract_totals)()
        self._seed = programs.seed(recipe)
        self._batch = _draw(programs.batch_specs("train")[0])

    def step(self) -> float:
        """Runs one step to its end; returns its seconds."""
        started = time.monotonic()
        self.state, self.totals, loss = self.compiled(
            self._seed, self.state, self.totals, self._batch
        )
        jax.block_until_ready((loss, self.state))
        return time.monotonic() - started


def _draw(spec: Any) -> Any:
    """Random values on the devices: bytes, numbers from 0 to 1, and the integers 0 and 1."""
    draw = np.random.default_rng(0)

    def values(x: Any) -> jax.Array:
        if np.issubdtype(x.dtype, np.floating):
            array = draw.uniform(0, 1, x.shape)
        else:  # of labels and tokens every model knows 0 and 1
            array = draw.integers(0, 256 if x.dtype == np.uint8 else 2, x.shape)
        return jax.device_put(array.astype(x.dtype), x.sharding)

    return jax.tree.map(values, spec)
