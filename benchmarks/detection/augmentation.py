"""Augmentation of both detectors: `config.augmentation`, and the colours of training images.

Brightness, contrast, saturation and hue are linear maps of a pixel (contrast also needs the mean of
the image). In this order they combine into one 3x3 matrix and one offset per image, so that an
image is read twice and no intermediate image exists. Values are clipped once, at the end.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The largest change of the colours: of torchvision's ColorJitter in the SSD reference of MLPerf.
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = 0.125, 0.5, 0.5, 0.05
# The weights of red, green and blue in the luma: ITU-R BT.601.
_LUMA = np.array([0.299, 0.587, 0.114])
_YIQ = np.array([_LUMA, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])  # NTSC
# A turn of the chroma plane by the angle a is GREY + cos(a) * CHROMA + sin(a) * TURNED.
_GREY = np.linalg.inv(_YIQ) @ np.diag([1.0, 0, 0]) @ _YIQ
_CHROMA = np.linalg.inv(_YIQ) @ np.diag([0, 1.0, 1.0]) @ _YIQ
_TURNED = np.linalg.inv(_YIQ) @ np.array([[0, 0, 0], [0, 0, 1.0], [0, -1.0, 0]]) @ _YIQ


class Preset(NamedTuple):
    """How strong the augmentation is that a value of `config.augmentation` names."""

    colours: float  # times the largest change of the colours
    # SSD: half of the images are put on a larger canvas, at most so many times as high and wide
    # (Liu et al. 2016, arXiv:1512.02325, section 3.6, up to 4).
    zoom_out: float
    # Mask R-CNN: the least and the largest factor of an image's size (arXiv:2012.07177, 0.1 to 2).
    scales: tuple[float, float]


PRESETS = {
    "light": Preset(1.0, 1.5, (0.9, 1.1)),
    "medium": Preset(1.0, 2.0, (0.8, 1.25)),
    "strong": Preset(1.5, 4.0, (0.5, 2.0)),
}


def jitter(
    images: jax.Array, signed: jax.Array, strength: float, areas: jax.Array | None = None
) -> jax.Array:
    """`jitter_colours` by random numbers `signed` f32[b, 4] in [-1, 1).

    At strength 1, brightness is 0.875 to 1.125, contrast and saturation 0.5 to 1.5, hue -0.05 to
    0.05 turns.
    """
    return jitter_colours(
        images,
        brightness=1 + strength * _BRIGHTNESS * signed[:, 0],
        contrast=1 + strength * _CONTRAST * signed[:, 1],
        saturation=1 + strength * _SATURATION * signed[:, 2],
        hue=strength * _HUE * signed[:, 3],
        areas=areas,
    )


def jitter_colours(
    images: jax.Array,
    brightness: jax.Array,
    contrast: jax.Array,
    saturation: jax.Array,
    hue: jax.Array,
    areas: jax.Array | None = None,
) -> jax.Array:
    """Color jitter, uint8[b, H, W, 3] -> float32[b, H, W, 3] in 0..255; H * W is at most 2^24.

    Of `areas` f32[b] pixels of an image the others are zeros, which the mean leaves out.
    Each strength is f32[b]. In the order of the arguments: brightness multiplies all values;
    contrast multiplies the distance to the mean luma of the image, saturation the distance to the
    luma of the pixel; hue turns the chroma plane (YIQ) by so many turns, red towards green. 1, 1, 1
    and 0 change nothing. torchvision's ColorJitter also clips between these steps, takes them in
    random order, and turns the hue of HSV.
    """
    angle = 2 * jnp.pi * hue
    grey, chroma, turned = (jnp.asarray(v, jnp.float32) for v in (_GREY, _CHROMA, _TURNED))
    factors = [f[:, None, None] for f in (jnp.cos(angle) * saturation, jnp.sin(angle) * saturation)]
    matrix = grey + factors[0] * chroma + factors[1] * turned
    matrix *= (brightness * contrast)[:, None, None]
    # Sums of integers are the same in any order, so that devices of another number agree.
    sums = jnp.sum(images.astype(jnp.uint32), axis=(1, 2), dtype=jnp.uint32)
    count = images.shape[1] * images.shape[2] if areas is None else areas[:, None]
    means = sums.astype(jnp.float32) / count
    luma = jnp.sum(means * jnp.asarray(_LUMA, jnp.float32), axis=1)
    offset = (1 - contrast) * brightness * luma
    # Not a matrix product, which a TPU would compute in bfloat16 with 3 of its 128 columns.
    values = images.astype(jnp.float32)
    terms = [values[..., i, None] * matrix[:, None, None, :, i] for i in range(3)]
    return jnp.clip(terms[0] + terms[1] + terms[2] + offset[:, None, None, None], 0, 255)
