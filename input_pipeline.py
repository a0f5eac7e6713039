"""Makes ResNet's batches of uint8 images from labelled records; each host makes its share.

`benchmarks.resnet.preparation.examples` turns a photo into a record. `ImageClassifier` calls
`train_batches` here, `common.data.decoding.Reader` decodes, `engine.sharding.Feed` copies to the
devices.

The host decodes, crops and resizes; the device flips, normalises and casts (`normalize`). Training
order and augmentation are functions of (seed, step) (`common.data.order`). Windows follow the
TensorFlow TPU tutorial's ResNet code, unless `config.preprocessing` is 'vgg' or `config.input_spec`
names another library.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from common.data.decoding import Batch, Reader
from common.data.order import Order
from common.data.shards import Shards
from common.errors import DataError
from common.images import input_spec, pixels
from common.images.input_spec import InputSpec
from common.tensorflow import tensorflow

# How training images are cropped and resized. "exact": `random_window`, bicubic without antialias,
# as the TensorFlow TPU tutorial (TF2's kernel: half-pixel centres, a = -0.5). "fast": the same,
# bilinear. "vgg": `random_square`, bilinear without antialias.
KERNELS = {"exact": "bicubic", "fast": "bilinear", "vgg": "bilinear"}

_NAME_KEYS = ("image/filename", "file_name")  # of the ImageNet schema, and of TFDS


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of labelled images in TFRecords.

    With `several` a record has a list of labels, which may be empty.

    `label_offset` is subtracted from the stored label; ImageNet records count from 1 because the
    tutorial keeps 0 for a background class.
    """

    shards: Shards
    image_key: str
    label_key: str
    label_offset: int
    num_classes: int
    class_names: tuple[str, ...]
    several: bool = False

    def parse(self, serialized: Any) -> tuple[Any, Any]:
        """(encoded image, label int32 from 0) of one serialized tf.train.Example, as tensors.

        Several labels are bool[K], which of the classes the image has.
        """
        tf = tensorflow()
        one, several = tf.io.FixedLenFeature([], tf.int64), tf.io.RaggedFeature(tf.int64)
        features = {
            self.image_key: tf.io.FixedLenFeature([], tf.string),
            self.label_key: several if self.several else one,
        }
        parsed = tf.io.parse_single_example(serialized, features)
        label = parsed[self.label_key] - self.label_offset
        if self.several:
            shape = tf.constant([self.num_classes], tf.int64)  # a label outside of it is an error
            return parsed[self.image_key], tf.scatter_nd(label[:, None], label * 0 + 1, shape) > 0
        return parsed[self.image_key], tf.cast(label, tf.int32)

    def image(self, serialized: bytes) -> tuple[bytes, str]:
        """(encoded image, the name of its file or "") of one serialized tf.train.Example."""
        features = tensorflow().train.Example.FromString(serialized).features.feature
        names = [features[key].bytes_list.value for key in _NAME_KEYS if key in features]
        name = names[0][0].decode(errors="replace") if names and names[0] else ""
        return features[self.image_key].bytes_list.value[0], name

    def check(self, batch: Batch) -> None:
        """Raises DataError if a label of the batch is out of range.

        TFDS records are not read through before, and files may change during a long run. Of several
        labels `parse` refuses those out of range.
        """
        if self.several:
            return
        wrong = (batch["label"] < 0) | (batch["label"] >= self.num_classes)
        if wrong.any():
            record = self.shards.where(int(batch["id"][wrong][0]))
            label = int(batch["label"][wrong][0])
            raise wrong_label(record, label, self.label_offset, self.num_classes)


def wrong_label(record: str, label: int, offset: int, num_classes: int) -> DataError:
    """The error for a record whose label is out of range; the file has `label` + `offset`."""
    stored, fix = label + offset, "correct the record"
    if stored == 0:
        fix = "labels count from 1: write the records again with each label + 1"
        if num_classes == 1000:
            fix += ", or for 0 as a background class give --config.num_label_classes=1001"
    elif stored > 0:
        fix = f"if it is right, give --config.num_label_classes={label + 1}; else {fix}"
    return DataError(
        f"{record}: its label is {stored}, outside {offset}..{num_classes - 1 + offset}; {fix}"
    )


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How an image becomes [image_size, image_size, 3]; ResNet's settings.py has the keys."""

    image_size: int
    crop_area_min: float
    random_flip: bool
    preprocessing: str = "exact"
    input_spec: str = "tensorflow"
    eval_image_size: int = 0
    reduced_decoding: bool = False
    image_sizes: Sequence[Sequence[float]] = ()

    @property
    def sides(self) -> tuple[int, ...]:
        """All sizes of the training images, each once, in the order in which they come."""
        sides = (int(side) for _, side in self.image_sizes)
        return tuple(dict.fromkeys(sides)) or (self.image_size,)

    @functools.cached_property
    def spec(self) -> InputSpec:
        """How evaluation prepares images, and how all images are normalised."""
        spec = input_spec.parse_spec(self.input_spec).at(self.eval_image_size or self.image_size)
        if self.input_spec == "tensorflow":
            return dataclasses.replace(spec, kernel=KERNELS[self.preprocessing])
        return spec

    def window(self, height: Any, width: Any, seed: Any) -> Any:
        """The random training crop of an image, a function of `seed` int32[2].

        It is the same at all sizes of the training images.
        """
        if self.preprocessing == "vgg":
            return random_square(height, width, seed)
        return random_window(height, width, seed, self.crop_area_min, self.image_size)

    def flip(self, seeds: Any) -> Any:
        """Draws whether a training image is mirrored: bool[], a function of its seeds int32[3]."""
        tf = tensorflow()
        return tf.equal(seeds[2] % 2, 1) if self.random_flip else tf.constant(False)


def train_batches(
    source: Source,
    preprocessing: Preprocessing,
    order: Order,
    streams: range,
    start_step: int,
    size_at: Callable[[Any], Any] | None = None,
) -> Iterator[Batch]:
    """Endless training batches of some streams of `order`, from `start_step` on.

    Yields image uint8[h, size, size, 3], label int32[h], flip bool[h], id int32[h], and
    host_seconds float32[h], the time that decoding took. `size_at` computes the size int32[] from
    the step int64[], tensors of TensorFlow; by default it is `image_size`. DataError names the
    file and the record that cannot be decoded.
    """

    def decode(serialized: Any, seeds: Any, *step: Any, only_jpeg: bool) -> dict[str, Any]:
        encoded, label = source.parse(serialized)
        size = size_at(*step) if size_at else preprocessing.image_size
        image = _train_image(encoded, seeds[:2], preprocessing, size, only_jpeg)
        return {"image": image, "label": label, "flip": preprocessing.flip(seeds)}

    reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
    return reader.train_batches(order, streams, start_step, numbered=size_at is not None)


def eval_batches(
    source: Source, preprocessing: Preprocessing, batch_size: int, shard: int, num_shards: int
) -> Iterator[Batch]:
    """Every example once over all shards, padded with rows whose mask is 0.

    Yields image uint8[h, size, size, 3], label int32[h], id int32[h], mask float32[h]. DataError
    names the file and the record that cannot be decoded.
    """

    def decode(serialized: Any, only_jpeg: bool) -> dict[str, Any]:
        encoded, label = source.parse(serialized)
        image = input_spec.evaluated(encoded, preprocessing.spec, only_jpeg=only_jpeg)
        return {"image": image, "label": label}

    reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
    return reader.eval_batches(batch_size, shard, num_shards)


def _train_image(
    encoded: Any, seed: Any, preprocessing: Preprocessing, size: Any, only_jpeg: bool = False
) -> Any:
    window = functools.partial(preprocessing.window, seed=seed)
    least = size if preprocessing.reduced_decoding else None
    image = pixels.decode(encoded, window, only_jpeg=only_jpeg, least_side=least)
    return resize(image, size, preprocessing.preprocessing)


def normalize(
    images: jax.Array, flip: jax.Array | None, dtype: Any, spec: InputSpec = input_spec.TENSORFLOW
) -> jax.Array:
    """Pixels [b, H, W, 3] RGB in 0..255 -> dtype[b, H, W, 3], what a model expects, on the device.

    `flip` bool[b] mirrors images left to right; None mirrors none. `spec` has the mean, the
    standard deviation and the order of the channels.
    """
    if flip is not None:
        images = jnp.where(flip[:, None, None, None], images[:, :, ::-1], images)
    mean, stddev = (jnp.asarray(v, jnp.float32) for v in (spec.mean, spec.std))
    normal = ((images.astype(jnp.float32) - mean) / stddev).astype(dtype)
    return normal[..., ::-1] if spec.channels == "BGR" else normal


def random_window(height: Any, width: Any, seed: Any, area_min: float, size: int) -> Any:
    """int32[4] (y, x, height, width): a part `area_min` to 1 of the area, aspect 3/4 to 4/3.

    A function of `seed` int32[2]. Where no such window fits, it is the centre, as for evaluation
    at `size`. All arguments but the last two may be tensors.
    """
    tf = tensorflow()
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        [height, width, 3],
        bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        seed=seed,
        min_object_covered=0.1,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(area_min, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    no_crop = tf.logical_and(tf.equal(extent[0], height), tf.equal(extent[1], width))
    crop = tf.stack([begin[0], begin[1], extent[0], extent[1]])
    return tf.where(no_crop, input_spec.centre_window(height, width, size), crop)


def random_square(height: Any, width: Any, seed: Any) -> Any:
    """int32[4] (y, x, side, side): 224 pixels of an image whose shorter side is now 256 to 512.

    A function of `seed` int32[2]. Simonyan and Zisserman 2014 (arXiv:1409.1556), section 3.1; the
    Gradient tutorial's training crops. Any size may be cropped so: its side counts as 224.
    """
    tf = tensorflow()
    drawn = tf.random.stateless_uniform([3], seed, dtype=tf.float64)
    shorter = tf.cast(tf.minimum(height, width), tf.float64)
    side = tf.maximum(tf.cast(shorter * 224 / (256 + tf.floor(257 * drawn[0])), tf.int32), 1)
    rest = tf.stack([height, width]) - side
    corner = tf.cast(tf.floor(drawn[1:] * tf.cast(rest + 1, tf.float64)), tf.int32)
    return tf.concat([corner, [side, side]], 0)


def resize(image: Any, size: Any, mode: str) -> Any:
    """uint8[size, size, 3] of uint8[h, w, 3]; `size` may be a tensor, `mode` is in `KERNELS`."""
    tf = tensorflow()
    side = size if isinstance(size, int) else None
    return tf.ensure_shape(pixels.sample(image, [size, size], KERNELS[mode]), [side, side, 3])
