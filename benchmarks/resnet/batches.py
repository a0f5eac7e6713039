"""The batches of images: their arrays, how they are made, and what the network gets of them.

Also what they need of a host: bytes of memory, and CPU time per image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import input_pipeline
from benchmarks.base import HostBatch, Spec
from benchmarks.resnet.input import cache, regularisation
from benchmarks.resnet.input.regularisation import Mixed
from benchmarks.resnet.settings import Images, Settings
from benchmarks.resnet.sizes import Sizes
from common.data.order import Order
from input_pipeline import Source

# CPU time per training image, fitted to the rows of docs/performance.md at 128, 160 and 224 pixels:
# (for each image, for each of its pixels after resizing).
_MICROSECONDS = {"exact": (1500.0, 0.018), "fast": (1430.0, 0.0077)}
_MICROSECONDS_CACHED = 230.0  # for an image of 256 x 256 pixels in memory


def specs(settings: Settings, split: str, batch_size: int) -> tuple[Spec, ...]:
    """See `Benchmark.batch_spec`: a kind of batch for each size of the images."""
    images = settings.images

    def spec(side: int, others: Mapping[str, tuple[tuple[int, ...], Any]]) -> Spec:
        leaves = {"image": ((side, side, 3), np.uint8), "label": ((), np.int32)}
        leaves |= {"id": ((), np.int32), **others}
        return {k: jax.ShapeDtypeStruct((batch_size, *s), d) for k, (s, d) in leaves.items()}

    if split == "eval":
        return (spec(images.spec.size, {"mask": ((), np.float32)}),)
    others: dict[str, tuple[tuple[int, ...], Any]] = {"flip": ((), np.bool_)}
    if settings.objective.class_weights:
        others["weight"] = ((), np.float32)
    if settings.regularisation.is_used:
        others["draw"] = ((), np.int32)
    if not images.decoded_cache:
        return tuple(spec(side, others) for side in images.sides)
    windows = [{name: ((4,), np.float32)} for name in cache.window_names(images)]
    return tuple(spec(images.decoded_cache, others | window) for window in windows)


def order(settings: Settings, counts: tuple[int, ...], batch_size: int) -> Order:
    """The order of the training images in files of so many images."""
    keys = settings.data
    # A host with decoded images in memory holds all of its images.
    buffer = None if settings.images.decoded_cache else keys.shuffle_buffer_size
    return Order.make(counts, keys.seed, batch_size, keys.input_streams, buffer, keys.repeats)


def train(
    settings: Settings,
    source: Source,
    order: Order,
    streams: range,
    start_step: int,
    sizes: Sizes | None,
) -> Iterator[HostBatch]:
    """Endless training batches of some streams; `sizes` has the size of the images at each step."""
    images = settings.images
    if images.decoded_cache:
        batches = cache.train_batches(source, images, order, streams, start_step, sizes)
    else:
        size_at = sizes.on_host if sizes else None
        batches = input_pipeline.train_batches(source, images, order, streams, start_step, size_at)
    if not settings.regularisation.is_used:
        return batches
    return regularisation.add_draws(batches, settings.data.seed, start_step)


def inputs(settings: Settings, batch: Mapping[str, jax.Array], dtype: Any) -> Mixed:
    """What the network gets of a training batch: dtype[b, h, w, 3], with one or two labels."""
    images, keys = settings.images, settings.regularisation
    if images.decoded_cache:
        pixels = cache.crop(batch, dtype, images)
    else:
        pixels = batch["image"]
        if keys.augmentation:
            pixels = regularisation.augment_images(keys.augmentation, pixels, batch["draw"])
        pixels = input_pipeline.normalize(pixels, batch["flip"], dtype, images.spec)
    if not keys.is_used:
        return Mixed(pixels, batch["label"], None, None)
    return regularisation.erase_and_mix(keys, pixels, batch["label"], batch["draw"])


def host_bytes(
    settings: Settings, split: str, batch_size: int, num_shards: int
) -> dict[tuple[str, ...], int]:
    """What eight batches need in a host's memory: see `Benchmark.host_bytes`."""
    is_cached = split == "train" and settings.images.decoded_cache
    key = "decoded_cache" if is_cached else size_key(settings, split)
    return {
        (f"{split}_batch_size", key): 8 * batch_size * image_bytes(settings, split) // num_shards
    }


def image_bytes(settings: Settings, split: str) -> int:
    """The bytes of the largest image in a batch."""
    return max(spec["image"].size for spec in specs(settings, split, 1))


def size_key(settings: Settings, split: str) -> str:
    """The key that decides the size of a split's images."""
    key = "image_sizes" if split == "train" else "eval_image_size"
    return key if getattr(settings.images, key) else "image_size"


def input_rates(images: Images) -> tuple[Mapping[str, float], ...]:
    """Images per second for each size: see `Hints.input_rates`.

    The figures of docs/performance.md, for JPEGs of 500 x 375 pixels and 110 KB.
    """
    cache = images.decoded_cache or 256
    cached = {f"decoded_cache={cache}": 1e6 / (_MICROSECONDS_CACHED * (cache / 256) ** 2)}
    costs = _MICROSECONDS.items()
    return tuple(
        {mode: 1e6 / (image + pixel * side**2) for mode, (image, pixel) in costs} | cached
        for side in images.sides
    )
