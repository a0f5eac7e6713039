"""The programs that a run compiles: its train step, its predict step, its initial state.

They follow from the settings and the devices. They need no data and no workdir, so that
--mode=preflight compiles the same programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.base import BATCH_AXES, Benchmark
from engine import compiler, image_spans, step
from engine import mesh as meshes
from engine.step import Recipe, TrainState
from errors import ConfigError
from run import Settings

_SEED = jax.ShapeDtypeStruct((), jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run on some devices."""

    settings: Settings
    benchmark: Benchmark
    mesh: Mesh

    @classmethod
    def make(
        cls,
        settings: Settings,
        cache_dir: str = "",
        devices: Sequence[Any] | None = None,
        trains: bool = True,
    ) -> Programs:
        """Checks the BatchNorm span and the batch sizes for `devices` (None: this run's).

        Programs that do not train need neither the span nor the training batch.
        """
        benchmark = settings.load_benchmark(cache_dir)
        if trains:
            accumulation = settings.gradient_accumulation_steps
            if "/" in (span := str(benchmark.bn_span)):
                image_spans.check(span, settings.train_batch_size, accumulation)
            mesh = meshes.make(BATCH_AXES, benchmark.bn_span, devices)
            meshes.check_batch(mesh, "train_batch_size", settings.train_batch_size, accumulation)
        else:
            mesh = meshes.make(BATCH_AXES, 1, devices)
        meshes.check_batch(mesh, "eval_batch_size", settings.eval_batch_size)
        return cls(settings, benchmark, mesh)

    @property
    def examples_per_pass(self) -> int:
        """The size of the global batch of one forward pass."""
        return self.settings.train_batch_size // self.settings.gradient_accumulation_steps

    @property
    def norm_examples(self) -> int:
        """How many examples of a forward pass share the statistics of BatchNorm."""
        return self.examples_per_pass * self.mesh.devices.shape[1] // self.mesh.size

    def check_random_start(self) -> None:
        """Raises ConfigError if a run without `config.init_from` would keep random weights."""
        if freeze := self.settings.freeze:
            raise ConfigError(
                f"config.freeze={freeze!r} would freeze random weights: "
                f"give --config.init_from={self.benchmark.published}"
            )
        self.benchmark.check_random_start(self.norm_examples)

    def batch_specs(self, split: str) -> tuple[Any, ...]:
        """Every shape of a global batch, with shardings."""
        specs = self.benchmark.batch_spec(split, getattr(self.settings, f"{split}_batch_size"))
        return tuple(meshes.abstract(spec, meshes.batch_sharding(self.mesh)) for spec in specs)

    def abstract_state(self, recipe: Recipe) -> TrainState:
        """The state as ShapeDtypeStructs, replicated."""
        sharding = meshes.replicated(self.mesh)
        shapes = _initial(self.benchmark.init, recipe, sharding).eval_shape(_SEED)
        return meshes.abstract(shapes, sharding)

    def abstract_totals(self, state: TrainState) -> Any:
        """The totals of the train step as ShapeDtypeStructs, replicated."""
        return step.totals_spec(self.benchmark.loss, self.mesh, state, self.batch_specs("train")[0])

    def initial_state(self, recipe: Recipe) -> TrainState:
        """The state before the first step, on the devices."""
        make = _initial(self.benchmark.init, recipe, meshes.replicated(self.mesh))
        return make(self.seed(recipe))

    def seed(self, recipe: Recipe) -> jax.Array:
        """The seed u32[] on all devices, for the train step."""
        value = np.uint32(recipe.seed)
        return jax.make_array_from_callback((), meshes.replicated(self.mesh), lambda _: value)

    def zeros(self, totals: Any) -> Callable[[], Any]:
        """A compiled function that makes totals of this form, all zero, on the devices."""
        return jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), totals),
            out_shardings=meshes.replicated(self.mesh),
        )

    def lower_train(self, recipe: Recipe, state: TrainState, totals: Any) -> list[Any]:
        """The train step, lowered; see `engine.step.lower`. `totals` are `abstract_totals`."""
        options = compiler.options(self.mesh, self.benchmark.larger_windows)
        train_step = step.make_train_step(self.benchmark.loss, self.mesh, recipe, options)
        seed = meshes.abstract(_SEED, meshes.replicated(self.mesh))
        arguments = seed, state, totals
        return step.lower(train_step, arguments, self.batch_specs("train"))

    def lower_predict(self, state: TrainState) -> list[Any]:
        """The predict step, lowered for evaluation batches; see `engine.step.lower`."""
        predict_step = step.make_predict_step(self.benchmark.predict, self.mesh)
        return step.lower(predict_step, evaluated_weights(state), self.batch_specs("eval"))


@functools.lru_cache(1)
def _initial(init: Callable[..., Any], recipe: Recipe, sharding: Any) -> Any:
    """The jitted function from a seed to the initial state, so that it is traced once."""
    return jax.jit(functools.partial(step.init_state, init, recipe), out_shardings=sharding)


def evaluated_weights(state: TrainState) -> tuple[Any, Any]:
    """(params, model_state) to evaluate: their average where the run keeps one."""
    if state.ema:
        return state.ema["params"], state.ema["model_state"]
    return state.params, state.model_state
