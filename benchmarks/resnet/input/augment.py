"""RandAugment and TrivialAugment on the device, one operation per group of images.

`jax.vmap` of `jax.lax.switch` would compute all operations for every image. So the images of a
group share the operation, which the seed of the first one draws; all else is drawn per image.
Sources, and what differs from them:

* "randaugment:NxM": Cubuk et al. 2019 (arXiv:1909.13719) as in tensorflow/tpu's EfficientNet and
  tensorflow/models' ResNet-RS: N operations of strength M of 10. Without Cutout.
* "randaugment:NxM:STD": timm's form ("rand-m6-mstd0.5-inc1" is 2x6:0.5, for N is 2 there). The
  strengths are normal with this deviation, effects grow with the strength, and each of the N
  operations changes an image with probability 0.5.
* "trivialaugment": TrivialAugmentWide of torchvision, Mueller and Hutter 2021 (arXiv:2103.10158):
  one operation, its strength one of 31.

All interpolate linearly, where tensorflow/tpu takes the nearest pixel and timm sometimes a cubic.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.resnet.input import image_ops
from common.hashing import hash32, uniform

FORMS = "'light', 'medium', 'strong', 'trivialaugment', 'randaugment:2x9' or 'randaugment:2x6:0.5'"
_SITE = 1909  # apart from other draws from the same seeds

Effect = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which operations change an image, and how much."""

    kind: str  # "tensorflow", "timm" or "trivial"
    layers: int  # how many operations an image gets
    strength: float = 0.0  # 0 to 10; "trivial" has none
    deviation: float = 0.0  # standard deviation of the strength, for "timm"
    # The colour, 0 to 255, of pixels whose source lies outside the image: in TensorFlow grey, in
    # timm the mean of ImageNet, in torchvision black.
    fill: image_ops.Fill = (0.0, 0.0, 0.0)

    @staticmethod
    def parse(text: str) -> Policy:
        """The policy of `config.augmentation`; ValueError's message is the fix."""
        if text == "trivialaugment":
            return Policy("trivial", 1)
        number = r"(\d+(?:\.\d*)?)"
        match = re.fullmatch(rf"randaugment:([1-9]\d?)x{number}(?::{number})?", text)
        if not match:
            raise ValueError(f"use {FORMS}")
        layers, strength, deviation = int(match[1]), float(match[2]), match[3]
        if strength > 10:
            raise ValueError(f"the strength is {strength:g}; use 0 to 10")
        if deviation:
            return Policy("timm", layers, strength, float(deviation), (124.0, 116.0, 104.0))
        return Policy("tensorflow", layers, strength, fill=(128.0, 128.0, 128.0))


@dataclasses.dataclass(frozen=True)
class Magnitude:
    """The magnitudes of an operation, which differ from `start` by at most `reach`."""

    start: float
    reach: float
    direction: int = 1  # 1: up with the strength, -1: down, 0: the image's sign decides
    rounding: float | None = None  # added before the change is rounded down

    def __call__(self, strength: jax.Array, sign: jax.Array) -> jax.Array:
        """f32[b] of strengths f32[b] in 0..10 and signs f32[b], -1 or 1."""
        change = self.reach * (strength / 10)
        if self.rounding is not None:
            change = jnp.floor(change + self.rounding)
        return self.start + (self.direction or sign) * change


@jax.named_scope("augmentation")
def apply(policy: Policy, images: jax.Array, seeds: jax.Array, groups: int) -> jax.Array:
    """Changes images, each as a function of its seed and of the first seed of its group.

    Args:
      images: uint8 or float32 [b, h, h, 3] RGB in 0..255, before normalisation.
      seeds: int32[b].
      groups: the rows are cut into so many groups of consecutive rows. For results that do not
        depend on the number of devices, let b / groups be the same on each number.

    Returns:
      Images of the same shape and dtype; uint8 is rounded to the nearest level.
    """
    if len(images) % groups:
        raise ValueError(f"{groups} groups do not divide {len(images)} images")
    space = _space(policy, images.shape[1])
    branches = [functools.partial(_change, *entry, policy.fill) for entry in space.items()]

    def change(group: tuple[jax.Array, jax.Array]) -> jax.Array:
        original, seeds = group
        values = original.astype(jnp.float32)
        for layer in range(policy.layers):
            index = draw_operation(seeds[0], layer, len(branches))
            strength, sign, is_used = _draw(policy, seeds, layer)
            changed = jax.lax.switch(index, branches, values, strength, sign)
            values = jnp.where(is_used[:, None, None, None], changed, values)
        is_integer = jnp.issubdtype(original.dtype, jnp.integer)
        return (jnp.round(values) if is_integer else values).astype(original.dtype)

    rows = images.reshape(groups, -1, *images.shape[1:]), seeds.reshape(groups, -1)
    return jax.lax.map(change, rows).reshape(images.shape)


def draw_operation(seed: jax.Array, layer: int, count: int) -> jax.Array:
    """int32 in 0..count-1: the operation of a group, for the seed of its first image."""
    return (hash32(seed, _SITE, layer, 0) % count).astype(jnp.int32)


def _draw(policy: Policy, seeds: jax.Array, layer: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """f32[b] strengths in 0..10, f32[b] signs, and bool[b], whether an image is changed at all."""
    chance, side, used = (uniform(seeds, _SITE, layer, word) for word in (1, 2, 3))
    sign = jnp.where(side < 0.5, -1.0, 1.0)
    always = jnp.ones(len(seeds), bool)
    if policy.kind == "timm":
        normal = jnp.sqrt(2.0) * jax.lax.erf_inv(2 * chance - 1 + 2.0**-24)
        return jnp.clip(policy.strength + policy.deviation * normal, 0, 10), sign, used < 0.5
    if policy.kind == "trivial":
        return jnp.floor(31 * chance) / 3, sign, always
    return jnp.full(len(seeds), policy.strength, jnp.float32), sign, always


def _change(
    effect: Effect,
    magnitude: Magnitude,
    fill: image_ops.Fill,
    images: jax.Array,
    strength: jax.Array,
    sign: jax.Array,
) -> jax.Array:
    """The images after one operation."""
    changes = magnitude(strength, sign)
    if effect in (image_ops.shear_x, image_ops.shear_y, image_ops.rotate):
        return effect(images, changes, fill, magnitude.reach)  # faster if it reaches little
    if effect in (image_ops.translate_x, image_ops.translate_y):
        return effect(images, changes, fill)
    return effect(images, changes)


# The operations of each form with their magnitudes, in the order in which draws count them.

_PLAIN = (image_ops.autocontrast, image_ops.equalize, image_ops.invert)
_ENHANCERS = (image_ops.colour, image_ops.contrast, image_ops.brightness, image_ops.sharpness)
_UNUSED = Magnitude(0, 0)
_DOWN, _NEAREST = 1e-3, 0.5  # float32 may be just below an integer


def _space(policy: Policy, size: int) -> dict[Effect, Magnitude]:
    """The operations of a policy for images of size x size pixels."""
    if policy.kind == "trivial":
        return {
            image_ops.identity: _UNUSED,
            **dict.fromkeys(_PLAIN[:2], _UNUSED),
            **dict.fromkeys(_ENHANCERS, Magnitude(1, 0.99, 0)),
            **_geometry(0.99, Magnitude(0, 32, 0, _DOWN), 135),
            image_ops.posterize: Magnitude(8, 6, -1, _NEAREST),
            image_ops.solarize: Magnitude(255, 255, -1),
        }
    if policy.kind == "timm":
        return {
            **dict.fromkeys(_PLAIN, _UNUSED),
            **dict.fromkeys(_ENHANCERS, Magnitude(1, 0.9, 0)),
            **_geometry(0.3, Magnitude(0, 0.45 * size, 0), 30),
            image_ops.posterize: Magnitude(4, 4, -1, _DOWN),
            image_ops.solarize: Magnitude(256, 256, -1, _DOWN),
            image_ops.solarize_add: Magnitude(0, 110, 1, _DOWN),
        }
    return {
        **dict.fromkeys(_PLAIN, _UNUSED),
        **dict.fromkeys(_ENHANCERS, Magnitude(0.1, 1.8)),
        **_geometry(0.3, Magnitude(0, 100, 0), 30),
        image_ops.posterize: Magnitude(0, 4, 1, _DOWN),
        image_ops.solarize: Magnitude(0, 256, 1, _DOWN),
        image_ops.solarize_add: Magnitude(0, 110, 1, _DOWN),
    }


def _geometry(shear: float, pixels: Magnitude, degrees: float) -> dict[Effect, Magnitude]:
    """Shears, translations and rotations up to the given magnitudes."""
    return {
        image_ops.shear_x: Magnitude(0, shear, 0),
        image_ops.shear_y: Magnitude(0, shear, 0),
        image_ops.translate_x: pixels,
        image_ops.translate_y: pixels,
        image_ops.rotate: Magnitude(0, degrees, 0),
    }
