"""What a user asks predict.py for, and the model that answers, on all devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.base import BATCH_AXES
from commands.predict.outputs import say
from common.images import photos
from engine import compiler, locations, resuming, step
from engine import mesh as meshes
from engine.model_source import Model

Leaves = Mapping[str, np.ndarray]  # of one example, or of a batch


@dataclasses.dataclass(frozen=True)
class Request:
    """The command line of predict.py, which explains each flag.

    Attributes:
      model: a workdir or a checkpoint; or a file or folder of another library's weights.
      recipe, keys: for such weights, as `model_source.load` takes them; None where `model` is a
        workdir.
      format: one of `outputs.FORMATS` or of the kind's own; "" if none was given.
      out: the file of results; "" writes them to the standard output.
      options: the given flags of those that single kinds of models have.
    """

    sources: Sequence[str]
    model: str
    recipe: Any
    keys: Mapping[str, str]
    checkpoint: str
    format: str
    out: str
    batch_size: int
    accept_other_data: bool
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def prepare(model: Model, accept_other_data: bool, checks_data: bool = True) -> Model:
    """The model as it answers: in float32 on CPUs, where bfloat16 is no faster.

    Raises:
      UserError: there are no such devices; or `checks_data`, and the model's data have other
        classes by now, and `accept_other_data` is False.
    """
    photos.quiet()
    if checks_data:
        resuming.check_data(model, accept_other_data, say)
    meshes.check_platform()
    compiler.use_cache(model.config.compilation_cache)
    return model.in_float32() if jax.default_backend() == "cpu" else model


def with_data(model: Model, data_dir: str, **changes: Any) -> Model:
    """The model with the files of `data_dir`, "" for the run's own, and other values of its config.

    Raises:
      UserError: the model needs a file that is missing or not its own.
    """
    folder = locations.check_path(data_dir or model.config.data_dir, "--data_dir")
    model = model.changed(data_dir=folder, **changes)
    model.benchmark.uses.check_files(model.manifest, model.source)
    return model


class Predictor:
    """A trained model on this machine's devices, for batches of fixed shapes."""

    def __init__(self, predict: Callable[..., Any], model: Model, batch_size: int, at_once: int):
        """Reads the weights.

        Args:
          predict: (params, model_state, batch) -> rows, arrays [b, ...].
          model: whose weights are used.
          batch_size: examples per call, rounded up to a multiple of `at_once` for each device.
          at_once: examples that a device computes at once. Their number decides how sums are
            ordered, so it is the same for all batch sizes and numbers of devices, and the results
            are the same bit for bit.
        """
        mesh = meshes.make(BATCH_AXES, 1)
        unit = at_once * mesh.size
        self.batch_size = -(-batch_size // unit) * unit
        self._sharding = meshes.batch_sharding(mesh)
        weights = model.params, model.model_state
        self._weights = jax.device_put(weights, meshes.replicated(mesh))
        self._programs: dict[Any, Any] = {}

        def in_parts(params: Any, model_state: Any, batch: Any) -> Any:
            def part(examples: Any) -> Any:
                return predict(params, model_state, examples)

            parts = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), batch)
            rows = jax.lax.map(part, parts)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

        self._step = step.make_predict_step(in_parts, mesh)

    def compile(self, example: Mapping[str, Any]) -> None:
        """Compiles for examples whose arrays have the shapes and dtypes of this one's."""
        batch = {
            name: jax.ShapeDtypeStruct(
                (self.batch_size, *x.shape), x.dtype, sharding=self._sharding
            )
            for name, x in {**example, "mask": np.float32(1)}.items()
        }
        self._programs[shapes(example)] = self._step.lower(*self._weights, batch).compile()

    def __call__(self, examples: Sequence[Leaves]) -> dict[str, np.ndarray]:
        """The rows [n, ...] of n examples of equal shapes, at most `batch_size`."""
        key = shapes(examples[0])
        if key not in self._programs:
            self.compile(examples[0])
        batch = {name: self._padded([each[name] for each in examples]) for name in examples[0]}
        batch["mask"] = self._padded([np.float32(1)] * len(examples))
        rows = self._programs[key](*self._weights, jax.device_put(batch, self._sharding))
        return {name: np.asarray(values)[: len(examples)] for name, values in rows.items()}

    def _padded(self, values: Sequence[Any]) -> np.ndarray:
        first = np.asarray(values[0])
        array = np.zeros((self.batch_size, *first.shape), first.dtype)
        array[: len(values)] = values
        return array


def shapes(example: Mapping[str, Any]) -> Any:
    """What examples of one batch have in common."""
    return tuple((name, x.shape) for name, x in sorted(example.items()))
