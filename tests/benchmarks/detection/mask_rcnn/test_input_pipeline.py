"""Batches of images with masks: their orientations, order, pixels, boxes and masks."""

import io
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from benchmarks.detection import augmentation, records
from benchmarks.detection.mask_rcnn import input_pipeline
from benchmarks.detection.mask_rcnn.aspect_ratio_groups import AspectRatioGroups, GroupedOrder
from benchmarks.detection.mask_rcnn.input_pipeline import packed_masks
from benchmarks.detection.mask_rcnn.settings import Preprocessing
from benchmarks.records import RecordFiles
from common import hashing
from common.errors import ConfigError, DataError
from common.layers import space_to_depth
from common.layers.space_to_depth import blocked
from common.tensorflow import tensorflow
from tests.benchmarks.detection.rows import (
    assert_same,
    encode,
    encode_pixels,
    example,
    first_batches,
    png,
    write,
)
from tests.benchmarks.detection.scenes_fixture import ellipse

IDS = (3, 7, 12, 90)
VALUES: dict[str, Any] = {
    **{"image_short": 40, "image_long": 56, "image_shape": (48, 64), "max_boxes": 3},
    **{"mask_size": 12, "random_flip": True},
}


def preprocessing(**changed):
    values: dict[str, Any] = {**VALUES, **changed}
    return Preprocessing(**values)


SETTINGS = preprocessing()
SPECS = {
    "size": ((2,), "float32"),
    "boxes": ((3, 4), "float32"),
    "classes": ((3,), "int32"),
    "masks": ((3, 18), "uint8"),
    "draw": ((), "int32"),
    "id": ((), "int32"),
}


def size_of(number):
    """Every fourth image is upright; some are square."""
    height, width = 30 + number % 7, 50 + number % 5
    if number % 9 == 8:
        return height, height
    return (width, height) if number % 4 == 3 else (height, width)


def objects_of(number):
    """(x, y, w, h, crowd) of up to five objects; every eighth image has only a crowd."""
    draw, (height, width) = np.random.default_rng([1, number]), size_of(number)
    found = []
    for k in range(1 if number % 8 == 6 else draw.integers(1, 6)):
        w, h = (int(n) for n in draw.integers(5, 20, 2))
        x, y = int(draw.integers(0, width - w)), int(draw.integers(0, height - h))
        found.append((x, y, w, h, number % 8 == 6 or k == 2))
    return found


def record(number, file_format="JPEG", **changed):
    size, objects = size_of(number), objects_of(number)
    height, width = size
    boxes = [
        (y / height, x / width, (y + h) / height, (x + w) / width) for x, y, w, h, _ in objects
    ]
    masks = {
        "crowds": [int(crowd) for *_, crowd in objects],
        "masks": [png(ellipse(size, *box)) for *box, _ in objects],
    }
    labels = [IDS[(number + k) % 4] for k in range(len(objects))]
    encoded = encode(*size, file_format, number)
    return example(encoded, size, boxes, labels, str(1000 + number), **(masks | changed))


def opened(folder, split="train", by_orientation=True, max_boxes=3, keep_empty=False):
    cache = f"{folder}/cache/{split}{by_orientation}.json"
    where = RecordFiles(str(folder), "train-*", split, cache)
    source = records.open_records(where, IDS, max_boxes, True, keep_empty)
    return (
        AspectRatioGroups.by_orientation(source) if by_orientation else AspectRatioGroups((source,))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """64 images in uneven files, of which 56 have single objects."""
    path, numbers = tmp_path_factory.mktemp("masks"), itertools.count()
    for file, count in enumerate((13, 0, 31, 20)):
        name = f"train-{file:05d}-of-00004.tfrecord"
        write(path / name, [record(i) for i in itertools.islice(numbers, count)])
    return path


@pytest.fixture(scope="module")
def source(folder):
    return opened(folder)


TRAINED = [i for i in range(64) if i % 8 != 6]
UPRIGHT = [i for i in TRAINED if size_of(i)[0] > size_of(i)[1]]
KEPT = [i for i in TRAINED if i not in UPRIGHT] + UPRIGHT  # by the id in a batch


def grouped_order(source, batch_size=8):
    return GroupedOrder(
        tuple(group.shards.counts for group in source.sources), 1, batch_size, 8, 24
    )


def train(source, grouped, start, steps, settings=SETTINGS):
    """[steps] batches, their shapes and types verified."""
    specs = [
        {
            k: ((grouped.batch_size, *shape), dtype)
            for k, (shape, dtype) in {**SPECS, "image": (blocked(height, width), "uint8")}.items()
        }
        for height, width in settings.shapes
    ]
    stream = input_pipeline.train_batches(source, settings, grouped, 0, 1, start)
    return first_batches(stream, steps, *specs)


@pytest.fixture(scope="module")
def uninterrupted(source):
    """Two epochs."""
    return train(source, grouped_order(source), 0, 14)


@pytest.mark.long
def test_batches_are_the_order_and_have_one_orientation(source, uninterrupted):
    grouped, seen = grouped_order(source), []
    assert [group.shards.total for group in source.sources] == [
        len(KEPT) - len(UPRIGHT),
        len(UPRIGHT),
    ]
    for step, batch in enumerate(uninterrupted):
        assert batch["id"].tolist() == grouped.batch_ids(step).tolist()
        upright = {KEPT[i] in UPRIGHT for i in batch["id"]}
        assert upright == {batch["image"].shape[1] == 32}
        seen.append(upright.pop())
    assert 2 <= sum(seen) <= 5  # 14 steps, of which a quarter are upright
    for number, place in ((i, source.shards.where(k)) for k, i in enumerate(KEPT)):
        file = np.searchsorted([13, 13, 44, 64], number, side="right")
        first = [0, 13, 13, 44][file]
        assert place.endswith(
            f"{file:05d}-of-00004.tfrecord, record {number - first} (counted from 0)"
        )


def test_an_image_without_objects_has_padding_alone(tmp_path):
    empty = example(encode(30, 50, "JPEG"), (30, 50), (), (), "1", crowds=[], masks=[])
    write(tmp_path / "train-0", [record(0), empty, empty])
    groups = opened(tmp_path, by_orientation=False, keep_empty=True)
    assert groups.shards.total == 3
    settings = preprocessing(image_shape=(64, 64))
    for batch in train(groups, grouped_order(groups, 3), 0, 2, settings=settings):
        has_objects = (batch["id"] == 0).tolist()
        for name in ("boxes", "classes", "masks"):
            assert batch[name].reshape(3, -1).any(1).tolist() == has_objects


def expected_size(number, settings):
    """The rule of the recipe, in Python's arithmetic."""
    height, width = size_of(number)
    scale = settings.image_short / min(height, width)
    if scale * max(height, width) > settings.image_long:
        scale = settings.image_long / max(height, width)
    return round(height * scale), round(width * scale)


def bilinear(values, y, x):
    """Values float[h, w] at points in pixels, whose centres are at .5; constant beyond them."""
    at = [np.clip(p - 0.5, 0, n - 1) for p, n in zip((y, x), values.shape, strict=True)]
    (y0, x0), (y1, x1) = (
        [f(p).astype(int).clip(0, n - 1) for p, n in zip(at, values.shape, strict=True)]
        for f in (np.floor, lambda p: np.floor(p) + 1)
    )
    b, a = at[0] - y0, at[1] - x0
    top = (1 - a) * values[y0, x0] + a * values[y0, x1]
    return (1 - b) * top + b * ((1 - a) * values[y1, x0] + a * values[y1, x1])


def grid(box, height, width):
    """The points (y, x), each [height, width], at the centres of the parts of a box."""
    y0, x0, y1, x1 = box
    rows = y0 + (np.arange(height) + 0.5) / height * (y1 - y0)
    columns = x0 + (np.arange(width) + 0.5) / width * (x1 - x0)
    return np.meshgrid(rows, columns, indexing="ij")


def check_row(batch, row, number, settings):
    """Compares an image with PIL's pixels, and its objects with sums in float64."""
    height, width = size = size_of(number)
    tall, wide = expected_size(number, settings)
    assert batch["size"][row].tolist() == [tall, wide]
    with Image.open(io.BytesIO(encode(*size, "JPEG", number))) as image:
        pixels = np.asarray(image).astype(float)
    points = grid((0, 0, height, width), tall, wide)
    resized = np.stack([bilinear(pixels[..., c], *points) for c in range(3)], axis=-1)
    image = space_to_depth.restore(batch["image"][row])
    actual = image[:tall, :wide].astype(float)
    mirrored = np.abs(actual - resized[:, ::-1]).max() <= 0.51
    assert mirrored or np.abs(actual - resized).max() <= 0.51
    assert not image[tall:].any() and not image[:, wide:].any()

    single = [(k, each) for k, each in enumerate(objects_of(number)) if not each[-1]]
    largest = sorted(single, key=lambda e: (-e[1][2] * e[1][3], e[0]))[: settings.max_boxes]
    kept = sorted(largest)
    assert (batch["classes"][row] > 0).sum() == len(kept)
    for place, (k, (x, y, w, h, _)) in enumerate(kept):
        assert batch["classes"][row, place] == (number + k) % 4 + 1
        scale = np.array([tall / height, wide / width] * 2)
        box = np.array([y, x, y + h, x + w]) * scale
        if mirrored:
            box[1::2] = wide - box[3::-2]
        np.testing.assert_allclose(batch["boxes"][row, place], box, atol=1e-3)
        m = settings.mask_size
        share = bilinear(ellipse(size, x, y, w, h).astype(float), *grid((y, x, y + h, x + w), m, m))
        share = share[:, ::-1] if mirrored else share
        bits = np.unpackbits(batch["masks"][row, place]).reshape(m, m)
        sure = np.abs(share - 0.5) > 1e-4
        assert sure.mean() > 0.9 and (bits == (share >= 0.5))[sure].all()
        assert 0.6 < bits.mean() < 0.95  # of an ellipse pi / 4
    assert not batch["boxes"][row, len(kept) :].any()
    assert not batch["masks"][row, len(kept) :].any()
    return mirrored


def test_pixels_boxes_and_masks(uninterrupted):
    mirrored = [
        check_row(batch, row, KEPT[i], SETTINGS)
        for batch in uninterrupted
        for row, i in enumerate(batch["id"])
    ]
    assert 0.3 < np.mean(mirrored) < 0.7


@pytest.mark.parametrize(("hosts", "by_orientation"), [(4, True), (1, False)])
def test_evaluation_has_every_image_once(folder, hosts, by_orientation):
    shape = (48, 64) if by_orientation else (64, 64)
    settings = preprocessing(image_shape=shape)
    source = opened(folder, "eval", by_orientation)
    shares = [
        list(input_pipeline.eval_batches(source, settings, 8, k, hosts)) for k in range(hosts)
    ]
    ids, image_ids = [], []
    for step in zip(*shares, strict=True):
        assert len({batch["image"].shape for batch in step}) == 1
        for batch in step:
            real = batch["mask"] > 0
            for row in np.flatnonzero(real):
                number = batch["image_id"][row] - 1000
                assert batch["original"][row].tolist() == list(size_of(number))
                assert batch["size"][row].tolist() == list(expected_size(number, settings))
            assert batch["id"].dtype == batch["image_id"].dtype == np.int32
            ids += batch["id"][real].tolist()
            image_ids += batch["image_id"][real].tolist()
    assert sorted(ids) == list(range(64)) and sorted(image_ids) == list(range(1000, 1064))
    assert [source.image_ids[i] for i in ids] == image_ids
    heights = [2 * batch["image"].shape[1] for batch in shares[0]]
    assert heights == sorted(heights) and set(heights) == ({48, 64} if by_orientation else {64})


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        *[((480, 640), (800, 1067)), ((640, 480), (1067, 800)), ((500, 353), (1133, 800))],
        *[((427, 640), (800, 1199)), ((375, 1242), (402, 1333)), ((612, 612), (800, 800))],
        *[((1, 5000), (1, 1333)), ((1200, 1600), (800, 1067))],
    ],
)
def test_sizes_of_the_recipe(size, expected):
    """Sides of 800 and at most 1333, as detectors print them for such images of COCO."""
    values = {"image_short": 800, "image_long": 1333, "image_shape": (832, 1344)}
    settings = preprocessing(**values)
    assert settings.resized(tensorflow().constant(size)).numpy().tolist() == list(expected)
    assert settings.shapes == ((832, 1344), (1344, 832))


def test_only_pixels_of_the_image_are_normalised():
    """3 x 5 of 4 x 6 pixels; zeros around them, whatever is there."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    blocks = space_to_depth.rearrange(jnp.asarray(pixels[None], jnp.float32))
    batch: Any = {"image": jnp.asarray(blocks, jnp.uint8), "size": np.array([[3, 5]], np.float32)}
    actual = input_pipeline.normalized(batch, jnp.float32)
    assert actual.shape == (1, 2, 3, 12) and actual.dtype == jnp.float32
    expected = (pixels - np.array([123.675, 116.28, 103.53])) / [58.395, 57.12, 57.375]
    expected[3:], expected[:, 5:] = 0, 0
    np.testing.assert_allclose(space_to_depth.restore(np.asarray(actual))[0], expected, atol=1e-5)


def test_what_the_seeds_of_an_example_decide(source):
    """The first one's parity mirrors; the second one is the seed of the device's draws."""

    def trained(*seeds, **changed):
        arguments = (48, 64), preprocessing(**changed), record(0), np.array(seeds, np.int32), True
        row = input_pipeline._trained(source.sources[0], *arguments)
        return int(row["draw"]), space_to_depth.restore(row["image"].numpy())

    (tall, wide), (_, plain) = expected_size(0, SETTINGS), trained(0, 7, 1)
    mirrored = plain.copy()
    mirrored[:tall, :wide] = plain[:tall, :wide][:, ::-1]
    for seeds, expected in (((1, 6, 0), mirrored), ((2, 7, 1), plain), ((3, 4, 4), mirrored)):
        draw, image = trained(*seeds)
        assert draw == seeds[1]
        np.testing.assert_array_equal(image, expected)
    np.testing.assert_array_equal(trained(1, 7, 1, random_flip=False)[1], plain)


def plain_window(number, window, zoom, settings):
    """(int tall and wide, float[tall, wide, 3], [(class, box, share of mask)]) of a window."""
    height, width = size_of(number)
    y, x, h, w = window
    scale = settings.image_short / min(h, w)
    scale = min(scale, settings.image_long / max(h, w)) * zoom
    tall, wide = round(h * scale), round(w * scale)
    with Image.open(io.BytesIO(encode(height, width, "PNG", number))) as image:
        part = np.asarray(image).astype(float)[y : y + h, x : x + w]
    points = grid((0, 0, h, w), tall, wide)
    resized = np.stack([bilinear(part[..., c], *points) for c in range(3)], axis=-1)
    rows, m = [], settings.mask_size
    for k, (left, top, across, down, crowd) in enumerate(objects_of(number)):
        cut = max(top, y), max(left, x), min(top + down, y + h), min(left + across, x + w)
        sides = max(cut[2] - cut[0], 0), max(cut[3] - cut[1], 0)
        if crowd or sides[0] * sides[1] < across * down / 4:
            continue
        mask = ellipse((height, width), left, top, across, down).astype(float)
        share = bilinear(mask, *grid(cut, m, m))
        corner, unit = np.array([y, x] * 2), np.array([tall / h, wide / w] * 2)
        rows.append(((number + k) % 4 + 1, (np.array(cut) - corner) * unit, share))
    return tall, wide, resized, rows


@pytest.mark.parametrize("augmentation", ["medium", "strong"])
def test_a_part_of_an_image_at_another_scale(source, augmentation):
    """Pixels, boxes and masks are those of the window, moved exactly; some objects leave it."""
    settings = preprocessing(augmentation=augmentation, max_boxes=5)
    least, most = {"medium": (0.8, 1.25), "strong": (0.5, 2)}[augmentation]
    lost, factors = 0, []
    for number in (i for i in range(40) if i in TRAINED and i not in UPRIGHT):
        seeds, size = np.array([2 * number, 5, number], np.int32), np.array(size_of(number))
        window, zoom = input_pipeline.draw_window(seeds, size, least, most)
        (y, x, h, w), zoom = window.numpy().tolist(), float(zoom)
        assert 0 <= y <= y + h <= size[0] and 0 <= x <= x + w <= size[1]
        assert zoom == 1 or (h, w) == tuple(size)  # either larger or smaller
        factors.append(zoom * size[0] / h)
        # A cut JPEG differs at its edge.
        inputs = record(number, "PNG"), seeds, False
        row = input_pipeline._trained(source.sources[0], (48, 64), settings, *inputs)
        row = {name: np.asarray(value) for name, value in row.items()}
        tall, wide, pixels, objects = plain_window(number, (y, x, h, w), zoom, settings)
        image = space_to_depth.restore(row["image"])
        assert row["size"].tolist() == [tall, wide] and not image[tall:].any()
        assert np.abs(image[:tall, :wide] - pixels).max() <= 0.51
        assert row["classes"].tolist() == [k for k, *_ in objects] + [0] * (5 - len(objects))
        for place, (_, box, share) in enumerate(objects):
            np.testing.assert_allclose(row["boxes"][place], box, atol=1e-3)
            bits = np.unpackbits(row["masks"][place]).reshape(share.shape)
            sure = np.abs(share - 0.5) > 1e-4
            assert (bits == (share >= 0.5))[sure].all()
        lost += sum(not crowd for *_, crowd in objects_of(number)) - len(objects)
    assert least - 0.02 <= min(factors) < 0.98 and 1.05 < max(factors) <= most + 0.1
    assert bool(lost) == (augmentation == "strong")


def test_a_preset_keeps_the_order_and_the_draws(source, uninterrupted):
    settings = preprocessing(augmentation="strong")
    batches = train(source, grouped_order(source), 0, 6, settings=settings)
    assert_same(train(source, grouped_order(source), 4, 2, settings=settings), batches[4:])
    for plain, batch in zip(uninterrupted, batches, strict=False):
        assert batch["image"].shape == plain["image"].shape
        for name in ("id", "draw"):
            np.testing.assert_array_equal(batch[name], plain[name])
        assert (batch["boxes"].reshape(8, -1, 2, 2) <= batch["size"][:, None, None] + 1e-3).all()


def test_colours_change_in_the_image_alone():
    """As SSD's colours of the part that is no padding, whose mean counts."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), np.uint8)
    pixels[1, 3:], pixels[1, :, 5:] = 0, 0
    blocks = space_to_depth.rearrange(jnp.asarray(pixels, jnp.float32))
    sizes = np.array([(4, 6), (3, 5)], np.float32)
    batch: Any = {"image": jnp.asarray(blocks, jnp.uint8), "size": sizes}
    batch["draw"] = np.array([3, 4], np.int32)
    found = space_to_depth.restore(
        np.asarray(input_pipeline.normalized(batch, jnp.float32, colours=1.5))
    )
    draws = hashing.uniform(batch["draw"][:, None], 2, jnp.arange(4))
    for i, (height, width) in enumerate(sizes.astype(int)):
        part = jnp.asarray(pixels[i : i + 1, :height, :width])
        expected = np.asarray(augmentation.jitter(part, 2 * draws[i : i + 1] - 1, 1.5))[0]
        expected = (expected - np.array([123.675, 116.28, 103.53])) / [58.395, 57.12, 57.375]
        np.testing.assert_allclose(found[i, :height, :width], expected, atol=1e-4)
        assert not found[i, height:].any() and not found[i, :, width:].any()


def test_a_damaged_mask(tmp_path):
    masks = [png(ellipse(size_of(4), *box)) for *box, _ in objects_of(4)]
    wrong = record(4, masks=[png(np.ones((30, 50))), *masks[1:]])
    write(tmp_path / "train-0", [record(0), record(1), wrong])
    source = opened(tmp_path)
    batches = input_pipeline.train_batches(source, SETTINGS, grouped_order(source, 2), 0, 1, 0)
    words = f"{tmp_path}/train-0, record 2 .* cannot be used: .*a mask has not the size of"
    with pytest.raises(DataError, match=words):
        list(itertools.islice(batches, 3))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"image_shape": (64, 48)}, r"config.image_shape=\(64, 48\)"),
        ({"image_shape": (32, 64)}, "config.image_short=40"),
        ({"image_long": 80}, "config.image_long=80"),
        ({"image_long": 36}, "config.image_short=40: .* config.image_long=36"),
        ({"mask_size": 14}, "config.mask_size=14: .* 4"),
    ],
)
def test_mistakes_in_the_config(changed, words):
    with pytest.raises(ConfigError, match=words):
        preprocessing(**changed)


def unpacked_masks(files, boxes, shape, size, mirrored=False):
    rows = packed_masks(
        tensorflow().constant(files), np.array(boxes, np.float32), shape, size, mirrored
    )
    assert rows.dtype == "uint8" and rows.shape == (len(files), size * size // 8)
    return np.unpackbits(rows.numpy(), axis=1).reshape(-1, size, size)


MASK_CASES = {
    "many pixels in one": ((70, 90), 20, (3.25, 1.5, 66.5, 80)),
    "one pixel in many": ((20, 15), 28, (4, 5, 10, 9.5)),
    "the whole image": ((12, 16), 16, (0, 0, 12, 16)),
    "thinner than a pixel": ((12, 16), 4, (3.1, 2, 3.3, 9)),
}


@pytest.mark.parametrize("name", MASK_CASES)
@pytest.mark.parametrize("mirrored", [False, True])
def test_masks_are_those_of_a_loop(name, mirrored):
    shape, size, box = MASK_CASES[name]
    draw = np.random.default_rng(len(name))
    y0, x0, y1, x1 = box
    masks = [draw.random(shape) < 0.5, ellipse(shape, x0, y0, x1 - x0, y1 - y0)]
    masks.append(np.ones(shape, bool))
    found = unpacked_masks([png(mask) for mask in masks], [box] * 3, shape, size, mirrored)
    for mask, bits in zip(masks, found, strict=True):
        share = bilinear(mask.astype(float), *grid(box, size, size))[:, :: -1 if mirrored else 1]
        sure = np.abs(share - 0.5) > 1e-4
        assert sure.mean() > 0.8
        np.testing.assert_array_equal(bits[sure], share[sure] >= 0.5)
    assert found[2].all()


def test_white_is_inside_as_well_as_one():
    mask = ellipse((30, 40), 5, 6, 20, 22)
    ones = unpacked_masks([png(mask)], [(6, 5, 28, 25)], (30, 40), 8)
    white = encode_pixels(np.repeat(255 * mask[..., None].astype(np.uint8), 3, 2), "PNG")
    np.testing.assert_array_equal(unpacked_masks([white], [(6, 5, 28, 25)], (30, 40), 8), ones)
    assert 0.5 < ones.mean() < 0.9


def test_a_half_is_inside():
    """The centres lie between two pixels: 1 and 1, 1 and 0, 0 and 0, and at the border 0."""
    mask = np.array([[1, 1, 0, 0]] * 4, bool)
    found = unpacked_masks([png(mask)], [(0, 0.5, 4, 4.5)], (4, 4), 4)
    np.testing.assert_array_equal(found[0], [[1, 1, 0, 0]] * 4)
