"""Makes batches of uint8 images from records; each host makes its share of a global batch.

The host decodes, crops and resizes; the device flips, normalises and casts (`normalize`). With
decoded images in memory (`ops.images.cache`) the host only copies, and the device crops and resizes
as well (`crop`). Training order and augmentation are functions of (seed, step), see `ops.order`.
Windows follow the TensorFlow TPU tutorial's ResNet code, unless `config.preprocessing` is 'vgg' or
`config.input_spec` names another library.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from ops.decoding import Batch, Reader
from ops.images import input_spec, pixels
from ops.images.input_spec import InputSpec
from ops.images.labelled import Source
from ops.images.sizes import Sizes
from ops.order import Order
from ops.shards import tensorflow

_OWN = input_spec.NAMED["tensorflow"]


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How an image becomes [image_size, image_size, 3]; named as the config's keys."""

    image_size: Annotated[int, "[1, 16384]"]
    crop_area_min: Annotated[
        float, "(0, 1]"
    ]  # the smallest part of an image's area that a training crop covers
    random_flip: bool  # whether training images are mirrored at random
    preprocessing: str = "exact"  # one of `pixels.MODES`
    decoded_cache: Annotated[int, "[0, 16384]"] = (
        0  # above 0: the side of the training images that are kept in memory
    )
    input_spec: str = "tensorflow"  # what `input_spec.parse` reads
    eval_image_size: Annotated[int, "[0, 16384]"] = 0  # of evaluation; 0 = image_size

    @functools.cached_property
    def spec(self) -> InputSpec:
        """How evaluation prepares images, and how all images are normalised.

        Raises:
          DataError: `input_spec` is none.
        """
        spec = input_spec.parse(self.input_spec).at(self.eval_image_size or self.image_size)
        if self.input_spec == "tensorflow":
            return dataclasses.replace(spec, kernel=pixels.KERNELS[self.preprocessing])
        return spec

    def window(self, height: Any, width: Any, seed: Any) -> Any:
        """The random training crop of an image: see `pixels.random_window`.

        It is the same at all sizes of the training images.
        """
        if self.preprocessing == "vgg":
            return pixels.random_square(height, width, seed)
        return pixels.random_window(height, width, seed, self.crop_area_min, self.image_size)

    def flip(self, seeds: Any) -> Any:
        """Whether a training image is mirrored, for its seeds int32[3]."""
        tf = tensorflow()
        return tf.equal(seeds[2] % 2, 1) if self.random_flip else tf.constant(False)


def train_batches(
    source: Source,
    preprocessing: Preprocessing,
    order: Order,
    shard: int,
    num_shards: int,
    start_step: int,
) -> Iterator[Batch]:
    """Endless training batches of `image_size`: `sized_batches` of a host's share of the streams.

    Raises:
      DataError: the streams cannot be shared by so many hosts; or a record cannot be decoded (the
        file and record are named).
    """
    streams = order.share(shard, num_shards)
    return sized_batches(source, preprocessing, order, streams, start_step)


def sized_batches(
    source: Source,
    preprocessing: Preprocessing,
    order: Order,
    streams: range,
    start_step: int,
    sizes: Sizes | None = None,
) -> Iterator[Batch]:
    """Endless training batches of some streams: see `base.Benchmark.train_batches`.

    Yields image uint8[h, size, size, 3], label int32[h], flip bool[h], id int32[h], and
    host_seconds float32[h], the time that decoding took. With a decoded cache, images are not
    cropped: uint8[h, cache, cache, 3] comes with window float32[h, 4], see `crop`. `sizes` has the
    size at each step; `window_name` then tells it where images are not cropped.

    Raises:
      DataError: a record cannot be decoded; the file and record are named.
    """

    def decode(serialized: Any, seeds: Any, *step: Any, only_jpeg: bool) -> dict[str, Any]:
        encoded, label = source.parse(serialized)
        size = sizes.on_host(*step) if sizes else None
        image = _train_image(encoded, seeds[:2], preprocessing, only_jpeg, size)
        return {"image": image, "label": label, "flip": preprocessing.flip(seeds)}

    if not preprocessing.decoded_cache:
        reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
        return reader.train_batches(order, streams, start_step, numbered=sizes is not None)

    from ops.images import cache

    def draw(shape: Any, seeds: Any) -> dict[str, Any]:
        window = preprocessing.window(shape[0], shape[1], seeds[:2])
        return {"window": window, "flip": preprocessing.flip(seeds)}

    batches = cache.train_batches(
        source, preprocessing.decoded_cache, order, streams, start_step, draw
    )
    if not sizes:
        return batches
    return _named(batches, sizes, start_step)


def _named(batches: Iterator[Batch], sizes: Sizes, start_step: int) -> Iterator[Batch]:
    """Batches from memory whose windows tell the size of the step."""
    for step, batch in enumerate(batches, start_step):
        window = batch.pop("window")
        yield {**batch, window_name(sizes.at(step)): window}


def window_name(size: int) -> str:
    """The name of the windows of a batch that is cropped to `size` on the device.

    The arrays of such a batch have the same shapes at all sizes, so that the name tells the size.
    """
    return f"window_{size}"


def window_size(batch: Mapping[str, Any], default: int) -> tuple[str, int]:
    """The name of a batch's windows and the size that it tells, for "window" the default."""
    (name,) = (name for name in batch if name.startswith("window"))
    _, _, size = name.partition("_")
    return name, int(size or default)


def eval_batches(
    source: Source, preprocessing: Preprocessing, batch_size: int, shard: int, num_shards: int
) -> Iterator[Batch]:
    """Every example once over all shards: see `base.Benchmark.eval_batches`.

    Yields image uint8[h, size, size, 3], label int32[h], id int32[h], mask float32[h].

    Raises:
      DataError: a record cannot be decoded; the file and record are named.
    """

    def decode(serialized: Any, only_jpeg: bool) -> dict[str, Any]:
        encoded, label = source.parse(serialized)
        image = input_spec.evaluated(encoded, preprocessing.spec, only_jpeg=only_jpeg)
        return {"image": image, "label": label}

    reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
    return reader.eval_batches(batch_size, shard, num_shards)


def _train_image(
    encoded: Any, seed: Any, preprocessing: Preprocessing, only_jpeg: bool = False, size: Any = None
) -> Any:
    window = functools.partial(preprocessing.window, seed=seed)
    image = pixels.decode(encoded, window, only_jpeg=only_jpeg)
    size = preprocessing.image_size if size is None else size
    return pixels.resize(image, size, preprocessing.preprocessing)


def normalize(
    images: jax.Array, flip: jax.Array | None, dtype: Any, spec: InputSpec = _OWN
) -> jax.Array:
    """uint8[b, H, W, 3] RGB -> dtype[b, H, W, 3], what a model expects, on the device.

    `flip` bool[b] mirrors images left to right; None mirrors none. `spec` has the mean, the
    standard deviation and the order of the channels.
    """
    if flip is not None:
        images = jnp.where(flip[:, None, None, None], images[:, :, ::-1], images)
    return _standardize(images.astype(jnp.float32), dtype, spec)


def crop(
    images: jax.Array,
    window: jax.Array,
    flip: jax.Array,
    dtype: Any,
    spec: InputSpec,
) -> jax.Array:
    """Batches from memory -> dtype[b, size, size, 3], what a model expects.

    `spec` has the size as well; see `pixels.crop_on_device` for the other arguments.
    """
    return _standardize(pixels.crop_on_device(images, window, flip, spec.size, dtype), dtype, spec)


def _standardize(images: jax.Array, dtype: Any, spec: InputSpec) -> jax.Array:
    mean, stddev = (jnp.asarray(v, jnp.float32) for v in (spec.mean, spec.std))
    images = ((images - mean) / stddev).astype(dtype)
    return images[..., ::-1] if spec.channels == "BGR" else images
