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
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.resnet.input import effects
from common.hashing import hash32, uniform

FORMS = "'randaugment:2x9', 'randaugment:2x6:0.5' or 'trivialaugment'"
_GREY, _BLACK = (128.0, 128.0, 128.0), (0.0, 0.0, 0.0)
_MEAN = (124.0, 116.0, 104.0)  # of ImageNet
_SITE = 1909  # apart from other draws from the same seeds

Effect = Callable[..., jax.Array]
# The magnitude f32[b] for strengths f32[b] in 0..10 and signs f32[b], -1 or 1.
Magnitude = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which operations change an image, and how much.

    Attributes:
      kind: "tensorflow", "timm" or "trivial".
      layers: how many operations an image gets.
      strength: 0 to 10; "trivial" has none.
      deviation: of the strength, for "timm".
      fill: the colour, 0 to 255, of pixels whose source lies outside the image; by default that of
        the source: grey, timm's mean of ImageNet, else black.
    """

    kind: str
    layers: int
    strength: float = 0.0
    deviation: float = 0.0
    fill: effects.Fill = _BLACK

    @staticmethod
    def parse(text: str) -> Policy:
        """Reads a policy.

        Raises:
          ValueError: `text` is none; the message is the fix.
        """
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
            return Policy("timm", layers, strength, float(deviation), _MEAN)
        return Policy("tensorflow", layers, strength, fill=_GREY)


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

    Raises:
      ValueError: `groups` does not divide b; or the images are not square.
    """
    if len(images) % groups:
        raise ValueError(f"{groups} groups do not divide {len(images)} images")
    space = _space(policy, images.shape[1])
    branches = [functools.partial(_change, *entry, policy.fill) for entry in space]

    def change(group: tuple[jax.Array, jax.Array]) -> jax.Array:
        original, seeds = group
        values = original.astype(jnp.float32)
        for layer in range(policy.layers):
            index = draw_operation(seeds[0], layer, len(branches))
            strength, sign, is_used = _draw(policy, seeds, layer)
            changed = jax.lax.switch(index, branches, values, strength, sign)
            values = jnp.where(is_used[:, None, None, None], changed, values)
        is_whole = jnp.issubdtype(original.dtype, jnp.integer)
        return (jnp.round(values) if is_whole else values).astype(original.dtype)

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
    fill: effects.Fill,
    images: jax.Array,
    strength: jax.Array,
    sign: jax.Array,
) -> jax.Array:
    more: tuple[Any, ...] = (fill,) if effect in _GEOMETRY else ()
    if effect in _BOUNDED:
        assert isinstance(magnitude, _BothWays)
        more = (*more, magnitude.reach)
    return effect(images, magnitude(strength, sign), *more)


# The magnitudes of each form.

_GEOMETRY = (
    *(effects.shear_x, effects.shear_y, effects.translate_x, effects.translate_y, effects.rotate),
)
_BOUNDED = effects.shear_x, effects.shear_y, effects.rotate  # faster for small magnitudes
_PLAIN = (effects.autocontrast, effects.equalize, effects.invert, effects.identity)
_ENHANCERS = (effects.colour, effects.contrast, effects.brightness, effects.sharpness)
_DOWN, _NEAREST = 1e-3, 0.5  # how a change becomes whole; float32 may be just below a whole number


def _change_of(reach: float, strength: jax.Array, rounding: float | None) -> jax.Array:
    change = reach * (strength / 10)
    return change if rounding is None else jnp.floor(change + rounding)


def _rising(start: float, reach: float, rounding: float | None = None) -> Magnitude:
    return lambda strength, sign: start + _change_of(reach, strength, rounding)


_UNUSED = _rising(0, 0)  # of operations that have no magnitude


def _falling(start: float, reach: float, rounding: float | None = None) -> Magnitude:
    return lambda strength, sign: start - _change_of(reach, strength, rounding)


@dataclasses.dataclass(frozen=True)
class _BothWays:
    """A magnitude that differs from `centre` by at most `reach`."""

    reach: float
    centre: float = 0.0
    rounding: float | None = None

    def __call__(self, strength: jax.Array, sign: jax.Array) -> jax.Array:
        return self.centre + sign * _change_of(self.reach, strength, self.rounding)


def _space(policy: Policy, size: int) -> list[tuple[Effect, Magnitude]]:
    """The operations of a policy with their magnitudes, for images of size x size pixels."""
    makers = {"tensorflow": _tensorflow, "timm": _timm, "trivial": _trivial}
    return list(makers[policy.kind](size).items())


def _geometry(
    shear: float, pixels: float, degrees: float, rounding: tuple[float | None, float | None]
) -> dict[Effect, Magnitude]:
    """Shears, translations and rotations; `rounding` of pixels and of degrees."""
    moved = _BothWays(pixels, rounding=rounding[0])
    reaches = (*(_BothWays(shear),) * 2, moved, moved, _BothWays(degrees, rounding=rounding[1]))
    return dict(zip(_GEOMETRY, reaches, strict=True))


def _tensorflow(size: int) -> dict[Effect, Magnitude]:
    del size
    return {
        **dict.fromkeys(_PLAIN[:3], _UNUSED),
        **dict.fromkeys(_ENHANCERS, _rising(0.1, 1.8)),
        **_geometry(0.3, 100, 30, (None, None)),
        effects.posterize: _rising(0, 4, _DOWN),
        effects.solarize: _rising(0, 256, _DOWN),
        effects.solarize_add: _rising(0, 110, _DOWN),
    }


def _timm(size: int) -> dict[Effect, Magnitude]:
    return {
        **dict.fromkeys(_PLAIN[:3], _UNUSED),
        **dict.fromkeys(_ENHANCERS, _BothWays(0.9, 1)),
        **_geometry(0.3, 0.45 * size, 30, (None, None)),
        effects.posterize: _falling(4, 4, _DOWN),
        effects.solarize: _falling(256, 256, _DOWN),
        effects.solarize_add: _rising(0, 110, _DOWN),
    }


def _trivial(size: int) -> dict[Effect, Magnitude]:
    del size
    return {
        effects.identity: _UNUSED,
        **dict.fromkeys(_PLAIN[:2], _UNUSED),
        **dict.fromkeys(_ENHANCERS, _BothWays(0.99, 1)),
        **_geometry(0.99, 32, 135, (_DOWN, None)),
        effects.posterize: _falling(8, 6, _NEAREST),
        effects.solarize: _falling(255, 255),
    }
