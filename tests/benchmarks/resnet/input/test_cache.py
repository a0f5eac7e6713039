"""Images in memory: cropped on the device as Pillow does, in the order of a run."""

import itertools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import input_pipeline
from benchmarks.resnet.input import cache
from benchmarks.resnet.settings import Images
from common.data.order import Order
from common.errors import DataError
from common.images.input_spec import NAMED
from tests.test_input_pipeline import encode, noise, smooth, write

CROP = jax.jit(cache.crop_on_device, static_argnums=(3, 4))
BILINEAR = Image.Resampling.BILINEAR
WINDOWS = [
    (0, 0, 48, 48),  # everything, smaller
    (10, 7, 16, 16),  # as it is
    (3.25, 4.75, 21.5, 40.125),  # a fraction, another aspect
    (40.5, 30.25, 7.5, 17.75),  # up to the edges, larger
    (20, 20, 0.5, 0.75),  # less than a pixel
]


def keys(**overrides: Any) -> Images:
    values = {"image_size": 16, "crop_area_min": 0.3, "random_flip": True, "decoded_cache": 32}
    return Images(**{**values, **overrides})


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.51), ("bfloat16", 2.5)])
def test_crop_on_device(dtype, most):
    """PIL rounds between its two passes and at the end; bfloat16 rounds each factor."""
    pixels = np.stack([smooth(48, 48), *(noise(48, 48, seed) for seed in range(4))])
    flip = np.array([False, True, False, True, False])
    crops = CROP(pixels, np.array(WINDOWS, np.float32), flip, 16, jnp.dtype(dtype))
    assert crops.shape == (5, 16, 16, 3) and crops.dtype == jnp.float32
    for crop, original, window, mirrored in zip(crops, pixels, WINDOWS, flip, strict=True):
        y, x, height, width = map(float, window)
        box = (x, y, x + width, y + height)
        expected = np.asarray(Image.fromarray(original).resize((16, 16), BILINEAR, box))
        difference = np.abs(np.asarray(crop) - (expected[:, ::-1] if mirrored else expected))
        assert difference.max() < most + 0.5, (window, difference.max())
        assert difference.mean() < most


@pytest.mark.parametrize(("name", "size"), [("window", 16), ("window_8", 8)])
def test_a_batch_is_cropped_to_the_size_of_its_window_and_normalised(name, size):
    pixels, window = noise(size, size)[None], jnp.array([[0.0, 0.0, size, size]])
    flip = jnp.array([True])
    batch: Any = {"image": pixels, name: window, "flip": flip}
    crops = cache.crop(batch, jnp.float32, keys(input_spec="keras"))
    expected = input_pipeline.normalize(jnp.asarray(pixels), flip, jnp.float32, NAMED["keras"])
    np.testing.assert_allclose(crops, expected, atol=1e-5)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """53 images of different sizes in uneven files, one of them empty."""
    folder = tmp_path_factory.mktemp("noisy")
    return write(folder, (11, 0, 11, 11, 11, 9), lambda i: encode(smooth(40 + i % 5, 30 + i % 7)))


def cached(source, start, count, host=0, hosts=1):
    order = Order.make(source.shards.counts, 1, 16, 8, None)
    batches = cache.train_batches(source, keys(), order, order.share(host, hosts), start)
    return list(itertools.islice(batches, count))


def test_crops_from_memory_are_those_of_the_images(noisy):
    """Window for window the same as decoding again, but for the cache's resolution."""
    order = Order.make(noisy.shards.counts, 1, 16, 8, None)
    direct = input_pipeline.train_batches(noisy, keys(), order, range(8), 2)
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


def test_hosts_decode_their_share_only(noisy, caplog):
    hosts = 4
    caplog.set_level(logging.INFO, "tpu_suite")
    alone = cached(noisy, 3, 3)
    caplog.clear()
    parts = [cached(noisy, 3, 3, host, hosts) for host in range(hosts)]
    for batches, batch in zip(zip(*parts, strict=True), alone, strict=True):
        for key in ("image", "label", "id", "window", "flip"):
            np.testing.assert_array_equal(np.concatenate([b[key] for b in batches]), batch[key])
    counts = [int(r.args[0]) for r in caplog.records if r.msg.startswith("decoding")]
    assert sum(counts) == 53 and max(counts) <= 53 // hosts + 8


def test_a_fault_is_named_while_images_are_decoded(tmp_path):
    def encoded(i):
        return b"\xff\xd8\xffno image" if i == 5 else encode(smooth(20, 20))

    source = write(tmp_path, (4, 4), encoded)
    order = Order.make(source.shards.counts, 1, 4, 2, None)
    with pytest.raises(DataError, match=r"train-00001, record 1 \(counted from 0\) cannot be used"):
        next(cache.train_batches(source, keys(decoded_cache=16), order, range(2), 0))


def test_large_jpegs_are_decoded_at_a_reduced_size(tmp_path):
    """Which changes an image without fine detail by less than a level."""

    def photo(i):
        return encode(np.asarray(Image.fromarray(noise(9, 9, i)).resize((1000, 1104))), "JPEG")

    source = write(tmp_path, (4,), photo)
    order, images = Order.make(source.shards.counts, 1, 2, 2, None), []
    for reduced in (False, True):
        settings = keys(reduced_decoding=reduced, decoded_cache=64)
        images.append(next(cache.train_batches(source, settings, order, range(2), 0))["image"])
    assert 0 < np.abs(images[0].astype(float) - images[1]).mean() < 1
