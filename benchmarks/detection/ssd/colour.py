"""Changes the colours of images at random strengths, on the device.

Brightness, contrast, saturation and hue are linear maps of a pixel (contrast also needs the mean of
the image). In this order they combine into one 3x3 matrix and one offset per image, so that an
image is read twice and no intermediate image exists. Values are clipped once, at the end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# Of red, green and blue in the brightness that people see: ITU-R BT.601.
_LUMA = np.array([0.299, 0.587, 0.114])
_YIQ = np.array([_LUMA, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])  # NTSC
# A turn of the chroma plane by the angle a is GREY + cos(a) * CHROMA + sin(a) * TURNED.
_GREY = np.linalg.inv(_YIQ) @ np.diag([1.0, 0, 0]) @ _YIQ
_CHROMA = np.linalg.inv(_YIQ) @ np.diag([0, 1.0, 1.0]) @ _YIQ
_TURNED = np.linalg.inv(_YIQ) @ np.array([[0, 0, 0], [0, 0, 1.0], [0, -1.0, 0]]) @ _YIQ


def jitter(
    images: jax.Array,
    brightness: jax.Array,
    contrast: jax.Array,
    saturation: jax.Array,
    hue: jax.Array,
) -> jax.Array:
    """uint8[b, H, W, 3] -> float32[b, H, W, 3] in 0..255; H * W is at most 2^24.

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
    means = sums.astype(jnp.float32) / (images.shape[1] * images.shape[2])
    luma = jnp.sum(means * jnp.asarray(_LUMA, jnp.float32), axis=1)
    offset = (1 - contrast) * brightness * luma
    # Not a matrix product, which a TPU would compute in bfloat16 with 3 of its 128 columns.
    values = images.astype(jnp.float32)
    terms = [values[..., i, None] * matrix[:, None, None, :, i] for i in range(3)]
    return jnp.clip(terms[0] + terms[1] + terms[2] + offset[:, None, None, None], 0, 255)
