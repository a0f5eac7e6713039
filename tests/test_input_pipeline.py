"""Batches and pixels against PIL for decoding and NumPy for the rest."""

import dataclasses
import io
import itertools
from math import ceil

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import input_pipeline
from common.data.order import Order
from common.data.shards import Shards
from common.images import input_spec
from common.images.input_spec import prepare_image
from common.tensorflow import tensorflow
from input_pipeline import Preprocessing, Source


def encode(pixels, file_format="PNG", mode=None, **settings):
    """An image file; `mode` is PIL's."""
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, file_format, **settings)
    return file.getvalue()


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def smooth(height, width):
    """Noise without the high frequencies that JPEG decoders may treat differently."""
    image = Image.fromarray(noise(-(-height // 8), -(-width // 8)))
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def example(encoded, label):
    train = tensorflow().train
    image = train.Feature(bytes_list=train.BytesList(value=[encoded]))
    number = train.Feature(int64_list=train.Int64List(value=[label]))
    feature = {"image/encoded": image, "image/class/label": number}
    return train.Example(features=train.Features(feature=feature)).SerializeToString()


def write(folder, counts, encoded):
    """A Source of sum(counts) examples: example i is `encoded(i)` with label 3 * i % 7."""
    tf, number, paths = tensorflow(), 0, []
    for file, count in enumerate(counts):
        paths.append(str(folder / f"train-{file:05d}"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for _ in range(count):
                writer.write(example(encoded(number), 3 * number % 7 + 1))
                number += 1
    shards = Shards(tuple(paths), tuple(counts))
    return Source(shards, "image/encoded", "image/class/label", 1, 7, ())


def one_colour(number):
    return np.array([number % 251, 250 - number % 251, 7 * number % 256], np.uint8)


SIZE = 6
CROPS = Preprocessing(SIZE, 0.3, True)


# Keys.


@pytest.mark.parametrize(
    ("name", "preprocessing", "kernel"),
    [("tensorflow", "fast", "bilinear"), ("tensorflow", "exact", "bicubic")]
    + [("timm_a1", "fast", "bicubic"), ("keras", "exact", "bilinear")],
)
def test_tensorflows_pixels_are_evaluated_as_they_are_trained(name, preprocessing, kernel):
    """The kernel of all others is their own."""
    spec = Preprocessing(32, 0.3, True, preprocessing=preprocessing, input_spec=name).spec
    assert spec == dataclasses.replace(input_spec.NAMED[name].at(32), kernel=kernel)


# Streams and shares of hosts.

SPECS = {"image": ((SIZE, SIZE, 3), "uint8"), "label": ((), "int32"), "id": ((), "int32")}


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """53 images of noise of different sizes in uneven files, one of them empty."""
    folder = tmp_path_factory.mktemp("noisy")
    return write(folder, (11, 0, 11, 11, 11, 9), lambda i: encode(noise(9 + i % 5, 8 + i % 7, i)))


def train(source, order, start, steps, preprocessing=CROPS):
    """[steps] batches, their shapes and types verified."""
    streams, rows = order.share(0, 1), order.streams * order.rows
    stream = input_pipeline.train_batches(source, preprocessing, order, streams, start)
    batches = list(itertools.islice(stream, steps))
    for batch in batches:
        seconds = batch.pop("host_seconds")
        assert seconds.shape == (rows,) and (seconds > 0).all()
        actual = {k: (v.shape, v.dtype.name) for k, v in batch.items()}
        specs = SPECS | {"flip": ((), "bool")}
        assert actual == {k: ((rows, *shape), dtype) for k, (shape, dtype) in specs.items()}
    return batches


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        for key in ("image", "label", "flip", "id"):
            np.testing.assert_array_equal(batch[key], other[key], strict=True)


# 53 examples in 8 streams of 6 or 7, in blocks of 3, 2 rows a step: a block begins in every
# second step, and epochs end in steps 2 and 3.
def order_of(source, seed=1):
    return Order.make(source.shards.counts, seed, 16, 8, 24)


@pytest.fixture(scope="module")
def uninterrupted(noisy):
    return train(noisy, order_of(noisy), 0, 16)


def test_train_batches_are_the_order(noisy, uninterrupted):
    order = order_of(noisy)
    assert (order.streams, order.rows, order.block) == (8, 2, 3)
    for step, batch in enumerate(uninterrupted):
        assert batch["id"].tolist() == order.batch_ids(step).tolist()
        assert batch["label"].tolist() == [3 * i % 7 for i in batch["id"].tolist()]
    flips = np.concatenate([batch["flip"] for batch in uninterrupted])
    assert 0.4 < flips.mean() < 0.6  # of 256; a function of the seed
    seeds = np.concatenate([next(order.blocks(s, 0)).seeds[:2] for s in range(8)])
    assert uninterrupted[0]["flip"].tolist() == (seeds[:, 2] % 2 == 1).tolist()


@pytest.mark.parametrize("odd", [(), (40,), (0, 31, 52)], ids=str)
def test_other_kinds_among_jpegs_change_nothing_else(odd, noisy, uninterrupted, tmp_path):
    """The same pixels as in `noisy`, most of them as JPEGs that lose little."""

    def encoded(i):
        pixels = noise(9 + i % 5, 8 + i % 7, i)
        return encode(pixels) if i in odd else encode(pixels, "JPEG", quality=100, subsampling=0)

    source = write(tmp_path, noisy.shards.counts, encoded)
    global_batches = train(source, order_of(source), 0, 16)
    for batch, other in zip(global_batches, uninterrupted, strict=True):
        for key in ("label", "flip", "id"):
            np.testing.assert_array_equal(batch[key], other[key], strict=True)
        exact = np.isin(batch["id"], odd)
        np.testing.assert_array_equal(batch["image"][exact], other["image"][exact])
        assert_close(batch["image"], other["image"], most=20, mean=1.0)


def test_an_image_is_cropped_anew_in_each_epoch(uninterrupted):
    seen = {}
    for batch in uninterrupted:
        for number, image in zip(batch["id"].tolist(), batch["image"], strict=True):
            seen.setdefault(number, []).append(image.tobytes())
    again = [images for images in seen.values() if len(images) > 2]
    assert len(again) > 40
    assert np.mean([len(set(images)) / len(images) for images in again]) > 0.9


@pytest.mark.long
@pytest.mark.parametrize("total", [1, 6, 7, 23])
def test_evaluation_sees_every_example_once(tmp_path, total):
    counts = (total // 3, 0, total - total // 3)
    source = write(tmp_path, counts, lambda i: encode(np.tile(one_colour(i), (3, 4, 1))))
    for batch_size, hosts in [(6, 1), (6, 2), (6, 3), (32, 2)]:
        shares = [
            list(input_pipeline.eval_batches(source, CROPS, batch_size, host, hosts))
            for host in range(hosts)
        ]
        # Of the greatest share: ceil(ceil(total / hosts) / rows) batches.
        rows = batch_size // hosts
        assert {len(batches) for batches in shares} == {ceil(ceil(total / hosts) / rows)}
        seen = []
        for batch in itertools.chain(*shares):
            actual = {k: (v.shape, v.dtype.name) for k, v in batch.items()}
            specs = SPECS | {"mask": ((), "float32")}
            assert actual == {k: ((rows, *shape), dtype) for k, (shape, dtype) in specs.items()}
            real = int(batch["mask"].sum())
            assert batch["mask"].tolist() == [1.0] * real + [0.0] * (rows - real)
            for i in range(real):
                number = int(batch["id"][i])
                assert batch["label"][i] == 3 * number % 7
                assert (batch["image"][i] == one_colour(number)).all()
            seen += batch["id"][:real].tolist()
        assert sorted(seen) == list(range(total))


# Pixels.


def keys_weights(size, begin, length, whole):
    """[size, whole] of cubic convolution (Keys, a = -0.5) of pixels begin .. begin + length - 1."""
    weights = np.zeros((size, whole))
    for i in range(size):
        centre = (i + 0.5) * length / size - 0.5
        for tap in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            x = abs(centre - tap)
            near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
            if 0 <= tap < length:  # beyond the edge of the crop there is nothing
                weights[i, begin + tap] = near if x <= 1 else far if x < 2 else 0
    return weights / weights.sum(axis=1, keepdims=True)


def cropped(pixels, window, size):
    """uint8[size, size, 3] of the window (y, x, height, width) of an image."""
    y, x, height, width = window
    rows = keys_weights(size, y, height, pixels.shape[0])
    columns = keys_weights(size, x, width, pixels.shape[1])
    resized = np.stack([rows @ channel @ columns.T for channel in pixels.T.swapaxes(1, 2)], -1)
    return np.clip(np.round(resized), 0, 255).astype(np.uint8)


def evaluated(encoded, size):
    return prepare_image(encoded, input_spec.TENSORFLOW.at(size))


def trained(encoded, seed, size, area_min):
    tf, preprocessing = tensorflow(), Preprocessing(size, area_min, True)
    return input_pipeline._train_image(
        tf.constant(encoded), tf.constant(seed), preprocessing, size
    ).numpy()


def assert_close(image, expected, most, mean):
    assert image.dtype == np.uint8 and image.shape == expected.shape
    difference = np.abs(image.astype(int) - expected)
    assert difference.max() <= most and difference.mean() <= mean


# (height, width, size) -> (y, x, side), by hand from section "Preprocessing, exact": the padding
# is 32 of 224, 5 of 32, 1 of 8; side = int(size / (size + padding) * shorter side); each offset is
# (rest + 1) // 2.
WINDOWS = {
    (375, 500, 224): (24, 86, 328),  # 328.125
    (500, 333, 224): (105, 21, 291),  # 291.375
    (256, 256, 224): (16, 16, 224),
    (257, 301, 224): (17, 39, 224),  # 224.875
    (37, 51, 32): (3, 10, 32),
    (61, 47, 32): (11, 4, 40),  # 40.65
    (9, 9, 8): (1, 1, 8),
    (23, 17, 8): (4, 1, 15),  # 15.1
    (5, 40, 8): (1, 18, 4),  # 4.4
    (2, 500, 8): (1, 250, 1),  # 1.8
}


@pytest.mark.parametrize(("case", "window"), WINDOWS.items(), ids=str)
def test_eval_image(case, window):
    height, width, size = case
    y, x, side = window
    pixels = noise(height, width)
    image = evaluated(encode(pixels), size)
    # TensorFlow rounds the kernel's argument to 1/1024.
    assert_close(image, cropped(pixels, (y, x, side, side), size), most=1, mean=0.05)
    if side == size:  # nothing to resize
        np.testing.assert_array_equal(image, pixels[y : y + side, x : x + side])
    assert image.min() < 30 or side < 8  # noise overshoots, and is clipped, at both ends
    assert image.max() > 225 or side < 8


@pytest.mark.parametrize("subsampling", [0, 2])
@pytest.mark.parametrize(("case", "window"), list(WINDOWS.items())[:6], ids=str)
def test_eval_image_of_a_jpeg(case, window, subsampling):
    height, width, size = case
    y, x, side = window
    encoded = encode(smooth(height, width), "JPEG", quality=95, subsampling=subsampling)
    pixels = np.asarray(Image.open(io.BytesIO(encoded)))
    image, expected = evaluated(encoded, size), cropped(pixels, (y, x, side, side), size)
    if subsampling:  # colours at the edge: a decoder that crops does not see their neighbours
        assert_close(image, expected, most=40, mean=0.5)
        image, expected = image[1:-1, 1:-1], expected[1:-1, 1:-1]
    assert_close(image, expected, most=1, mean=0.05)


def seen_window(seed, area_min, height=180, width=240, size=48):
    """(y, x, height, width) of a train crop, from an image whose pixels tell where they are."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(height)[:, None], np.arange(width)[None]
    image = trained(encode(pixels), seed, size, area_min)
    inner = np.arange(3, size - 3)  # away from the edges the kernel keeps straight lines
    fits = []
    for values in (image[3:-3, :, 0].mean(axis=1), image[:, 3:-3, 1].mean(axis=0)):
        slope, first = np.polyfit(inner + 0.5, values, 1)
        fits.append((first + 0.5, slope * size))
    return fits[0][0], fits[1][0], fits[0][1], fits[1][1]


@pytest.mark.parametrize("area_min", [0.08, 0.5])
def test_train_windows(area_min):
    windows = np.array([seen_window([7, i], area_min) for i in range(60)])
    y, x, height, width = windows.T
    aspect, area = width / height, height * width / (180 * 240)
    assert (
        (y > -1).all() and (x > -1).all() and (y + height < 181).all() and (x + width < 241).all()
    )
    assert 0.73 < aspect.min() < 0.8 and 1.25 < aspect.max() < 1.37
    # A crop must also cover 0.1 of the image.
    low = max(area_min, 0.1)
    assert low - 0.02 < area.min() < low + 0.1 and 0.9 < area.max() < 1.01
    assert len({tuple(np.round(w)) for w in windows}) > 50


@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
def test_train_image_is_the_centre_where_no_crop_fits(file_format):
    encoded = encode(smooth(20, 300), file_format)  # 0.9 of it is never between 3:4 and 4:3
    for seed in ([0, 0], [5, 9]):
        np.testing.assert_array_equal(trained(encoded, seed, 16, 0.9), evaluated(encoded, 16))


GREY, COLOURS = smooth(50, 70)[..., 0], smooth(50, 70)
DEEP = np.random.default_rng(1).integers(0, 2**16, (50, 70)).astype(np.uint16)
ALPHA = np.dstack([COLOURS, GREY])
PALETTE = Image.fromarray(COLOURS).convert("P", palette=Image.Palette.ADAPTIVE, colors=32)
KINDS = {
    "grey JPEG": (encode(GREY, "JPEG"), None, 2),
    "CMYK JPEG": (encode(COLOURS, "JPEG", "CMYK"), None, 3),
    "progressive JPEG": (encode(COLOURS, "JPEG", progressive=True), None, 2),
    "RGB PNG": (encode(COLOURS), COLOURS, 1),
    "grey PNG": (encode(GREY), np.dstack([GREY] * 3), 1),
    "RGBA PNG": (encode(ALPHA), COLOURS, 1),
    "16 bit PNG": (encode(DEEP), np.dstack([DEEP >> 8] * 3), 1),
    "palette PNG": (encode(np.asarray(PALETTE.convert("RGB")), "PNG", "P"), None, 1),
    "BMP": (encode(COLOURS, "BMP"), COLOURS, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_images(kind):
    encoded, pixels, most = KINDS[kind]
    if pixels is None:
        pixels = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
    # 32 of 37 of 50 is 43.2: the window begins at (7 + 1) // 2 and (27 + 1) // 2.
    assert_close(evaluated(encoded, 32), cropped(pixels, (4, 14, 43, 43), 32), most, most / 4)
    crop = trained(encoded, [1, 2], 32, 0.08)
    assert crop.shape == (32, 32, 3) and crop.dtype == np.uint8 and crop.std() > 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_normalize(dtype):
    images, flip = noise(4 * 5, 7).reshape(4, 5, 7, 3), np.array([True, False, False, True])
    expected = images.astype(float)
    expected[flip] = expected[flip][:, :, ::-1]
    expected = (expected - [123.675, 116.28, 103.53]) / [58.395, 57.12, 57.375]
    images, flip = jnp.asarray(images), jnp.asarray(flip)
    actual = np.asarray(input_pipeline.normalize(images, flip, dtype))
    assert actual.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(actual.astype(float), expected, rtol=tolerance, atol=tolerance / 10)
    plain = np.asarray(input_pipeline.normalize(images, None, dtype))
    np.testing.assert_array_equal(plain[1:3], actual[1:3])
    np.testing.assert_array_equal(plain[[0, 3]][:, :, ::-1], actual[[0, 3]])
    blue_first = dataclasses.replace(input_spec.TENSORFLOW, channels="BGR")
    reverse = np.asarray(input_pipeline.normalize(images, None, dtype, blue_first))
    np.testing.assert_array_equal(reverse[..., ::-1], plain)


# Kernels and windows of config.preprocessing.


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


def test_reduced_decoding_is_antialiased_and_resumes_exactly(tmp_path):
    """Noise above the batch's resolution vanishes, at any size; a resume has the same pixels."""
    source = write(tmp_path, (4,), lambda i: encode(noise(1100 + i, 1000, i), "JPEG"))
    order = Order.make(source.shards.counts, 3, 2, 2, 4)
    batches = {}
    for start, reduced in ((0, True), (1, True), (0, False)):
        settings = Preprocessing(16, 0.5, True, reduced_decoding=reduced)
        stream = input_pipeline.train_batches(
            source,
            settings,
            order,
            range(2),
            start,
            lambda step: 16 + tensorflow().cast(step, "int32"),
        )
        batches[start, reduced] = list(itertools.islice(stream, 3 - start))
    for batch, other in zip(batches[1, True], batches[0, True][1:], strict=True):
        assert_same([batch], [other])
    for step, (ours, exact) in enumerate(zip(batches[0, True], batches[0, False], strict=True)):
        assert ours["image"].shape == exact["image"].shape == (2, 16 + step, 16 + step, 3)
        assert ours["image"].std() < exact["image"].std() / 3
