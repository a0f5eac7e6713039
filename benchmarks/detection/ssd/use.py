"""What a trained SSD can be used for: as any detector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from benchmarks.detection import program
from benchmarks.detection.records import Image
from benchmarks.detection.ssd import input_pipeline, steps
from benchmarks.detection.use import DetectorUses
from ops.shards import tensorflow

if TYPE_CHECKING:
    from ops.portable import SingleShot


class SsdUses(DetectorUses):
    """The uses of an SSD."""

    def leaves(self, image: Image, upright: bool) -> dict[str, Any]:
        del upright
        tf = tensorflow()
        whole = tf.concat([[0, 0], image.size], axis=0)
        keys = self._benchmark.settings.images
        pixels = input_pipeline.resized(image, whole, keys, True)
        return {"image": pixels, "size": tf.cast(image.size, tf.float32)}

    def resized(self, photo: jax.Array, upright: bool) -> dict[str, jax.Array]:
        del upright
        keys, size = self._benchmark.settings.images, program.sides(photo)
        shape = (keys.image_size, keys.image_size)
        image = program.scaled(photo, shape, keys.image_size / size, keys.antialias)
        return {"image": image, "size": size}

    def single_shot(self, params: Any, model_state: Any) -> SingleShot:
        return steps.make(self._benchmark.settings, params, model_state)
