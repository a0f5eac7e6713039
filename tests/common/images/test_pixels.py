"""Decoding at a reduced size, against Pillow's draft mode and its antialiased resize."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.images import pixels
from common.tensorflow import tensorflow
from tests.test_input_pipeline import encode, noise, smooth

WINDOW = (37, 53, 1100, 1203)  # y, x, height, width


def decoded(encoded, window=None, **settings):
    """The pixels, with the window as the tensor that it is in a run."""
    tf = tensorflow()
    box = (lambda height, width: tf.constant(window)) if window else None
    return pixels.decode(tf.constant(encoded), box, **settings).numpy()


@pytest.fixture(scope="module")
def photo():
    rough = Image.fromarray(noise(33, 43))  # no detail that eight pixels lose
    return encode(np.asarray(rough.resize((1703, 1301))), "JPEG", quality=92)


@pytest.mark.parametrize("window", [WINDOW, None], ids=["a crop", "all"])
@pytest.mark.parametrize(("side", "divisor"), [(137, 8), (275, 4), (550, 2)])
def test_a_large_jpeg_is_reduced(photo, window, side, divisor):
    """To what libjpeg's own scaling gives Pillow: near to an antialiased resize of the window."""
    y, x, height, width = window or (0, 0, 1301, 1703)
    box: Any = [int(v / divisor + 0.5) for v in (x, y, x + width, y + height)]
    image = Image.open(io.BytesIO(photo))
    image.draft("RGB", (1703 // divisor, 1301 // divisor))
    actual = decoded(photo, window, only_jpeg=True, least_side=side).astype(float)
    assert min(actual.shape[:2]) >= side
    np.testing.assert_allclose(actual, np.asarray(image.crop(box), float), atol=1)
    if window:
        size: Any = actual.shape[1::-1]
        part: Any = [v * divisor for v in box]
        best = Image.open(io.BytesIO(photo)).resize(size, Image.Resampling.BICUBIC, part)
        assert np.mean((actual - np.asarray(best, float)) ** 2) ** 0.5 < 1


@pytest.mark.parametrize(
    ("encoded", "side"),
    [
        (encode(smooth(1023, 1025), "JPEG"), 8),
        (encode(smooth(1301, 1703)), 8),
        (encode(smooth(1301, 1703), "JPEG"), 551),
    ],
    ids=["a small JPEG", "a large PNG", "a small window"],
)
def test_all_others_keep_their_pixels(encoded, side):
    window = (7, 9, 1000, 1010) if side == 8 else WINDOW
    expected = decoded(encoded, window)
    np.testing.assert_array_equal(decoded(encoded, window, least_side=side), expected)


def test_bicubic_pixels_stay_within_a_byte():
    """Keys' kernel with a = -0.5, twice as large: the edges overshoot by 9 % of the step."""
    image = np.zeros((4, 8, 3), np.uint8)
    image[:, 4:] = 255
    found = pixels.sample(image, [4, 16], "bicubic").numpy()

    def weight(x):
        x = abs(x)
        inner, outer = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
        return inner if x <= 1 else outer if x < 2 else 0.0

    centres = (np.arange(16) + 0.5) / 2 - 0.5
    rows = np.array([[weight(c - i) for i in range(8)] for c in centres])
    rows /= rows.sum(1, keepdims=True)
    exact = rows @ image[0, :, 0]
    assert exact.min() < -5 and exact.max() > 260
    expected = np.floor(exact.clip(0, 255) + 0.5)
    np.testing.assert_allclose(found[2, :, 1], expected, atol=1)
