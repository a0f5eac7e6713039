"""Heat maps: which part of a picture speaks for a class (Grad-CAM).

Selvaraju et al. 2016 (arXiv:1610.02391), with the normalisation of the package pytorch-grad-cam.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import models


def evidence(
    model: models.ResNet, variables: Mapping[str, Any], inputs: jax.Array, classes: jax.Array
) -> jax.Array:
    """What each cell of the last stage adds to the logit of a class, f32[b, h, w]; below 0, too.

    The stage's output times the mean of the logit's gradient over its area. The output is what the
    global mean takes: in PyTorch's ResNets that of `layer4[-1]`; of v2 that of the BatchNorm and
    ReLU behind the last block, timm's `norm`.

    Args:
      inputs: normalised images, float[b, H, W, 3].
      classes: int[b], of each image.
    """
    outputs: Any = model.apply(variables, inputs, False, method="endpoints")
    *_, last = outputs.values()

    def logits(last: jax.Array) -> jax.Array:
        features = models.area_mean(last)
        every: Any = model.apply(variables, features, method=lambda model, x: model.head(x))
        return jnp.take_along_axis(every, classes[:, None], axis=1)

    (gradient,) = jax.vjp(logits, last)[1](jnp.ones((len(last), 1), jnp.float32))
    weights = jnp.mean(gradient, axis=(1, 2), dtype=jnp.float32)
    highest = jax.lax.Precision.HIGHEST  # by default accelerators round float32 operands
    return jnp.einsum("bhwc,bc->bhw", last.astype(jnp.float32), weights, precision=highest)


def shares(evidence: jax.Array, size: int) -> jax.Array:
    """Evidence f32[b, h, w] for a class in pixels, f32[b, size, size] from 0 to 1.

    What speaks against the class is 0, as all is where nothing speaks for it, or a value is NaN.
    """
    heat = jax.image.resize(jax.nn.relu(evidence), (len(evidence), size, size), "bilinear")
    heat -= jnp.min(heat, axis=(1, 2), keepdims=True)
    most = jnp.max(heat, axis=(1, 2), keepdims=True)
    return jnp.where(most > 0, heat / most, 0)
