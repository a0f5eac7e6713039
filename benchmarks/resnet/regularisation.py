"""Disturbs training batches on the device: RandAugment, mixup, erasing and others.

All draws follow from the leaf "draw" int32[b] of a batch, a seed for each row in this step, so that
they belong to the example.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks.base import HostBatch
from benchmarks.resnet.input import augment, mixing
from benchmarks.resnet.input.mixing import Mixed
from benchmarks.resnet.settings import Regularisation
from ops.order import hash64

_DRAWS = 31  # hashed with the seed, apart from the order of the images
_GROUP = 32  # images of a device that get the same operation of `augmentation`


def drawn(batches: Iterator[HostBatch], seed: int, start_step: int) -> Iterator[HostBatch]:
    """Training batches from a step on, with the leaf "draw".

    It is a function of (seed, step, id) and, of an example that is repeated, of the copy.
    """

    def draw(step: int, ids: np.ndarray) -> np.ndarray:
        mixed = hash64(seed, _DRAWS, step, ids, _copies(ids))
        return (mixed >> np.uint64(33)).astype(np.int32)

    steps = zip(itertools.count(start_step), batches, strict=False)
    return ({**batch, "draw": draw(step, batch["id"])} for step, batch in steps)


def augmented(policy: str, images: jax.Array, seeds: jax.Array) -> jax.Array:
    """Training images uint8[b, h, w, 3] after the operations of `config.augmentation`."""
    groups = len(images) // math.gcd(len(images), _GROUP)
    return augment.apply(augment.Policy.parse(policy), images, seeds, groups)


def mixed(keys: Regularisation, images: jax.Array, labels: jax.Array, seeds: jax.Array) -> Mixed:
    """Normalised training images [b, h, w, 3] after all the rest, with their labels."""
    if keys.random_erasing:
        images = mixing.erase(images, seeds, keys.random_erasing)
    return mixing.mix(images, labels, seeds, mixup=keys.mixup, cutmix=keys.cutmix)


def _copies(ids: np.ndarray) -> np.ndarray:
    """int64[n]: how often the id of each row came before; the copies of one are on one host."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    copies = np.empty(len(ids), np.int64)
    copies[order] = np.arange(len(ids)) - np.searchsorted(ordered, ordered)
    return copies
