"""Windows and kernels of images on the host, against NumPy."""

import numpy as np
import pytest

import input_pipeline
from common.data.order import Order
from common.data.shards import tensorflow
from input_pipeline import Preprocessing
from tests.test_input_pipeline import encode, noise, smooth, write


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
    resized = input_pipeline.resize(tf.constant(pixels), 16, "fast").numpy()
    assert resized.dtype == np.uint8
    assert np.abs(resized - expected).max() <= 0.51


def test_modes_share_windows_and_differ_in_the_kernel(tmp_path):
    source = write(tmp_path, (8,), lambda i: encode(smooth(40 + i, 60), "JPEG", quality=95))
    order = Order.make(source.shards.counts, 3, 8, 4, 8)
    by_mode = {}
    for mode in ("exact", "fast"):
        settings = Preprocessing(16, 0.3, True, mode)
        by_mode[mode] = next(input_pipeline.train_batches(source, settings, order, range(4), 0))
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
        draw = tf.function(lambda seed, h=height, w=width: input_pipeline.random_square(h, w, seed))
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
    y, x, height, width = input_pipeline.random_square(shape[0], shape[1], seed).numpy()
    assert height == width >= 1 and 0 <= y <= shape[0] - height and 0 <= x <= shape[1] - width
