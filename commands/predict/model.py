"""What a user asks predict.py for, and the model that answers, on all devices."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.base import BATCH_AXES
from engine import sharding, step
from engine.checkpoint.model_source import Model

Leaves = Mapping[str, np.ndarray]  # of one example, or of a batch
Part = Callable[[], Leaves]  # makes the leaves of one of an input's parts
Batch = Mapping[str, jax.Array]  # on the devices
Predict = Callable[[Any, Any, Batch], Batch]  # rows of (params, model_state, batch)


@dataclasses.dataclass(frozen=True)
class Request:
    """The command line of predict.py, which explains each flag."""

    sources: Sequence[str]
    model: str  # a workdir or a checkpoint; or a file or folder of another library's weights
    # Such weights -> a config with the keys that they do not say; None where they are no choice.
    recipe: Callable[[str], Any] | None
    keys: Mapping[str, str]  # of the config, for such weights
    checkpoint: str
    format: str  # "" if no format was given
    out: str  # the file of results; "" for the standard output
    batch_size: int
    accept_other_data: bool
    options: Mapping[str, Any]  # the given flags that only some kinds of models have


class Predictor:
    """A trained model on this machine's devices, for batches of fixed shapes."""

    def __init__(self, predict: Predict, model: Model, batch_size: int, at_once: int):
        """Reads the weights.

        A device computes `at_once` examples at once. Their number decides how sums are ordered, so
        it is the same for all batch sizes and numbers of devices, and the results are the same bit
        for bit. `batch_size` is rounded up to a multiple of it for each device. `predict` makes
        rows, arrays [b, ...], of (params, model_state, batch).
        """
        mesh = sharding.make(BATCH_AXES, 1)
        unit = at_once * mesh.size
        self.batch_size = -(-batch_size // unit) * unit
        self._sharding = sharding.batch_sharding(mesh)
        weights = model.params, model.model_state
        self._weights = jax.device_put(weights, sharding.replicated(mesh))
        self._programs: dict[Any, Any] = {}

        def in_parts(params: Any, model_state: Any, batch: Batch) -> Any:
            def part(examples: Batch) -> Batch:
                return predict(params, model_state, examples)

            parts = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), batch)
            rows = jax.lax.map(part, parts)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

        self._step = step.make_predict_step(in_parts, mesh)

    def compile(self, example: Leaves) -> None:
        """Compiles for examples whose arrays have the shapes and dtypes of this one's."""
        batch = {
            name: jax.ShapeDtypeStruct(
                (self.batch_size, *x.shape), x.dtype, sharding=self._sharding
            )
            for name, x in {**example, "mask": np.float32(1)}.items()
        }
        self._programs[_shapes(example)] = self._step.lower(*self._weights, batch).compile()

    def __call__(self, examples: Sequence[Leaves]) -> list[Leaves]:
        """The row of each example; examples of one shape share batches."""
        groups: dict[Any, list[int]] = {}  # the indices of examples by their shapes
        for index, example in enumerate(examples):
            groups.setdefault(_shapes(example), []).append(index)
        rows: list[Leaves] = [{}] * len(examples)
        for key, indices in groups.items():
            if key not in self._programs:
                self.compile(examples[indices[0]])
            for begin in range(0, len(indices), self.batch_size):
                batch = indices[begin : begin + self.batch_size]
                results = self._batch(key, [examples[index] for index in batch])
                for i, index in enumerate(batch):
                    rows[index] = {name: values[i] for name, values in results.items()}
        return rows

    def _batch(self, key: Any, examples: Sequence[Leaves]) -> dict[str, np.ndarray]:
        """The rows of a batch, which is filled up with zeros, whose mask is 0."""
        batch = {}
        for name, x in {**examples[0], "mask": np.float32(1)}.items():
            batch[name] = np.zeros((self.batch_size, *x.shape), x.dtype)
            for i, example in enumerate(examples):
                batch[name][i] = example.get(name, 1)
        rows = self._programs[key](*self._weights, jax.device_put(batch, self._sharding))
        return {name: np.asarray(values) for name, values in rows.items()}


def _shapes(example: Leaves) -> Any:
    """What examples of one batch have in common."""
    return tuple((name, x.shape) for name, x in sorted(example.items()))
