"""Mask R-CNN's batches: padded images, boxes and masks; each host makes its share of a batch.

An image is resized, its aspect kept, and padded with zeros at the bottom and on the right. Images
that are at least as wide as high have one padded shape, the others the same turned round; a batch
has images of one shape. The host decodes, resizes, mirrors and pads, and cuts the objects' masks
out of PNGs of complete images; the device normalises. The training order and the random numbers of
an image are functions of (seed, step).
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.detection import augmentation, records
from benchmarks.detection.mask_rcnn.aspect_ratio_groups import AspectRatioGroups, GroupedOrder
from benchmarks.detection.mask_rcnn.settings import Preprocessing
from benchmarks.detection.records import Image, RecordObjects, Source
from common import hashing
from common.data.decoding import Batch, Reader
from common.data.shards import Shards
from common.images import pixels
from common.layers import space_to_depth
from common.tensorflow import tensorflow
from input_pipeline import normalize

_COLOURS = 2  # the number of the draw of colours; samples have other ones
_LEFT = 0.25  # of a box's area in the window, at least


def train_batches(
    groups: AspectRatioGroups,
    preprocessing: Preprocessing,
    grouped: GroupedOrder,
    shard: int,
    num_shards: int,
    start_step: int,
) -> Iterator[Batch]:
    """Endless training batches.

    Yields image uint8[h, H/2, W/2, 12], as `padded` makes it; size float32[h, 2], height and width
    without padding; of the objects boxes float32[h, max_boxes, 4] (y0, x0, y1, x1) in pixels of the
    resized image, classes int32[h, max_boxes] from 1 and masks uint8[h, max_boxes,
    mask_size^2 / 8], as `packed_masks` makes them, all with zeros at the end; draw int32[h], a seed
    of the example in this step; id int32[h]; and host_seconds float32[h].
    """
    streams = {group: order.share(shard, num_shards) for group, order in grouped.orders.items()}

    def of_group(group: int, step: int) -> Iterator[Batch]:
        source, copies = groups.sources[group], grouped.copies[group]
        once = source.shards
        shards = Shards(once.paths * copies, once.counts * copies, once.left_out * copies)
        source = dataclasses.replace(source, shards=shards)
        decode = functools.partial(_trained, source, preprocessing.shapes[group], preprocessing)
        reader = Reader(shards, pixels.jpegs_first(decode), source.check)
        return reader.train_batches(grouped.orders[group], streams[group], step)

    def mixed() -> Iterator[Batch]:
        running: dict[int, Iterator[Batch]] = {}
        for group, step in grouped.steps(start_step):
            if group not in running:
                running[group] = of_group(group, step)
            batch = next(running[group])
            yield batch | {"id": grouped.numbers(group, batch["id"])}

    return mixed()


def draw_window(seeds: Any, size: Any, least: float, most: float) -> tuple[Any, Any]:
    """The part of an image that a batch shows, and the factor of its usual size.

    An image grows or shrinks by a random factor from `least` to `most`, whose logarithm is uniform.
    What grows beyond the usual size is cut to it at a random place. A function of `seeds` int32[3].

    Returns:
      (int32[4] (y, x, height, width) in pixels of an image of `size` int32[2], float32 <= 1).
    """
    tf = tensorflow()
    draws = tf.random.stateless_uniform([3], seeds[::2])
    factor = least * (most / least) ** draws[0]
    sides = tf.cast(tf.cast(size, tf.float32) / tf.maximum(factor, 1.0) + 0.5, tf.int32)
    sides = tf.maximum(sides, 1)
    begin = tf.cast(draws[1:] * tf.cast(size - sides + 1, tf.float32), tf.int32)
    return tf.concat([begin, sides], axis=0), tf.minimum(factor, 1.0)


def cut_boxes(boxes: Any, size: Any, window: Any) -> tuple[Any, Any]:
    """Cuts boxes float32[n, 4], shares of an image of `size`, to a window int32[4], see above.

    Returns (float32[k, 4] in pixels of the image, bool[n]): those of which a quarter is left.
    """
    tf = tensorflow()
    whole = boxes * tf.tile(tf.cast(size, tf.float32), [2])
    begin, sides = tf.split(tf.cast(window, tf.float32), 2)
    cut = tf.clip_by_value(whole, tf.tile(begin, [2]), tf.tile(begin + sides, [2]))
    areas, left = (tf.reduce_prod(x[:, 2:] - x[:, :2], axis=1) for x in (whole, cut))
    kept = left >= _LEFT * areas
    return tf.boolean_mask(cut, kept), kept


def boxes_in(boxes: Any, window: Any) -> Any:
    """Boxes float32[n, 4] in pixels of an image as shares of a window in it, int32[4]."""
    tf = tensorflow()
    begin, sides = tf.split(tf.cast(window, tf.float32), 2)
    return (boxes - tf.tile(begin, [2])) / tf.tile(sides, [2])


def _trained(
    source: Source,
    shape: tuple[int, int],
    preprocessing: Preprocessing,
    serialized: Any,
    seeds: Any,
    only_jpeg: bool,
) -> dict[str, Any]:
    """The leaves of an image to train on."""
    mirrored = tensorflow().equal(seeds[0] % 2, 1) & preprocessing.random_flip
    image, objects = records.read_image(serialized), source.objects(serialized, crowds=False)
    window, zoom = None, 1.0
    if preset := preprocessing.preset:
        window, zoom = draw_window(seeds, image.size, *preset.scales)
        cut, kept = cut_boxes(objects.boxes, image.size, window)
        classes = tensorflow().boolean_mask(objects.classes, kept)
        objects = RecordObjects(boxes_in(cut, window), classes)
        decoded = records.read_window(image, window, only_jpeg)
    else:
        decoded = _decoded(image, only_jpeg)
    masks = masks_of_record(serialized, preprocessing.mask_size, mirrored, window)
    image, size = padded(decoded, shape, preprocessing, mirrored, zoom)
    row = _objects(objects, masks, size, mirrored, preprocessing.max_boxes)
    return row | {"image": image, "size": size, "draw": seeds[1]}


def eval_batches(
    groups: AspectRatioGroups,
    preprocessing: Preprocessing,
    batch_size: int,
    shard: int,
    num_shards: int,
) -> Iterator[Batch]:
    """Every example once over all shards; batches of wide images come first.

    Yields image uint8[h, H/2, W/2, 12], as `padded` makes it; size and original float32[h, 2],
    height and width of the image without padding and before it was resized; image_id int32[h]; id
    int32[h]; mask float32[h], 0 for padding.
    """
    first = 0
    for source, shape in zip(groups.sources, preprocessing.shapes, strict=True):
        if source.shards.total:
            decode = functools.partial(_evaluated, shape, preprocessing)
            reader = Reader(source.shards, pixels.jpegs_first(decode), source.check)
            for batch in reader.eval_batches(batch_size, shard, num_shards):
                yield batch | {"id": first + batch["id"]}
        first += source.shards.total


def normalized(batch: Mapping[str, jax.Array], dtype: Any, colours: float = 0.0) -> jax.Array:
    """The images in `dtype`, in blocks, on the device; zero, the mean of all, around them.

    With `colours`, those of training images change, see `augmentation.jitter`.
    """
    blocks = batch["image"]
    b, height, width, channels = blocks.shape
    pixels = blocks.reshape(b, height, width, 4, 3)
    if colours:
        signed = 2 * hashing.uniform(batch["draw"][:, None], _COLOURS, jnp.arange(4)) - 1
        flat, areas = pixels.reshape(b, height, 4 * width, 3), jnp.prod(batch["size"], 1)
        pixels = augmentation.jitter(flat, signed, colours, areas).reshape(pixels.shape)
    images = normalize(pixels, None, dtype).reshape(blocks.shape)
    # A channel belongs to row 0 or 1 and to column 0 or 1 of its block.
    channel = np.arange(channels)
    rows = 2 * np.arange(height)[:, None, None] + channel // 6
    columns = 2 * np.arange(width)[:, None] + channel // 3 % 2
    heights, widths = (batch["size"][:, i, None, None, None] for i in (0, 1))
    return jnp.where((rows < heights) & (columns < widths), images, 0)


def _evaluated(
    shape: tuple[int, int], preprocessing: Preprocessing, serialized: Any, only_jpeg: bool
) -> dict[str, Any]:
    """The arrays of an image to evaluate, without a batch axis."""
    original = records.read_image(serialized)
    image, size = padded(_decoded(original, only_jpeg), shape, preprocessing)
    return {
        "image": image,
        "size": size,
        "original": tensorflow().cast(original.size, "float32"),
        "image_id": records.read_image_id(serialized),
    }


def _decoded(image: Image, only_jpeg: bool) -> Any:
    """The pixels uint8[h, w, 3] of a record's image, whose size is checked."""
    decoded = pixels.decode(image.encoded, only_jpeg=only_jpeg)
    return image.checked(decoded, tensorflow().shape(decoded)[:2])


def padded(
    image: Any,
    shape: tuple[int, int],
    preprocessing: Preprocessing,
    mirrored: Any = False,
    zoom: Any = 1.0,
) -> tuple[Any, Any]:
    """(uint8[H/2, W/2, 12] resized and padded, float32[2] height and width without padding).

    `image` is uint8[h, w, 3]. The 12 channels are the colours of 2x2 pixels, in the order of
    `space_to_depth.rearrange`. It is resized to `zoom` times the size of the recipe.
    """
    tf = tensorflow()
    size = preprocessing.resized(tf.shape(image)[:2], zoom)
    resized = pixels.sample(image, size, "bilinear")
    resized = tf.cond(tf.convert_to_tensor(mirrored), lambda: resized[:, ::-1], lambda: resized)
    missing = shape - size
    filled = tf.pad(resized, [[0, missing[0]], [0, missing[1]], [0, 0]])
    blocks = tf.nn.space_to_depth(filled[None], 2)[0]
    return tf.ensure_shape(blocks, space_to_depth.blocked(*shape)), tf.cast(size, tf.float32)


def _objects(
    objects: RecordObjects, masks: Any, size: Any, mirrored: Any, max_boxes: int
) -> dict[str, Any]:
    """The leaves "boxes", "classes" and "masks" of the `max_boxes` largest objects.

    `masks` uint8[n, bytes] are mirrored already; `size` is float32[2].
    """
    tf = tensorflow()
    y0, x0, y1, x1 = tf.unstack(objects.boxes, axis=1)
    left, right = tf.where(mirrored, 1 - x1, x0), tf.where(mirrored, 1 - x0, x1)
    boxes = tf.stack([y0, left, y1, right], axis=1) * tf.tile(size, [2])
    leaves = {"boxes": boxes, "classes": objects.classes, "masks": masks}
    return records.keep_largest(leaves, objects.boxes, max_boxes)


def masks_of_record(serialized: Any, size: int, mirrored: Any = False, window: Any = None) -> Any:
    """The `packed_masks` of a serialized tf.train.Example's single objects, in a `window`."""
    tf = tensorflow()
    features = records.object_features(single=True) | {records.MASK: tf.io.RaggedFeature(tf.string)}
    parsed = tf.io.parse_single_example(serialized, features)
    shape = records.read_image(serialized).size
    boxes, kept = records.clipped_boxes(parsed)
    counts = tf.size(parsed[records.MASK]), tf.size(parsed[records.LABEL])
    files = tf.boolean_mask(records.if_equal(parsed[records.MASK], *counts, records.NO_MASKS), kept)
    boxes = tf.boolean_mask(boxes, kept)
    corners = boxes * tf.tile(tf.cast(shape, tf.float32), [2])
    if window is not None:
        corners, kept = cut_boxes(boxes, shape, window)
        files = tf.boolean_mask(files, kept)
    return packed_masks(files, corners, shape, size, mirrored)


def packed_masks(files: Any, boxes: Any, shape: Any, size: int, mirrored: Any = False) -> Any:
    """uint8[n, size * size / 8]: masks that each span the box of their object.

    The size x size pixels of a mask are sampled bilinearly at their centres, and set where that
    gives 0.5 or more. They are packed row by row, 8 to a byte, the first into its highest bit.

    Args:
      files: string[n], PNGs of the complete image; the pixels of the object are not 0.
      boxes: float32[n, 4] (y0, x0, y1, x1) in pixels.
      shape: int32[2], the height and width of the image.
      size: a multiple of 4.
      mirrored: a scalar bool, whether all masks are mirrored left to right.
    """
    tf = tensorflow()
    bits = 2 ** tf.range(7, -1, -1)

    @tf.autograph.experimental.do_not_convert  # it would hide what errors say
    def one(row: Any) -> Any:
        inside = _sampled_mask(row[0], row[1], shape, size, mirrored) >= 0.5
        numbers = tf.reduce_sum(tf.where(tf.reshape(inside, [-1, 8]), bits, 0), axis=1)
        return tf.cast(numbers, tf.uint8)

    spec = tf.TensorSpec([size * size // 8], tf.uint8)
    return tf.map_fn(one, (files, boxes), fn_output_signature=spec)


def _sampled_mask(file: Any, box: Any, shape: Any, size: int, mirrored: Any) -> Any:
    """float32[size, size]: the pixels of an object inside its box, at the centres of its parts."""
    tf = tensorflow()
    pixels = tf.io.decode_png(file, channels=1)[..., 0]
    words = "a mask has not the size of the image"
    pixels = records.if_equal(pixels, tf.shape(pixels), shape, words)
    shares = (tf.range(size, dtype=tf.float32) + 0.5) / size
    columns = tf.where(mirrored, shares[::-1], shares)
    for axis, points in ((0, shares), (1, columns)):
        length = tf.shape(pixels)[axis]
        # Pixel k has its centre at k + 0.5; beyond the outermost centres nothing changes.
        at = box[axis] + points * (box[axis + 2] - box[axis]) - 0.5
        at = tf.clip_by_value(at, 0.0, tf.cast(length - 1, tf.float32))
        low = tf.cast(at, tf.int32)
        first = tf.gather(pixels, low, axis=axis)
        second = tf.gather(pixels, tf.minimum(low + 1, length - 1), axis=axis)
        if axis == 0:  # only now, of few rows
            first, second = (tf.cast(rows > 0, tf.float32) for rows in (first, second))
        share = tf.reshape(at - tf.cast(low, tf.float32), [-1, 1] if axis == 0 else [1, -1])
        pixels = first + share * (second - first)
    return pixels
