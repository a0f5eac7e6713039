"""Batches of images with boxes: their order, their pixels, and what the device does to them.

Changes of colours are compared with float64 arithmetic, one step after the other.
"""

import io
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

from benchmarks.detection import augmentation, records
from benchmarks.detection.records import Source
from benchmarks.detection.ssd import input_pipeline
from benchmarks.detection.ssd.settings import Preprocessing
from benchmarks.records import RecordFiles
from common import hashing
from common.data.order import Order
from common.data.shards import Shards
from common.errors import DataError
from tests.benchmarks.detection.rows import assert_same, encode, example, first_batches, write

SIZE, MAX_BOXES = 24, 5
AUGMENT: Any = jax.jit(input_pipeline.augment, static_argnums=(3, 4))


def preprocessing(max_samples=1, antialias=False, **changed):
    return Preprocessing(
        max_boxes=MAX_BOXES,
        random_flip=True,
        image_size=SIZE,
        crop_side_min=0.3,
        max_samples=max_samples,
        antialias=antialias,
        **changed,
    )


SETTINGS = preprocessing()
IDS = tuple(range(10, 101, 10))
MEAN = np.array([0.485, 0.456, 0.406]) * 255
STDDEV = np.array([0.229, 0.224, 0.225]) * 255
LUMA = np.array([0.299, 0.587, 0.114])


def boxes_of(number):
    """float32[n, 4]: one to four boxes of image `number`; every seventh image has none."""
    draw = np.random.default_rng([1, number])
    count = 0 if number % 7 == 5 else draw.integers(1, 5)
    corner = draw.uniform(0, 0.7, (count, 2))
    sides = draw.uniform(0.05, 0.3, (count, 2))
    return np.concatenate([corner, corner + sides], axis=1).astype(np.float32)


def size_of(number):
    return 40 + number % 5, 50 + number % 7


def record(number, file_format="JPEG", **changed):
    boxes, size = boxes_of(number), size_of(number)
    labels = [IDS[(number + k) % 10] for k in range(len(boxes))]
    encoded = encode(*size, file_format, number)
    return example(encoded, changed.pop("size", size), boxes, labels, str(1000 + number), **changed)


COUNTS = (13, 0, 14, 14, 20)  # of which 53 have boxes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """61 images in uneven files, one of them empty; 8 images have no box."""
    path, numbers = tmp_path_factory.mktemp("boxes"), itertools.count()
    for file, count in enumerate(COUNTS):
        name = f"train-{file:05d}-of-00005.tfrecord"
        write(path / name, [record(i) for i in itertools.islice(numbers, count)])
    return path


@pytest.fixture(scope="module")
def source(folder):
    index = f"{folder}/cache/train.json"
    return records.open_records(RecordFiles(str(folder), "train-*", "train", index), IDS, MAX_BOXES)


KEPT = [i for i in range(sum(COUNTS)) if i % 7 != 5]
SPECS = {
    "image": ((SIZE, SIZE, 3), "uint8"),
    "boxes": ((MAX_BOXES, 4), "float32"),
    "classes": ((MAX_BOXES,), "int32"),
    "augment": ((), "int32"),
    "id": ((), "int32"),
}


def train(source, order, start, steps, settings=SETTINGS):
    """[steps] batches, their shapes and types verified."""
    rows = order.streams * order.rows
    spec = {k: ((rows, *shape), dtype) for k, (shape, dtype) in SPECS.items()}
    stream = input_pipeline.train_batches(source, settings, order, 0, 1, start)
    return first_batches(stream, steps, spec)


def test_images_without_objects_are_cropped_too(folder, source):
    where = RecordFiles(str(folder), "train-*", "train", f"{folder}/cache/empty.json")
    everything = records.open_records(where, IDS, MAX_BOXES, keep_empty=True)
    assert everything.shards.total == 61 and source.shards.total == 53
    empty, whole = 0, 0
    for batch in train(everything, order_of(everything), 0, 8):
        has_objects = (batch["classes"] > 0).any(1)
        assert has_objects.tolist() == [i % 7 != 5 for i in batch["id"]]
        assert not batch["boxes"][~has_objects].any()
        for row in np.flatnonzero(~has_objects):
            i = int(batch["id"][row])
            file = io.BytesIO(encode(*size_of(i), "JPEG", i))
            difference = resized(np.asarray(Image.open(file).convert("RGB")), False)
            whole += np.abs(difference - batch["image"][row]).mean() < 1
            empty += 1
    assert empty > 10 and whole < empty / 2


# 53 examples in 8 streams, in blocks of 3, 2 rows a step: epochs end in steps 2 and 3.
def order_of(source, seed=1):
    return Order.make(source.shards.counts, seed, 16, 8, 24)


@pytest.fixture(scope="module")
def uninterrupted(source):
    return train(source, order_of(source), 0, 10)


def test_batches_are_the_order(source, uninterrupted):
    order = order_of(source)
    assert source.shards.total == len(KEPT) == 53
    for step, batch in enumerate(uninterrupted):
        assert batch["id"].tolist() == order.batch_ids(step).tolist()
        for row, number in enumerate(KEPT[i] for i in batch["id"]):
            labels = [(number + k) % 10 + 1 for k in range(len(boxes_of(number)))]
            kept = [label for label in batch["classes"][row].tolist() if label]
            assert kept and [label for label in labels if label in kept] == kept
            area = np.prod(batch["boxes"][row, :, 2:] - batch["boxes"][row, :, :2], axis=1)
            assert (area > 0).tolist() == (batch["classes"][row] > 0).tolist()
    assert any((batch["classes"] > 0).sum(axis=1).max() == 4 for batch in uninterrupted)


@pytest.mark.parametrize("antialias", [False, True])
def test_pixels_and_boxes_of_a_crop(source, antialias):
    """Against PIL, which decodes the whole image and cuts it."""
    settings = preprocessing(50, antialias)
    order, sizes = order_of(source), []
    (batch,) = train(source, order, 0, 1, settings=settings)
    ids, seeds = next(order.steps(range(8), 0))
    assert batch["augment"].tolist() == seeds[:, 2].tolist()
    for row, (number, seed) in enumerate(zip((KEPT[i] for i in ids), seeds, strict=True)):
        boxes, size = boxes_of(number), size_of(number)
        y, x, height, width = (
            input_pipeline.crop_window(boxes, size, input_pipeline.draw_crop(seed, 50), 0.3)
            .numpy()
            .tolist()
        )
        sizes.append((height, width))
        pixels = np.asarray(Image.open(io.BytesIO(encode(*size, "JPEG", number))).convert("RGB"))
        expected = resized(pixels[y : y + height, x : x + width], antialias)
        inner = slice(1, -1)  # a decoder that crops does not see the neighbours of the crop
        difference = np.abs(batch["image"][row].astype(float) - expected)[inner, inner]
        assert difference.mean() < 1 and difference.max() < 12
        scale = np.array([*size, *size]) / [height, width, height, width]
        moved = boxes * scale - np.array([y, x, y, x]) / [height, width, height, width]
        kept = batch["boxes"][row][batch["classes"][row] > 0]
        candidates = np.clip(moved, 0, 1)
        for box in kept:
            assert np.abs(candidates - box).max(axis=1).min() < 1e-5
    assert len(set(sizes)) > 8


def resized(pixels, antialias, side=SIZE):
    """float64[side, side, 3], bilinear with half-pixel centres, from uint8[h, w, 3]."""
    values = pixels.astype(float)
    for axis in (0, 1):
        length = values.shape[axis]
        scale = length / side
        reach = max(scale, 1) if antialias else 1
        centre = (np.arange(side) + 0.5) * scale - 0.5
        if not antialias:
            centre = np.clip(centre, 0, length - 1)
        distance = np.abs(np.arange(length) - centre[:, None]) / reach
        weights = np.maximum(1 - distance, 0)
        weights /= weights.sum(axis=1, keepdims=True)
        values = np.moveaxis(np.tensordot(weights, values, (1, axis)), 0, axis)
    return values


@pytest.mark.parametrize("antialias", [False, True])
def test_evaluation_has_whole_images(folder, antialias):
    index = f"{folder}/cache/eval.json"
    where = RecordFiles(str(folder), "train-*", "eval", index)
    everything = records.open_records(where, IDS, MAX_BOXES)
    settings = preprocessing(1, antialias)
    for hosts in (1, 2):
        seen = []
        for host in range(hosts):
            for batch in input_pipeline.eval_batches(everything, settings, 8, host, hosts):
                assert set(batch) == {"image", "image_id", "size", "id", "mask"}
                assert batch["image_id"].dtype == batch["id"].dtype == np.int32
                assert batch["size"].dtype == np.float32 and batch["size"].shape == (8 // hosts, 2)
                real = batch["mask"] == 1
                assert (batch["image_id"][real] == batch["id"][real] + 1000).all()
                seen += batch["id"][real].tolist()
                for row in np.flatnonzero(real).tolist():
                    size = size_of(i := int(batch["id"][row]))
                    assert batch["size"][row].tolist() == [*size]
                    if i % 9 == 0:
                        file = io.BytesIO(encode(*size, "JPEG", i))
                        pixels = np.asarray(Image.open(file).convert("RGB"))
                        difference = np.abs(batch["image"][row] - resized(pixels, antialias))
                        assert difference.mean() < 1 and difference.max() < 12
        assert seen == list(range(61))


CUT = encode(40, 50, "JPEG")[:90]


@pytest.mark.parametrize(
    ("words", "faulty"),
    [
        ("image/height and image/width", record(1, size=(41, 50))),
        ("cannot be used", example(CUT, (40, 50), [(0, 0, 1, 1)], [10])),
        ("a category is none", example(encode(40, 50), (40, 50), [(0, 0, 1, 1)], [11])),
    ],
    ids=["size", "image", "category"],
)
def test_a_fault_that_training_meets(words, faulty, tmp_path):
    """After the scan: the source is made without it."""
    path = tmp_path / "train-0"
    write(path, [record(0), record(1), faulty, record(3)])
    source = Source(Shards((str(path),), (4,)), IDS)
    batches = input_pipeline.train_batches(source, SETTINGS, Order.make((4,), 0, 4, 1, 4), 0, 1, 0)
    with pytest.raises(DataError, match=rf"train-0, record 2 \(counted from 0\).*{words}"):
        next(batches)


def test_other_kinds_than_jpeg(tmp_path, source):
    """PNGs and grey JPEGs among JPEGs are decoded as well."""
    grey = Image.fromarray(np.arange(40 * 50, dtype=np.uint8).reshape(40, 50))
    file = io.BytesIO()
    grey.save(file, "JPEG", quality=100)
    rows = [record(0), record(1, "PNG"), example(file.getvalue(), (40, 50), [(0, 0, 1, 1)], [10])]
    write(tmp_path / "train-0", rows)
    few = Source(Shards((str(tmp_path / "train-0"),), (3,)), IDS)
    order = Order.make((3,), 0, 3, 1, 3)
    batch = next(input_pipeline.train_batches(few, SETTINGS, order, 0, 1, 0))
    assert sorted(batch["id"]) == [0, 1, 2]
    image = batch["image"][batch["id"] == 2][0]
    assert image.std() > 10 and (image[..., 0] == image[..., 2]).all()


# On the device.


@pytest.mark.parametrize(
    ("draws", "side", "begin"),
    [
        ((0.49, 0.9, 0.9, 0.9), 24, (0, 0)),
        ((0.5, 1 / 3, 0, 0.999), 12, (0, 12)),
        ((0.7, 0.999, 0.5, 0.25), 6, (9, 4)),
        ((0.9, 0.1, 0.1, 0.8), 18, (0, 5)),
    ],
)
def test_an_image_on_a_larger_canvas(draws, side, begin):
    """At most 4 times as large; boxes move with the pixels, and padding stays."""
    image = np.random.default_rng(side).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    boxes = np.array([(0, 0.25, 0.5, 1), (0.125, 0.5, 0.25, 0.75), (0, 0, 0, 0)], np.float32)
    found, moved = input_pipeline.zoom_out(image, boxes, np.array(draws, np.float32), 4)
    (y, x), expected = begin, np.broadcast_to(np.round(MEAN), image.shape).copy()
    expected[y : y + side, x : x + side] = resized(image, True, side)
    assert found.dtype == "uint8" and np.abs(found.numpy() - expected).max() <= 0.51
    corner = np.array([*begin, *begin]) / SIZE
    np.testing.assert_allclose(moved[:2], boxes[:2] * side / SIZE + corner, atol=1e-6)
    assert not moved[2].numpy().any()


def test_a_preset_changes_pixels_and_boxes_and_nothing_else(source, uninterrupted):
    settings = preprocessing(augmentation="strong")
    batches, half = train(source, order_of(source), 0, 6, settings=settings), []
    assert_same(train(source, order_of(source), 4, 2, settings=settings), batches[4:])
    for plain, batch in zip(uninterrupted, batches, strict=False):
        for name in ("id", "classes", "augment"):
            np.testing.assert_array_equal(batch[name], plain[name])
        half += (batch["image"] == plain["image"]).reshape(16, -1).all(1).tolist()
        same = (batch["boxes"] == plain["boxes"]).reshape(16, -1).all(1)
        assert same.tolist() == half[-16:]
    assert 0.3 < np.mean(half) < 0.7


def seeds_and_boxes(count):
    draw = np.random.default_rng(count)
    images = draw.integers(0, 256, (count, 9, 11, 3), np.uint8)
    corner = draw.uniform(0, 0.5, (count, 3, 2))
    boxes = np.concatenate([corner, corner + 0.4], axis=-1).astype(np.float32)
    boxes[:, 2] = 0  # padding
    return images, boxes, draw.integers(0, 2**31, count).astype(np.int32)


def test_augment_as_float64_arithmetic():
    images, boxes, seeds = seeds_and_boxes(64)
    ours, moved = AUGMENT(images, boxes, seeds, True, jnp.float32)
    assert ours.dtype == moved.dtype == jnp.float32
    flips = 0
    for i, seed in enumerate(seeds):
        u = [float(hashing.uniform(seed, k)) for k in range(5)]
        signed = 2 * np.array(u) - 1
        strengths = 1 + 0.125 * signed[0], 1 + 0.5 * signed[1], 1 + 0.5 * signed[2]
        expected = reference_colours(images[i], *strengths, 0.05 * signed[3])
        expected = (np.clip(expected, 0, 255) - MEAN) / STDDEV
        box = boxes[i].copy()
        if u[4] < 0.5:
            flips += 1
            expected = expected[:, ::-1]
            box[:2] = np.stack([box[:2, 0], 1 - box[:2, 3], box[:2, 2], 1 - box[:2, 1]], axis=1)
        np.testing.assert_allclose(ours[i], expected, atol=0.01)
        np.testing.assert_allclose(moved[i], box, atol=1e-6)
    assert 16 < flips < 48
    first = (jnp.asarray(x[:1]) for x in (images, boxes, seeds))
    strong, _ = input_pipeline.augment(*first, random_flip=False, dtype=jnp.float32, colours=1.5)
    signed = 2 * np.array([float(hashing.uniform(seeds[0], k)) for k in range(4)]) - 1
    factors = 1 + 1.5 * np.array([0.125, 0.5, 0.5]) * signed[:3]
    expected = reference_colours(images[0], *factors, hue=1.5 * 0.05 * signed[3])
    np.testing.assert_allclose(strong[0], (np.clip(expected, 0, 255) - MEAN) / STDDEV, atol=0.01)
    _, same = AUGMENT(images, boxes, seeds, False, jnp.float32)
    np.testing.assert_array_equal(same, boxes)


def test_augment_is_the_same_on_any_number_of_devices():
    images, boxes, seeds = seeds_and_boxes(16)
    function = AUGMENT
    alone = function(images, boxes, seeds, True, jnp.float32)
    mesh = Mesh(np.array(jax.devices()), ("all",))
    rows = NamedSharding(mesh, PartitionSpec("all"))
    parts = [jax.device_put(a, rows) for a in (images, boxes, seeds)]
    together = function(*parts, True, jnp.float32)
    assert len(together[0].sharding.device_set) == 8
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def reference_colours(image, brightness, contrast, saturation, hue):
    """One image, as float64 before clipping: with TensorFlow's conversion to YIQ and back."""
    import tensorflow as tf

    x = image.astype(float) * brightness
    mean = (x @ LUMA).mean()
    x = contrast * x + (1 - contrast) * mean
    grey = (x @ LUMA)[..., None]
    x = saturation * x + (1 - saturation) * grey
    y, i, q = np.moveaxis(tf.image.rgb_to_yiq(tf.constant(x)).numpy(), -1, 0)
    turned = (i + 1j * q) * np.exp(-2j * np.pi * hue)
    yiq = np.stack([y, turned.real, turned.imag], axis=-1)
    return tf.image.yiq_to_rgb(tf.constant(yiq)).numpy()


def jitter(images, *strengths):
    rows = [jnp.asarray(strength, jnp.float32) for strength in strengths]
    result = augmentation.jitter_colours(jnp.asarray(images), *rows)
    assert result.dtype == jnp.float32 and result.shape == images.shape
    return np.asarray(result)


def test_means_of_large_images_are_exact():
    images = np.full((1, 2048, 2048, 3), 255, np.uint8)
    images[:, :1024] = 0  # the mean is 127.5; float32 sums over pixels would lose it
    result = jitter(images, [1], [0], [1], [0])
    np.testing.assert_allclose(result, 127.5, atol=1e-4)
