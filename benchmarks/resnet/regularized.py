"""Regularisation of training batches on the device: RandAugment, mixup, erasing and others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.base import HostBatch, Spec
from benchmarks.resnet.input import augment, mixing
from benchmarks.resnet.input.mixing import Mixed
from benchmarks.resnet.sizes import Sized
from ops.order import hash64

_DRAWS = 31  # hashed with the seed, apart from the order of the images
_GROUP = 32  # images of a device that get the same operation of `augmentation`


class Regularized(Sized):
    """A classifier whose settings have the keys `augmentation`, `mixup`, `cutmix`,
    `random_erasing`, `colout`, `drop_path` and `dropout`.

    With any of them a training batch has the leaf "draw" int32[b], a seed of each row in this step.
    """

    @property
    def draws(self) -> bool:
        """Whether training batches have the leaf "draw"."""
        keys = ("augmentation", "mixup", "cutmix", "random_erasing", "colout")
        return any(getattr(self.settings, key) for key in (*keys, "drop_path", "dropout"))

    def augmented(self, images: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Training images uint8[b, h, w, 3] after the operations of `augmentation`."""
        if not (text := self.settings.augmentation):
            return images
        groups = len(images) // math.gcd(len(images), _GROUP)
        return augment.apply(augment.Policy.parse(text), images, batch["draw"], groups)

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        specs = super().batch_spec(split, batch_size)
        if split == "eval" or not self.draws:
            return specs
        draw = {"draw": jax.ShapeDtypeStruct((batch_size,), np.int32)}
        return tuple(spec | draw for spec in specs)

    def drawn(self, batches: Iterator[HostBatch], start_step: int) -> Iterator[HostBatch]:
        """Training batches from a step on, with the leaf "draw".

        It is a function of (seed, step, id) and, of an example that is repeated, of the copy.
        """
        if not self.draws:
            return batches

        def draw(step: int, ids: np.ndarray) -> np.ndarray:
            mixed = hash64(self.settings.seed, _DRAWS, step, ids, _copies(ids))
            return (mixed >> np.uint64(33)).astype(np.int32)

        steps = zip(itertools.count(start_step), batches, strict=False)
        return ({**batch, "draw": draw(step, batch["id"])} for step, batch in steps)

    def varied(self, inputs: jax.Array, batch: Mapping[str, jax.Array]) -> Mixed:
        """Normalised training images [b, h, w, 3] after all of this, with their labels."""
        settings, labels = self.settings, batch["label"]
        if not self.draws:
            return Mixed(inputs, labels, None, None)
        seeds = batch["draw"]
        if settings.random_erasing:
            inputs = mixing.erase(inputs, seeds, settings.random_erasing)
        inputs = mixing.colout(inputs, seeds, settings.colout)
        return mixing.mix(inputs, labels, seeds, mixup=settings.mixup, cutmix=settings.cutmix)


def _copies(ids: np.ndarray) -> np.ndarray:
    """int64[n]: how often the id of each row came before; the copies of one are on one host."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    copies = np.empty(len(ids), np.int64)
    copies[order] = np.arange(len(ids)) - np.searchsorted(ordered, ordered)
    return copies


def remedies(settings: Any) -> dict[str, str]:
    """A remedy for each key with a value that cannot work."""
    found = {}
    if settings.batch_norm == "gram" and (settings.blur_pool or settings.drop_path):
        found["batch_norm"] = "has no form with blur_pool or drop_path; use 'plain'"
    if settings.colout and settings.space_to_depth:
        found["colout"] = "leaves sides that are odd, which space_to_depth cannot take; use 0"
    if settings.augmentation:
        try:
            augment.Policy.parse(settings.augmentation)
        except ValueError as error:
            found["augmentation"] = str(error)
        if settings.decoded_cache:
            found["augmentation"] = "works before images are cropped; use decoded_cache=0"
    return found
