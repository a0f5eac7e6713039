"""The batches of images: their arrays, how they are made, and what the network gets of them.

Also what they need of a host: bytes of memory, and CPU time per image.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import input_pipeline
from benchmarks.base import HostBatch, Spec
from benchmarks.resnet.input import regularisation
from benchmarks.resnet.input.regularisation import Mixed
from benchmarks.resnet.settings import Settings
from benchmarks.resnet.sizes import Sizes
from common.data.order import Order
from input_pipeline import Preprocessing, Source

# CPU time per training image, fitted to the rows of docs/performance.md at 128, 160 and 224 pixels:
# (for each image, for each of its pixels after resizing).
_MICROSECONDS = {"exact": (1500.0, 0.018), "fast": (1430.0, 0.0077)}


def specs(settings: Settings, split: str, batch_size: int) -> tuple[Spec, ...]:
    """The arrays of a batch of this many images, for each size of the images in `split`."""
    sides = (settings.images.spec.size,)
    leaves: dict[str, tuple[tuple[int, ...], Any]] = {"label": ((), np.int32), "id": ((), np.int32)}
    if split == "eval":
        leaves["mask"] = ((), np.float32)
    else:
        sides = settings.images.sides
        leaves["flip"] = ((), np.bool_)
        if settings.objective.class_weights:
            leaves["weight"] = ((), np.float32)
        if settings.regularisation.is_used:
            leaves["draw"] = ((), np.int32)
    return tuple(
        {
            name: jax.ShapeDtypeStruct((batch_size, *shape), dtype)
            for name, (shape, dtype) in {"image": ((side, side, 3), np.uint8), **leaves}.items()
        }
        for side in sides
    )


def train(
    settings: Settings,
    source: Source,
    order: Order,
    streams: range,
    start_step: int,
    sizes: Sizes | None,
) -> Iterator[HostBatch]:
    """Endless training batches of some streams; `sizes` has the size of the images at each step."""
    size_at = sizes.on_host if sizes else None
    batches = input_pipeline.train_batches(
        source, settings.images, order, streams, start_step, size_at
    )
    if not settings.regularisation.is_used:
        return batches
    return regularisation.add_draws(batches, settings.data.seed, start_step)


def inputs(settings: Settings, batch: Mapping[str, jax.Array], dtype: Any) -> Mixed:
    """The images of a training batch for the network, dtype[b, h, w, 3], and their labels."""
    pixels, keys = batch["image"], settings.regularisation
    if keys.augmentation:
        pixels = regularisation.augment_images(keys.augmentation, pixels, batch["draw"])
    pixels = input_pipeline.normalize(pixels, batch["flip"], dtype, settings.images.spec)
    if not keys.is_used:
        return Mixed(pixels, batch["label"], None, None)
    return regularisation.erase_and_mix(keys, pixels, batch["label"], batch["draw"])


def host_bytes(
    settings: Settings, split: str, batch_size: int, num_shards: int
) -> dict[tuple[str, ...], int]:
    """The bytes of eight batches in a host's memory, with the keys that decide them."""
    largest = max(spec["image"].size for spec in specs(settings, split, 1))
    keys = f"{split}_batch_size", size_key(settings, split)
    return {keys: 8 * batch_size * largest // num_shards}


def size_key(settings: Settings, split: str) -> str:
    """The config's key that decides the size of a split's images."""
    key = "image_sizes" if split == "train" else "eval_image_size"
    return key if getattr(settings.images, key) else "image_size"


def input_rates(images: Preprocessing) -> tuple[Mapping[str, float], ...]:
    """Training images that a second of CPU time prepares, for each size, by `preprocessing`.

    The figures of docs/performance.md, for JPEGs of 500 x 375 pixels and 110 KB.
    """
    return tuple(
        {mode: 1e6 / (image + pixel * side**2) for mode, (image, pixel) in _MICROSECONDS.items()}
        for side in images.sides
    )
