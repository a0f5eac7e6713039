"""Resizing on the host and on the device, and images in memory, against PIL and NumPy."""

import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import input_pipeline
from errors import DataError
from input_pipeline import Preprocessing
from ops.images import pixels as images
from ops.images.input_spec import NAMED
from ops.order import Order
from ops.shards import tensorflow
from tests.test_input_pipeline import encode, noise, smooth, write

CROP = jax.jit(images.crop_on_device, static_argnums=(3, 4))
BILINEAR = Image.Resampling.BILINEAR


def boxed(pixels, window, size, flip=False):
    """uint8[size, size, 3] of a window (y, x, height, width), by PIL."""
    y, x, height, width = map(float, window)
    box = (x, y, x + width, y + height)
    resized = np.asarray(Image.fromarray(pixels).resize((size, size), BILINEAR, box))
    return resized[:, ::-1] if flip else resized


WINDOWS = [
    (0, 0, 48, 48),  # everything, smaller
    (10, 7, 16, 16),  # as it is
    (3.25, 4.75, 21.5, 40.125),  # a fraction, another aspect
    (40.5, 30.25, 7.5, 17.75),  # up to the edges, larger
    (20, 20, 0.5, 0.75),  # less than a pixel
]


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.51), ("bfloat16", 2.5)])
def test_crop_on_device(dtype, most):
    """PIL rounds between its two passes and at the end; bfloat16 rounds each factor."""
    pixels = np.stack([smooth(48, 48), *(noise(48, 48, seed) for seed in range(4))])
    flip = np.array([False, True, False, True, False])
    window = np.array(WINDOWS, np.float32)
    crops = CROP(pixels, window, flip, 16, jnp.dtype(dtype))
    assert crops.shape == (5, 16, 16, 3) and crops.dtype == jnp.float32
    for image, original, box, mirrored in zip(crops, pixels, window, flip, strict=True):
        difference = np.abs(np.asarray(image) - boxed(original, box, 16, mirrored))
        assert difference.max() < most + 0.5, (box, difference.max())
        assert difference.mean() < most


def test_crop_is_standardized_like_normalize():
    pixels, window = noise(16, 16)[None], jnp.array([[0.0, 0.0, 16.0, 16.0]])
    flip = jnp.array([True])
    spec = NAMED["keras"].at(16)

    @functools.partial(jax.jit, static_argnums=0)
    def standardized(function, *arrays):
        return function(*arrays, jnp.float32, spec)

    crops = standardized(input_pipeline.crop, pixels, window, flip)
    expected = standardized(input_pipeline.normalize, pixels, flip)
    np.testing.assert_allclose(crops, expected, atol=1e-5)


def bilinear_weights(size, length):
    """[size, length] of linear interpolation between pixel centres, edges repeated."""
    weights = np.zeros((size, length))
    for i in range(size):
        centre = (i + 0.5) * length / size - 0.5
        low = int(np.floor(centre))
        for tap, share in ((low, low + 1 - centre), (low + 1, centre - low)):
            weights[i, min(max(tap, 0), length - 1)] += share
    return weights


@pytest.mark.parametrize("shape", [(37, 51), (16, 16), (9, 70)])
def test_fast_is_bilinear_without_antialias(shape):
    pixels = noise(*shape)
    rows, columns = (bilinear_weights(16, length) for length in shape)
    expected = np.stack([rows @ c @ columns.T for c in pixels.T.swapaxes(1, 2)], -1)
    tf = tensorflow()
    resized = images.resize(tf.constant(pixels), 16, "fast").numpy()
    assert resized.dtype == np.uint8
    assert np.abs(resized - expected).max() <= 0.51


def test_modes_share_windows_and_differ_in_the_kernel(tmp_path):
    source = write(tmp_path, (8,), lambda i: encode(smooth(40 + i, 60), "JPEG", quality=95))
    order = Order.make(source.shards.counts, 3, 8, 4, 8)
    by_mode = {}
    for mode in ("exact", "fast"):
        settings = Preprocessing(16, 0.3, True, mode)
        by_mode[mode] = next(input_pipeline.train_batches(source, settings, order, 0, 1, 0))
        (evaluated,) = input_pipeline.eval_batches(source, settings, 8, 0, 1)
        by_mode[mode, "eval"] = evaluated
    for a, b in (
        (by_mode["exact"], by_mode["fast"]),
        (by_mode["exact", "eval"], by_mode["fast", "eval"]),
    ):
        difference = np.abs(a["image"].astype(int) - b["image"])
        assert 0.2 < difference.mean() < 12  # the same window, another kernel
        np.testing.assert_array_equal(a["id"], b["id"])


def test_vgg_windows_are_squares_of_every_scale():
    """224 of an image whose shorter side is 256 to 512, anywhere in it."""
    tf = tensorflow()
    for height, width in ((300, 400), (512, 512), (900, 448)):
        draw = tf.function(lambda seed, h=height, w=width: images.random_square(h, w, seed))
        windows = np.array([draw(tf.constant([3, i])).numpy() for i in range(400)])
        y, x, tall, wide = windows.T
        np.testing.assert_array_equal(tall, wide)
        shorter = min(height, width)
        assert tall.min() >= int(shorter * 224 / 512) and tall.max() <= shorter * 224 / 256
        scales = shorter * 224 / tall  # uniform from 256 to 512
        assert abs(scales.mean() - 384) < 12 and np.ptp(scales) > 245
        assert y.min() >= 0 and x.min() >= 0
        for begin, length in ((y, height), (x, width)):
            place = begin / (length - tall)
            assert place.max() <= 1 and abs(place.mean() - 0.5) < 0.05 and np.ptp(place) > 0.95


@pytest.mark.parametrize("shape", [(1, 1), (1, 900), (2, 3)])
def test_vgg_windows_of_strange_shapes(shape):
    seed = tensorflow().constant([1, 2])
    y, x, height, width = images.random_square(shape[0], shape[1], seed).numpy()
    assert height == width >= 1 and 0 <= y <= shape[0] - height and 0 <= x <= shape[1] - width


# In memory.


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """53 images of different sizes in uneven files, one of them empty."""
    folder = tmp_path_factory.mktemp("noisy")
    return write(folder, (11, 0, 11, 11, 11, 9), lambda i: encode(smooth(40 + i % 5, 30 + i % 7)))


def cached(source, start, count, host=0, hosts=1):
    settings = Preprocessing(16, 0.3, True, decoded_cache=32)
    order = Order.make(source.shards.counts, 1, 16, 8, None)
    batches = input_pipeline.train_batches(source, settings, order, host, hosts, start)
    return list(itertools.islice(batches, count))


def test_crops_from_memory_are_those_of_the_images(noisy):
    """Window for window the same as decoding anew, but for the cache's resolution."""
    order = Order.make(noisy.shards.counts, 1, 16, 8, None)
    settings = Preprocessing(16, 0.3, True)
    direct = input_pipeline.train_batches(noisy, settings, order, 0, 1, 2)
    for batch, other in zip(cached(noisy, 2, 4), direct, strict=False):
        for key in ("id", "label", "flip"):
            np.testing.assert_array_equal(batch[key], other[key], strict=True)
        assert batch["image"].shape == (16, 32, 32, 3) and batch["window"].dtype == np.float32
        assert (batch["host_seconds"] >= 0).all()
        pixels = CROP(batch["image"], batch["window"], batch["flip"], 16, jnp.float32)
        mirrored = other["image"][:, :, ::-1]
        expected = np.where(batch["flip"][:, None, None, None], mirrored, other["image"])
        assert np.abs(np.asarray(pixels) - expected).mean() < 6
        shuffled = np.roll(expected, 1, axis=0)
        assert np.abs(np.asarray(pixels) - shuffled).mean() > 15


def test_streams_keep_their_examples_and_shuffle_all_of_them(noisy):
    order = Order.make(noisy.shards.counts, 1, 16, 8, None)
    assert order.fixed and order.block == 7
    for stream in range(8):
        begin, end = order.bounds(stream)
        length, blocks = end - begin, order.blocks(stream, 0)
        epochs = [next(blocks).ids.tolist() for _ in range(4)]
        assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
        assert len({tuple(epoch) for epoch in epochs}) > 1 and len(epochs[0]) == length
    whole = [set(next(order.blocks(s, 0)).ids.tolist()) for s in range(8)]
    assert set().union(*whole) == set(range(53)) and sum(map(len, whole)) == 53


def test_hosts_hold_their_share_only(noisy, caplog):
    hosts = 4
    caplog.set_level(logging.INFO, "tpu_suite")
    whole = cached(noisy, 3, 3)
    caplog.clear()
    parts = [cached(noisy, 3, 3, host, hosts) for host in range(hosts)]
    for batches, batch in zip(zip(*parts, strict=True), whole, strict=True):
        for key in ("image", "label", "id", "window", "flip"):
            np.testing.assert_array_equal(np.concatenate([b[key] for b in batches]), batch[key])
    counts = [int(r.args[0]) for r in caplog.records if r.msg.startswith("decoding")]
    assert sum(counts) == 53 and max(counts) <= 53 // hosts + 8


def test_a_fault_is_named_while_images_are_decoded(tmp_path):
    def encoded(i):
        return b"\xff\xd8\xffno image" if i == 5 else encode(smooth(20, 20))

    source = write(tmp_path, (4, 4), encoded)
    with pytest.raises(DataError, match=r"train-00001, record 1 \(counted from 0\) cannot be used"):
        order = Order.make(source.shards.counts, 1, 4, 2, None)
        settings = Preprocessing(16, 0.3, True, decoded_cache=16)
        next(input_pipeline.train_batches(source, settings, order, 0, 1, 0))
