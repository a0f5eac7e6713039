"""A trained detector as a function for other programs, see `ops.portable.Program`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from ops.portable import Arrays, Program

_MEANING = {
    "photo": "RGB, of any size; EXIF must be applied",
    "boxes": "y0, x0, y1, x1 in pixels of the photo",
    "class": "the line of labels.txt, counted from 1",
    "score": "from 0 to 1, the best first; 0 is no detection",
    "masks": "for each cell of the box the probability of the object, times 255",
}


def make(benchmark: Any, uses: Any, weights: Any, upright: bool) -> Program:
    """The program of a detector for wide photos, or for upright ones.

    Args:
      benchmark, uses: the detector and its `benchmarks.detection.use.DetectorUses`.
      weights: (params, model_state).
      upright: whether the photos are higher than wide; all are wide where that is the same.
    """
    weights = jax.tree.map(jnp.asarray, weights)
    both = len(benchmark.image_shapes) == 1

    def compute(inputs: Arrays) -> Arrays:
        leaves = uses.resized(inputs["photo"], upright)
        batch = {name: x[None] for name, x in leaves.items()} | {"image_id": jnp.zeros(1, int)}
        row = benchmark.predict(*weights, batch)
        return {name: row[name][0] for name in _MEANING if name in row}

    def examples(pictures: Sequence[bytes]) -> Sequence[Arrays]:
        photos = [np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in pictures]
        return [{"photo": x} for x in photos if both or (x.shape[0] > x.shape[1]) == upright]

    shape = "wide" if not upright else "upright"
    return Program(
        task="finds objects in photos" if both else f"finds objects in {shape} photos",
        compute=compute,
        inputs={"photo": ("height, width, 3", np.uint8)},
        meaning=_MEANING,
        examples=examples,
    )


def scaled(photo: jax.Array, shape: Sequence[int], scale: jax.Array, antialias: bool) -> jax.Array:
    """uint8[*shape, 3] of uint8[h, w, 3]: bilinear, `scale` f32[2] times as high and as wide.

    As `ops.images.pixels` does on the host; what the photo does not reach is zero.
    """
    place = jnp.zeros(2)
    image = jax.image.scale_and_translate(
        photo.astype(jnp.float32), (*shape, 3), (0, 1), scale, place, "linear", antialias=antialias
    )
    return jnp.floor(image + 0.5).astype(jnp.uint8)


def sides(photo: jax.Array) -> jax.Array:
    """float32[2], the height and width of a photo, also where they are not known yet."""
    return jnp.stack([jnp.asarray(side, jnp.float32) for side in photo.shape[:2]])
