"""Classifies batches of one shape on all devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import BATCH_AXES
from engine import mesh as meshes
from engine import step
from modes.trained import Trained

# Images that a device computes at once. Their number decides how sums are ordered, so it is the
# same for all batch sizes and numbers of devices, and the results are the same bit for bit.
_AT_ONCE = 8


class Classifier:
    """A trained model on this machine's devices."""

    def __init__(self, model: Trained, size: int, batch_size: int):
        """Reads the weights.

        Args:
          model: of a benchmark that classifies.
          size: the side of its images in pixels.
          batch_size: images per call, rounded up to a multiple of 8 for each device.
        """
        classify = model.benchmark.uses.classify
        mesh = meshes.make(BATCH_AXES, 1)
        unit = _AT_ONCE * mesh.size
        self.batch_size = -(-batch_size // unit) * unit
        self._shape = (self.batch_size, size, size, 3)
        self._sharding = meshes.batch_sharding(mesh)
        weights = model.params, model.model_state
        self._weights = jax.device_put(weights, meshes.replicated(mesh))

        def predict(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
            def at_once(images: jax.Array) -> dict[str, jax.Array]:
                return classify(params, model_state, images)

            images = batch["image"].reshape(-1, _AT_ONCE, *self._shape[1:])
            parts = jax.lax.map(at_once, images)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)

        self._step = step.make_predict_step(predict, mesh)

    def compile(self) -> None:
        """Compiles for the one shape of a batch."""
        batch = {
            "image": jax.ShapeDtypeStruct(self._shape, np.uint8, sharding=self._sharding),
            "mask": jax.ShapeDtypeStruct(self._shape[:1], jnp.float32, sharding=self._sharding),
        }
        self._step = self._step.lower(*self._weights, batch).compile()

    def __call__(self, images: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(logits f32[n, classes], features f32[n, channels]) of n uint8[size, size, 3], RGB.

        n is at most `batch_size`.
        """
        batch = np.zeros(self._shape, np.uint8)
        batch[: len(images)] = images
        mask = np.ones(self.batch_size, np.float32)
        arrays = jax.device_put({"image": batch, "mask": mask}, self._sharding)
        rows = self._step(*self._weights, arrays)
        logits, features = np.asarray(rows["logits"]), np.asarray(rows["features"])
        return logits[: len(images)], features[: len(images)]
