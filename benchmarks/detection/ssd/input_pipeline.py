"""Makes batches of images with boxes from records; each host makes its share of a global batch.

The host draws the crop, decodes only the crop, and resizes it. The device flips, changes the
colours and normalises (`augment`). Training order and augmentation are functions of (seed, step),
see `ops.order`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from benchmarks.detection import settings
from benchmarks.detection.images import normalize
from benchmarks.detection.records import Image, Source
from benchmarks.detection.ssd import colour, crop
from ops import hashing
from ops.decoding import Batch, Reader
from ops.images import pixels
from ops.order import Order
from ops.shards import tensorflow

# The largest change of the colours: of torchvision's ColorJitter in the SSD reference of MLPerf.
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = 0.125, 0.5, 0.5, 0.05
_FLIP = 4  # the number of a draw that no colour uses
Side = Annotated[int, "[1, 4096]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing(settings.Preprocessing):
    """How an image becomes [image_size, image_size, 3]; named as the config's keys."""

    image_size: Side
    crop_side_min: Annotated[float, "(0, 1]"]  # the least side of a crop, as a share of the image's
    max_samples: Annotated[int, "[1, 1e3]"]  # windows that a round of `crop` tries; MLPerf: 1 or 50
    antialias: bool  # whether resizing averages over the pixels, to train and to evaluate

    def resize(self, image: Any) -> Any:
        """uint8[image_size, image_size, 3] of uint8[h, w, 3], bilinear."""
        if self.antialias:
            return pixels.shrink(image, self.image_size)
        size = [self.image_size, self.image_size]
        return tensorflow().ensure_shape(pixels.sample(image, size, "bilinear"), [*size, 3])


def train_batches(
    source: Source,
    preprocessing: Preprocessing,
    order: Order,
    shard: int,
    num_shards: int,
    start_step: int,
) -> Iterator[Batch]:
    """Endless training batches: see `base.Benchmark.train_batches`.

    Yields image uint8[h, size, size, 3]; boxes float32[h, max_boxes, 4] (y0, x0, y1, x1) as shares
    of the image and classes int32[h, max_boxes] from 1, both with zeros at the end; augment
    int32[h], the seed of `augment`; id int32[h]; and host_seconds float32[h].

    Raises:
      DataError: the streams cannot be shared by so many hosts; or a record cannot be decoded or has
        an unknown category (the file and record are named).
    """

    def decode(serialized: Any, seeds: Any, only_jpeg: bool) -> dict[str, Any]:
        image, objects = source.image(serialized), source.objects(serialized)
        draws = crop.draw(seeds, preprocessing.max_samples)
        window = crop.window(objects.boxes, image.size, draws, preprocessing.crop_side_min)
        boxes, classes = crop.cut(*objects, image.size, window, preprocessing.max_boxes)
        scaled = resized(image, window, preprocessing, only_jpeg)
        return {"image": scaled, "boxes": boxes, "classes": classes, "augment": seeds[2]}

    reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
    return reader.train_batches(order, order.share(shard, num_shards), start_step)


def eval_batches(
    source: Source, preprocessing: Preprocessing, batch_size: int, shard: int, num_shards: int
) -> Iterator[Batch]:
    """Every example once over all shards: see `base.Benchmark.eval_batches`.

    Yields image uint8[h, size, size, 3], the whole image; image_id int32[h]; size float32[h, 2],
    the height and width of the original in pixels; id int32[h]; mask float32[h].

    Raises:
      DataError: a record cannot be decoded; the file and record are named.
    """
    tf = tensorflow()

    def decode(serialized: Any, only_jpeg: bool) -> dict[str, Any]:
        image = source.image(serialized)
        whole = tf.concat([[0, 0], image.size], axis=0)
        return {
            "image": resized(image, whole, preprocessing, only_jpeg),
            "image_id": source.image_id(serialized),
            "size": tf.cast(image.size, tf.float32),
        }

    reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
    return reader.eval_batches(batch_size, shard, num_shards)


def resized(image: Image, window: Any, preprocessing: Preprocessing, only_jpeg: bool) -> Any:
    """The window int32[4] (y, x, height, width) of an image, resized."""

    def checked(height: Any, width: Any) -> Any:
        return image.checked(window, tensorflow().stack([height, width]))

    return preprocessing.resize(pixels.decode(image.encoded, checked, only_jpeg=only_jpeg))


def augment(
    images: jax.Array, boxes: jax.Array, seed: jax.Array, random_flip: bool, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Flips and changes the colours of training images, on the device.

    Args:
      images: uint8[b, H, W, 3].
      boxes: float32[b, G, 4] (y0, x0, y1, x1) as shares of the image; boxes of zeros are padding.
      seed: int32[b], the leaf "augment" of a batch.
      random_flip: whether every other image is mirrored left to right.

    Returns:
      Images dtype[b, H, W, 3] of zero mean and unit variance, and boxes float32[b, G, 4].
      Brightness is 0.875 to 1.125, contrast and saturation 0.5 to 1.5, hue -0.05 to 0.05 turns, see
      `colour.jitter`.
    """
    signed = 2 * hashing.uniform(seed[:, None], jnp.arange(4)) - 1  # f32[b, 4] in [-1, 1)
    if random_flip:
        images, boxes = _flip(images, boxes, hashing.uniform(seed, _FLIP) < 0.5)
    images = colour.jitter(
        images,
        brightness=1 + _BRIGHTNESS * signed[:, 0],
        contrast=1 + _CONTRAST * signed[:, 1],
        saturation=1 + _SATURATION * signed[:, 2],
        hue=_HUE * signed[:, 3],
    )
    return normalize(images, dtype), boxes


def _flip(images: jax.Array, boxes: jax.Array, flip: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mirrors images [b, H, W, 3] and their boxes [b, G, 4] where `flip` bool[b]."""
    images = jnp.where(flip[:, None, None, None], images[:, :, ::-1], images)
    y0, x0, y1, x1 = (boxes[..., i] for i in range(4))
    mirrored = jnp.stack([y0, 1 - x1, y1, 1 - x0], axis=-1)
    has_area = (y1 > y0) & (x1 > x0)
    boxes = jnp.where((flip[:, None] & has_area)[..., None], mirrored, boxes)
    return images, boxes
