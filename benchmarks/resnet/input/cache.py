"""Decoded images in memory, for `config.decoded_cache`: the devices crop and resize them.

The first epoch decodes all of a host's images; after that the host only copies.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.resnet.settings import Images
from benchmarks.resnet.sizes import Sizes
from common.console import Progress
from common.data.decoding import Batch, Reader, fixed_options
from common.data.order import Order, example_numbers
from common.data.shards import tensorflow
from common.images import pixels
from input_pipeline import Source, normalize

_log = logging.getLogger("tpu_suite")


def train_batches(
    source: Source,
    images: Images,
    order: Order,
    streams: range,
    start_step: int,
    sizes: Sizes | None = None,
) -> Iterator[Batch]:
    """Endless training batches of some streams, whose images are decoded into memory first.

    Yields image uint8[h, cache, cache, 3], label int32[h], id int32[h], flip bool[h], host_seconds
    float32[h] and the training crop, window float32[h, 4] (y, x, height, width) in pixels of the
    image in memory. With `sizes` the window's name tells the size: see `window_names`.
    """

    def draw(shape: Any, seeds: Any) -> dict[str, Any]:
        window = images.window(shape[0], shape[1], seeds[:2])
        return {"window": window, "flip": images.flip(seeds)}

    batches = _drawn(source, images, order, streams, start_step, draw)
    if not sizes:
        return batches
    steps = enumerate(batches, start_step)
    return (_renamed(batch, f"window_{sizes.at(step)}") for step, batch in steps)


def window_names(images: Images) -> list[str]:
    """The name of the windows in batches of each size.

    The arrays of a batch have the same shapes at all sizes. So the name tells the size, where there
    are several.
    """
    return [f"window_{side}" for side in images.sides] if images.image_sizes else ["window"]


def _renamed(batch: Batch, window: str) -> Batch:
    return {window if name == "window" else name: values for name, values in batch.items()}


def crop(batch: Mapping[str, jax.Array], dtype: Any, images: Images) -> jax.Array:
    """The images of a batch of `train_batches` -> dtype[b, size, size, 3], what a model expects."""
    (name,) = (name for name in batch if name.startswith("window"))
    size = int(name.partition("_")[2] or images.image_size)
    cropped = crop_on_device(batch["image"], batch[name], batch["flip"], size, dtype)
    return normalize(cropped, None, dtype, images.spec)


def _drawn(
    source: Source,
    images: Images,
    order: Order,
    streams: range,
    start_step: int,
    draw: Callable[[Any, Any], dict[str, Any]],
) -> Iterator[Batch]:
    """Endless batches of images from memory, with the tensors of `draw(shape, seeds)`.

    `shape` int32[2] has an image's height and width. "window" is scaled to the image in memory.
    """
    tf, cores, side = tensorflow(), os.cpu_count() or 1, images.decoded_cache
    cache = ImageCache.fill(source, side, order, streams, images.reduced_decoding)

    def plan() -> Iterator[Any]:
        for ids, seeds in order.steps(streams, start_step):
            yield ids, seeds, cache.shapes[cache.rows(ids)]

    def row(example: Any, seeds: Any, shape: Any) -> dict[str, Any]:
        drawn, scale = draw(shape, seeds), side / tf.cast(shape, tf.float32)
        window = tf.cast(drawn["window"], tf.float32) * tf.concat([scale, scale], 0)
        return drawn | {"window": window, "id": tf.cast(example, tf.int32)}

    kinds = ([None], tf.int64), ([None, 3], tf.int32), ([None, 2], tf.int32)
    signature = tuple(tf.TensorSpec(*kind) for kind in kinds)
    host_batch = len(streams) * order.rows
    draws = tf.data.Dataset.from_generator(plan, output_signature=signature).unbatch()
    draws = draws.map(row, num_parallel_calls=cores).batch(host_batch).prefetch(2)
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for batch in draws.with_options(fixed_options()).as_numpy_iterator():
            begin, rows = time.monotonic(), cache.rows(batch["id"])
            batch |= {"image": cache.gather(rows, pool), "label": cache.labels[rows]}
            seconds = (time.monotonic() - begin) * cores / host_batch
            yield batch | {"host_seconds": np.full(host_batch, seconds, np.float32)}


@dataclasses.dataclass(frozen=True)
class ImageCache:
    """n decoded images, in the order of their ids."""

    ids: np.ndarray  # int64[n], ascending
    images: np.ndarray  # uint8[n, side, side, 3]
    shapes: np.ndarray  # int32[n, 2], decoded height and width before the image was made square
    labels: np.ndarray  # int32[n]

    @classmethod
    def fill(
        cls, source: Source, side: int, order: Order, streams: range, is_reduced: bool
    ) -> ImageCache:
        """Decodes every example of some streams, which must be fixed."""

        def decode(serialized: Any, seeds: Any, only_jpeg: bool) -> dict[str, Any]:
            del seeds  # nothing is cropped
            encoded, label = source.parse(serialized)
            least = side if is_reduced else None
            image = pixels.decode(encoded, only_jpeg=only_jpeg, least_side=least)
            shape = tensorflow().shape(image)[:2]
            return {"image": pixels.shrink(image, side), "shape": shape, "label": label}

        ids = [example_numbers(order.counts, order.runs(stream, 0)) for stream in streams]
        count, longest = sum(map(len, ids)), max(map(len, ids))
        cache = cls(
            np.sort(np.concatenate(ids)),
            np.empty((count, side, side, 3), np.uint8),
            np.empty((count, 2), np.int32),
            np.empty(count, np.int32),
        )
        size, progress = cache.images.nbytes / 1e9, Progress(count)
        _log.info("decoding %s training images into memory, %.1f GB", f"{count:,}", size)
        # An epoch of all streams in small blocks; shorter streams begin their next one.
        reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
        once = dataclasses.replace(order, block=order.rows, repeats=1)
        batches = reader.train_batches(once, streams, 0)
        for step, batch in enumerate(itertools.islice(batches, -(-longest // order.rows)), 1):
            rows = cache.rows(batch["id"])
            cache.images[rows], cache.labels[rows] = batch["image"], batch["label"]
            cache.shapes[rows] = batch["shape"]
            done = min(step * len(rows), count)
            progress.at(done, f"decoding images into memory: {done:,} of {count:,}")
        return cache

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """int64[k]: the rows of the arrays that hold examples `ids`."""
        return np.searchsorted(self.ids, ids)

    def gather(self, rows: np.ndarray, pool: concurrent.futures.Executor) -> np.ndarray:
        """uint8[k, side, side, 3]: the images in `rows`, copied by the pool's threads."""
        images = np.empty((len(rows), *self.images.shape[1:]), np.uint8)

        def copy(part: slice) -> None:
            np.take(self.images, rows[part], axis=0, out=images[part], mode="clip")

        size = max(1, -(-len(rows) // (os.cpu_count() or 1)))
        list(pool.map(copy, [slice(i, i + size) for i in range(0, len(rows), size)]))
        return images


def crop_on_device(
    images: jax.Array, window: jax.Array, flip: jax.Array, size: int, dtype: Any
) -> jax.Array:
    """Crops and resizes with a triangle kernel and antialias, as two matrix products per image.

    The same as Pillow's BILINEAR with `box`, without Pillow's rounding between the two products.
    The products have factors of `dtype` and float32 sums; bfloat16 rounds by up to 2^-9.

    Args:
      images: uint8[b, H, W, 3].
      window: float32[b, 4] (y, x, height, width) in pixels of the image, fractions allowed.
      flip: bool[b], mirrors left to right.

    Returns:
      float32[b, size, size, 3] in 0..255.
    """
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    rows = _weights(window[:, 0], window[:, 2], size, images.shape[1])
    columns = _weights(window[:, 1], window[:, 3], size, images.shape[2])
    columns = jnp.where(flip[:, None, None], columns[:, ::-1], columns)

    def product(terms: str, weights: jax.Array, values: jax.Array) -> jax.Array:
        factors = weights.astype(dtype), values.astype(dtype)
        return jnp.einsum(terms, *factors, precision=precision, preferred_element_type=jnp.float32)

    return product("btx,bsxc->bstc", columns, product("bsy,byxc->bsxc", rows, images))


def _weights(begin: jax.Array, length: jax.Array, size: int, total: int) -> jax.Array:
    """float32[b, size, total]: the weight of each of `total` pixels in each of `size` results."""
    scale = (length / size)[:, None]
    centre = begin[:, None] + (jnp.arange(size) + 0.5) * scale - 0.5
    distance = jnp.abs(jnp.arange(total) - centre[..., None])
    weights = jnp.maximum(1 - distance / jnp.maximum(scale, 1)[..., None], 0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)
