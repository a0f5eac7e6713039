"""Prepared pixels against torchvision's and timm's, which are stored, and against Pillow."""

import hashlib
import io
import json

import numpy as np
import pytest
from PIL import Image

from common.errors import DataError
from common.images import input_spec
from common.images.input_spec import NAMED, prepare_image, seen_part
from common.tensorflow import tensorflow
from tests.test_input_pipeline import cropped, encode, noise, smooth


def picture(height, width):
    """uint8[height, width, 3]: waves and noise, by whole numbers alone."""
    y, x, c = np.indices((height, width, 3), np.int64)
    spots = (x * 73856093 ^ y * 19349663 ^ c * 83492791) % 97
    waves = (x * x // 40 + y * (3 + c) + x * y // (60 + 20 * c)) % 256
    return ((2 * waves + spots) % 256 * 5 // 6 + 10).astype(np.uint8)


SPECS = {
    **NAMED,
    "timm_288": input_spec.from_dict({**NAMED["timm_a1"].as_dict(), "resize": 288, "size": 288}),
}
# Of torchvision 0.28's Resize and CenterCrop, and timm 1.0.31's transforms_imagenet_eval.
STORED = {
    "torchvision_v1": ("f146c4ef2852a811", "55a96c99e1a30ccd"),
    "torchvision_v2": ("257fbe996ea6c297", "f9b46dc3d2fd5bb2"),
    "timm_a1": ("a6489d4f8473b135", "438527660357dc96"),
    "timm_a3": ("5fa539b5de6b900d", "c2face8468c49087"),
    "timm_288": ("28f8ff4f44757e0e", "d35e1947869cca78"),
}


@pytest.mark.parametrize("name", STORED)
def test_antialiased_pixels_are_those_of_torchvision_and_timm(name):
    for shape, stored in zip(((375, 500), (301, 203)), STORED[name], strict=True):
        pixels = prepare_image(encode(picture(*shape)), SPECS[name])
        assert hashlib.sha256(pixels.tobytes()).hexdigest()[:16] == stored


@pytest.mark.parametrize("subsampling", [0, 2])
def test_a_jpeg_is_decoded_as_by_pillow(subsampling):
    encoded = encode(smooth(301, 203), "JPEG", quality=90, subsampling=subsampling)
    decoded = np.asarray(Image.open(io.BytesIO(encoded)))
    spec = NAMED["torchvision_v1"]
    np.testing.assert_array_equal(
        prepare_image(encoded, spec), prepare_image(encode(decoded), spec)
    )


@pytest.mark.parametrize(("kernel", "name"), [("bicubic", "BICUBIC"), ("bilinear", "BILINEAR")])
def test_the_centre_is_cropped_first(kernel, name):
    """Without antialias against the NumPy kernel, with it against Pillow."""
    values = {**NAMED["tensorflow"].at(32).as_dict(), "kernel": kernel}
    window = pixels = picture(61, 47)[11:51, 4:44]  # as in tests/test_input_pipeline.py
    plain = prepare_image(encode(picture(61, 47)), input_spec.from_dict(values))
    if kernel == "bicubic":
        expected = cropped(picture(61, 47), (11, 4, 40, 40), 32)
        assert np.abs(plain.astype(int) - expected).max() <= 1
    smoothed = prepare_image(
        encode(picture(61, 47)), input_spec.from_dict({**values, "antialias": True})
    )
    pixels = Image.fromarray(window).resize((32, 32), Image.Resampling[name])
    np.testing.assert_array_equal(smoothed, np.asarray(pixels))
    assert (plain != smoothed).mean() > 0.5


@pytest.mark.parametrize("shape", [(60, 80), (60, 90), (93, 60)])
def test_without_antialias_it_is_bilinear(shape):
    """Resized so that the shorter side is 24, then cropped to 20."""
    spec = input_spec.from_dict({**NAMED["vgg"].at(20).as_dict(), "resize": 24})
    pixels = noise(*shape).astype(np.float64)
    for axis in (0, 1):
        length = shape[axis] * 24 // min(shape)
        place = (np.arange(length) + 0.5) * shape[axis] / length - 0.5
        low, part = np.floor(place).astype(int), place - np.floor(place)
        part = part[:, None, None] if axis == 0 else part[None, :, None]
        near, far = (np.take(pixels, low + i, axis) for i in (0, 1))
        begin = round((length - 20) / 2)  # Python's round, as torch's
        pixels = np.take(near * (1 - part) + far * part, range(begin, begin + 20), axis)
    assert np.abs(prepare_image(encode(noise(*shape)), spec) - pixels).max() <= 0.51


@pytest.mark.parametrize("name", NAMED)
def test_a_spec_survives_json_and_another_size(name):
    spec = NAMED[name]
    assert input_spec.from_dict(json.loads(json.dumps(spec.as_dict()))) == spec
    assert input_spec.parse_spec(json.dumps(spec.as_dict())) == spec == input_spec.parse_spec(name)
    assert spec.at(spec.size) == spec
    other = spec.at(96)
    assert other.size == 96 and (other.resize >= 96 or spec.resize == 0)
    assert prepare_image(encode(noise(40, 30)), other).shape == (96, 96, 3)
    largest = spec.at(16384)  # of `config.image_size`
    assert input_spec.from_dict(largest.as_dict()) == largest


def test_named_sizes_scale_as_timm_computes_them():
    a1 = NAMED["timm_a1"]
    assert [a1.at(size).resize for size in (224, 160, 320)] == [235, 168, 336]
    assert NAMED["torchvision_v1"].at(112).resize == 128


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1), (3, 2)])
@pytest.mark.parametrize("name", ["tensorflow", "torchvision_v1", "vgg"])
def test_strange_shapes(name, shape):
    spec = NAMED[name].at(32)
    assert prepare_image(encode(noise(*shape)), spec).shape == (32, 32, 3)


@pytest.mark.parametrize(("shape", "begin", "end"), [((1, 201), 68, 132), ((2, 300), 86, 214)])
def test_of_a_long_image_64_squares_in_the_middle_count(shape, begin, end):
    """Of 201 pixels, 68 before and 69 behind are left out."""
    pixels, spec = picture(*shape), NAMED["torchvision_v1"].at(32)
    expected = prepare_image(encode(pixels[:, begin:end]), spec)
    np.testing.assert_array_equal(prepare_image(encode(pixels), spec), expected)
    pixels = pixels.swapaxes(0, 1)
    expected = prepare_image(encode(pixels[begin:end]), spec)
    np.testing.assert_array_equal(prepare_image(encode(pixels), spec), expected)


def test_without_pillow_pixels_differ_by_one():
    """By two where a bicubic kernel goes beyond black and white."""
    blocks = np.kron(np.indices((6, 8)).sum(0) % 2, np.ones((12, 12)))[..., None] * 255
    spec = NAMED["timm_a1"].at(40)
    assert (spec.kernel, spec.antialias) == ("bicubic", True)
    for pixels, most in ((picture(90, 77), 1), (blocks.repeat(3, 2).astype(np.uint8), 2)):
        encoded = encode(pixels)
        portable = input_spec.evaluated(tensorflow().constant(encoded), spec, is_portable=True)
        difference = prepare_image(encoded, spec).astype(int) - portable.numpy()
        assert np.abs(difference).max() <= most and (difference != 0).mean() < 0.25
    assert (portable.numpy().min(), portable.numpy().max()) == (0, 255)


def test_other_modes_and_formats():
    grey = encode(smooth(40, 50), "PNG", mode="L")
    assert (np.ptp(prepare_image(grey, NAMED["timm_a1"].at(32)), axis=2) == 0).all()
    for file_format in ("BMP", "GIF", "JPEG"):
        assert prepare_image(encode(noise(40, 50), file_format), NAMED["vgg"].at(32)).shape[2] == 3


@pytest.mark.parametrize(
    "encoded",
    [b"", b"hello", encode(noise(20, 20), "JPEG")[:200]],
    ids=["empty", "text", "cut JPEG"],
)
def test_what_is_no_image_is_refused_in_one_line(encoded):
    with pytest.raises(DataError, match="^no image that can be decoded: ") as caught:
        prepare_image(encoded, NAMED["tensorflow"].at(16))
    assert "\n" not in str(caught.value)


GOOD = NAMED["torchvision_v1"].as_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"size": 1, "resize": 4},
        {"size": 65536, "resize": 65536},
        {"mean": [0, 255, 1.5], "std": [1, 255, 2.5]},
    ],
)
def test_limits_of_a_spec(change):
    assert input_spec.from_dict({**GOOD, **change}).as_dict() == {**GOOD, **change}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", 0),
        ("size", True),
        ("resize", 200),
        ("resize", 897),
        ("kernel", ["bilinear"]),
        ("antialias", 1),
        ("channels", "GBR"),
        ("mean", [0, 0, 256]),
        ("mean", [float("nan"), 0, 0]),
        ("std", [10**400, 1, 1]),
        ("std", [0.229, 0.224, 0.225]),
        ("crop", 1),
    ],
    ids=str,
)
def test_what_is_no_spec_is_refused_in_one_line(key, value):
    words = "the keys size, resize, " if key == "crop" else f"{key}="
    with pytest.raises(DataError, match=words) as caught:
        input_spec.from_dict({**GOOD, key: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize("text", ["imagenet", "[" * 100_000, "null", '{"size": 1}', "{"])
def test_a_text_that_is_no_spec_is_refused_in_one_line(text):
    with pytest.raises(DataError, match="use one of 'tensorflow', |is a JSON object with"):
        input_spec.parse_spec(text)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(300, 400), (417, 233), (90, 120), (1000, 15)])
def test_the_seen_part_is_where_the_pixels_are_from(name, shape):
    """The colours of a picture say where they are; resizing keeps such ramps, but at edges."""
    spec, (height, width) = NAMED[name], shape
    y, x = np.indices(shape) + 0.5
    ramps = np.stack([255 * y / height, 255 * x / width, 0 * x], axis=2)
    pixels = prepare_image(encode(np.rint(ramps).astype(np.uint8), "PNG"), spec)[..., :2] / 255
    top, left, bottom, right = seen_part(height, width, spec)
    assert 0 <= top < bottom <= height and 0 <= left < right <= width
    centres = (np.arange(spec.size) + 0.5) / spec.size
    middle = slice(spec.size // 16, -spec.size // 16)  # without edges, where pixels are repeated
    rows = (top + (bottom - top) * centres) / height
    columns = (left + (right - left) * centres) / width
    atol = 1.5 / 255 + 0.1 / width
    np.testing.assert_allclose(pixels[:, 0, 0][middle], rows[middle], atol=atol)
    np.testing.assert_allclose(pixels[0, :, 1][middle], columns[middle], atol=atol)
