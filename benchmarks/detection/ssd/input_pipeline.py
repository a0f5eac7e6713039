"""SSD's batches of images with boxes: random IoU crops on the host, color jitter on the device.

The host draws the crop from the boxes of an image, decodes only the crop, and resizes it. The
device flips, changes the colours and normalises (`augment`). Each host makes its share of a global
batch. Training order and augmentation are functions of (seed, step).

To draw a crop, rounds follow each other until one succeeds. A round chooses one of seven rules with
equal chances: the complete image, which succeeds; any windows; or windows whose IoU with
every box is above 0.1, 0.3, 0.5, 0.7 or 0.9. It then tries `max_samples` windows and takes the
first that is valid: its sides are `side_min` to 1 of the image's, at a ratio between 1/2 and 2, and
at least one box has its centre inside, if the image has boxes. Source: the SSD reference of MLPerf
(`SSDCropping` in mlcommons/training), which tries one window per round; docs/ssd.md has Google's
rule.

All random numbers of a crop are drawn at once. Only the rounds before the first complete image
matter, 6 on average. After 64 rounds the complete image is taken, which happens to fewer than 1 of
19,000 images. The sides of a window are integers, so that the boxes fit the pixels exactly.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.detection import augmentation, records
from benchmarks.detection.records import Source
from benchmarks.detection.ssd.settings import Preprocessing
from common import hashing
from common.data.decoding import Batch, Reader
from common.data.order import Order
from common.images import input_spec, pixels
from common.tensorflow import tensorflow
from input_pipeline import normalize

_FLIP = 4  # the number of a draw that no colour uses
_ROUNDS = 64  # the most rounds of a crop
_CHOICES = 7  # rules of a round; number 0 is the complete image
_NO_CONDITION = -1.0
_MIN_IOU = (_NO_CONDITION, 0.1, 0.3, 0.5, 0.7, 0.9)


def train_batches(
    source: Source,
    preprocessing: Preprocessing,
    order: Order,
    shard: int,
    num_shards: int,
    start_step: int,
) -> Iterator[Batch]:
    """Endless training batches.

    Yields image uint8[h, size, size, 3]; boxes float32[h, max_boxes, 4] (y0, x0, y1, x1) as shares
    of the image and classes int32[h, max_boxes] from 1, both with zeros at the end; augment
    int32[h], the seed of `augment`; id int32[h]; and host_seconds float32[h].
    """

    def decode(serialized: Any, seeds: Any, only_jpeg: bool) -> dict[str, Any]:
        image, objects = records.read_image(serialized), source.objects(serialized)
        draws = draw_crop(seeds, preprocessing.max_samples)
        window = crop_window(objects.boxes, image.size, draws, preprocessing.crop_side_min)
        boxes, classes = cut_boxes(*objects, image.size, window, preprocessing.max_boxes)
        scaled = preprocessing.resize(records.read_window(image, window, only_jpeg))
        if preset := preprocessing.preset:
            scaled, boxes = zoom_out(scaled, boxes, draw_canvas(seeds), preset.zoom_out)
        return {"image": scaled, "boxes": boxes, "classes": classes, "augment": seeds[2]}

    reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
    return reader.train_batches(order, order.share(shard, num_shards), start_step)


def eval_batches(
    source: Source, preprocessing: Preprocessing, batch_size: int, shard: int, num_shards: int
) -> Iterator[Batch]:
    """Every example once over all shards.

    Yields image uint8[h, size, size, 3], not cropped; image_id int32[h]; size float32[h, 2], the
    height and width of the original in pixels; id int32[h]; mask float32[h], 0 for padding.
    """
    tf = tensorflow()

    def decode(serialized: Any, only_jpeg: bool) -> dict[str, Any]:
        image = records.read_image(serialized)
        window = tf.concat([[0, 0], image.size], axis=0)
        return {
            "image": preprocessing.resize(records.read_window(image, window, only_jpeg)),
            "image_id": records.read_image_id(serialized),
            "size": tf.cast(image.size, tf.float32),
        }

    reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
    return reader.eval_batches(batch_size, shard, num_shards)


def augment(
    images: jax.Array,
    boxes: jax.Array,
    seed: jax.Array,
    random_flip: bool,
    dtype: Any,
    colours: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Flips and changes the colours of training images, on the device.

    Args:
      images: uint8[b, H, W, 3].
      boxes: float32[b, G, 4] (y0, x0, y1, x1) as shares of the image; boxes of zeros are padding.
      seed: int32[b], the leaf "augment" of a batch.
      random_flip: whether every other image is mirrored left to right.
      colours: how much colours change, see `augmentation.jitter`.

    Returns:
      Images dtype[b, H, W, 3] of zero mean and unit variance, and boxes float32[b, G, 4].
    """
    signed = 2 * hashing.uniform(seed[:, None], jnp.arange(4)) - 1
    if random_flip:
        images, boxes = _flip(images, boxes, hashing.uniform(seed, _FLIP) < 0.5)
    images = augmentation.jitter(images, signed, colours)
    return normalize(images, None, dtype), boxes


def _flip(images: jax.Array, boxes: jax.Array, flip: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mirrors images [b, H, W, 3] and their boxes [b, G, 4] where `flip` bool[b]."""
    images = jnp.where(flip[:, None, None, None], images[:, :, ::-1], images)
    y0, x0, y1, x1 = (boxes[..., i] for i in range(4))
    mirrored = jnp.stack([y0, 1 - x1, y1, 1 - x0], axis=-1)
    has_area = (y1 > y0) & (x1 > x0)
    boxes = jnp.where((flip[:, None] & has_area)[..., None], mirrored, boxes)
    return images, boxes


class CropDraws(NamedTuple):
    """The random numbers of a crop, for the r rounds before the complete image is chosen."""

    conditions: Any  # int32[r], the index in `_MIN_IOU`
    numbers: Any  # float32[r, max_samples, 4] in [0, 1): height, width, y, x of each window


def draw_crop(seeds: Any, max_samples: int) -> CropDraws:
    """The random numbers of a crop: a function of `seeds` int32[3]."""
    tf = tensorflow()
    shape = [_ROUNDS]
    choices = tf.random.stateless_uniform(shape, seeds[:2], maxval=_CHOICES, dtype=tf.int32)
    ends = tf.concat([tf.equal(choices, 0), [True]], axis=0)
    rounds = tf.argmax(tf.cast(ends, tf.int32), output_type=tf.int32)  # the first of the largest
    numbers = tf.random.stateless_uniform([rounds, max_samples, 4], seeds[1:])
    return CropDraws(choices[:rounds] - 1, numbers)


def crop_window(boxes: Any, size: Any, draws: CropDraws, side_min: float) -> Any:
    """int32[4] (y, x, height, width) in pixels: the random IoU crop of an image (SSDCropping).

    Args:
      boxes: float32[n, 4] (y0, x0, y1, x1) as shares of the image, inside of it, all with an area.
      size: int32[2], height and width of the image in pixels.
      side_min: the least side of a window, as a share of the image's; 0.3 in the reference.
    """
    tf = tensorflow()
    pixels = tf.cast(size, tf.float32)
    sides = side_min + (1 - side_min) * draws.numbers[..., :2]
    corner = draws.numbers[..., 2:] * (1 - sides)
    begin = tf.floor(corner * pixels)
    end = tf.minimum(tf.math.ceil((corner + sides) * pixels), pixels)
    ratio = sides[..., 1] / sides[..., 0]
    min_iou = tf.gather(tf.constant(_MIN_IOU), draws.conditions)[:, tf.newaxis, tf.newaxis]
    low, high = begin / pixels, end / pixels
    valid = tf.logical_and(ratio > 0.5, ratio < 2)
    valid &= tf.reduce_all(_window_iou(boxes, low, high) > min_iou, axis=-1)
    valid &= tf.reduce_any(_inside(boxes, low, high), axis=-1) | tf.equal(tf.size(boxes), 0)
    windows = tf.reshape(tf.concat([begin, end - begin], axis=-1), [-1, 4])
    full = tf.concat([[0.0, 0.0], pixels], axis=0)[tf.newaxis]
    is_last = tf.concat([tf.reshape(valid, [-1]), [True]], axis=0)
    first = tf.argmax(tf.cast(is_last, tf.int32))
    return tf.cast(tf.concat([windows, full], axis=0)[first], tf.int32)


def cut_boxes(boxes: Any, classes: Any, size: Any, crop: Any, max_boxes: int) -> tuple[Any, Any]:
    """The boxes and classes of a crop: float32[max_boxes, 4] and int32[max_boxes], with zeros.

    Boxes whose centre is inside are kept, in their order; their parts outside of the crop are cut
    off. If there are more than `max_boxes`, the largest are kept. `classes` are int32[n] from 1,
    `boxes` and `size` as in `crop_window`, which returns `crop`.
    """
    tf = tensorflow()
    pixels, begin = tf.cast(size, tf.float32), tf.cast(crop[:2], tf.float32)
    low, high = begin / pixels, (begin + tf.cast(crop[2:], tf.float32)) / pixels
    inside = _inside(boxes, low, high)
    boxes, classes = tf.boolean_mask(boxes, inside), tf.boolean_mask(classes, inside)
    boxes = (boxes - tf.tile(low, [2])) / tf.tile(high - low, [2])
    boxes = tf.clip_by_value(boxes, 0.0, 1.0)
    leaves = records.keep_largest({"boxes": boxes, "classes": classes}, boxes, max_boxes)
    return leaves["boxes"], leaves["classes"]


def draw_canvas(seeds: Any) -> Any:
    """The random numbers of `zoom_out`, float32[4] in [0, 1): a function of `seeds` int32[3]."""
    return tensorflow().random.stateless_uniform([4], seeds[::2])


def zoom_out(image: Any, boxes: Any, draws: Any, most: float) -> tuple[Any, Any]:
    """Puts every other image on a larger canvas of the mean colour, which is then resized.

    The canvas is 1 to `most` times as high and wide, the place in it random. The image's new side
    and place are whole pixels, so that the boxes fit them exactly.

    Args:
      image: uint8[s, s, 3].
      boxes: float32[n, 4] as shares of the image; those without area stay as they are.
      draws: float32[4] in [0, 1): whether, by how much, y, x.

    Returns:
      (uint8[s, s, 3], float32[n, 4]).
    """
    tf, length = tensorflow(), image.shape[0]
    ratio = tf.where(draws[0] < 0.5, 1.0, 1 + (most - 1) * draws[1])
    side = tf.cast(tf.round(length / ratio), tf.int32)
    begin = tf.cast(draws[2:] * tf.cast(length - side + 1, tf.float32), tf.int32)
    mean = tf.constant(np.round(input_spec.TENSORFLOW.mean), tf.float32)
    small = tf.image.resize(image, [side, side], method="bilinear", antialias=True) - mean
    margins = tf.stack([begin, length - side - begin], axis=1)
    canvas = tf.pad(small, tf.pad(margins, [[0, 1], [0, 0]])) + mean
    share, corner = (tf.cast(x, tf.float32) / length for x in (side, begin))
    moved = boxes * share + tf.tile(corner, [2])
    has_area = tf.reduce_all(boxes[:, 2:] > boxes[:, :2], axis=1, keepdims=True)
    image = tf.ensure_shape(tf.cast(canvas + 0.5, tf.uint8), image.shape)
    return image, tf.where(has_area, moved, boxes)


def _window_iou(boxes: Any, low: Any, high: Any) -> Any:
    """The IoU float32[..., n] of windows, `low` to `high` [..., 2], and boxes [n, 4]."""
    tf = tensorflow()
    low, high = low[..., tf.newaxis, :], high[..., tf.newaxis, :]
    overlap = tf.minimum(high, boxes[:, 2:]) - tf.maximum(low, boxes[:, :2])
    shared = tf.reduce_prod(tf.nn.relu(overlap), axis=-1)
    areas = tf.reduce_prod(boxes[:, 2:] - boxes[:, :2], axis=-1)
    return shared / (tf.reduce_prod(high - low, axis=-1) + areas - shared)


def _inside(boxes: Any, low: Any, high: Any) -> Any:
    """bool[..., n]: whether the centre of a box [n, 4] is inside of windows [..., 2]."""
    tf = tensorflow()
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    inside = (centres > low[..., tf.newaxis, :]) & (centres < high[..., tf.newaxis, :])
    return tf.reduce_all(inside, axis=-1)
