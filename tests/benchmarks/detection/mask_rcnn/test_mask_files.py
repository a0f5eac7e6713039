"""Masks cut out of PNGs of whole images, against a loop over their pixels."""

import numpy as np
import pytest

from benchmarks.detection.mask_rcnn.mask_files import packed
from ops.shards import tensorflow
from tests.benchmarks.detection.rows import encode_pixels, png
from tests.benchmarks.detection.scenes_fixture import ellipse


def loop(mask, box, size):
    """float[size, size]: the mask bool[h, w] at the centres of the parts of a box."""
    y0, x0, y1, x1 = map(float, box)
    found = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            y = min(max(y0 + (i + 0.5) / size * (y1 - y0) - 0.5, 0), mask.shape[0] - 1)
            x = min(max(x0 + (j + 0.5) / size * (x1 - x0) - 0.5, 0), mask.shape[1] - 1)
            for row in (int(y), int(y) + 1):
                for column in (int(x), int(x) + 1):
                    weight = max(0, 1 - abs(row - y)) * max(0, 1 - abs(column - x))
                    if weight and mask[row, column]:
                        found[i, j] += weight
    return found


def unpacked(files, boxes, shape, size, mirrored=False):
    rows = packed(tensorflow().constant(files), np.array(boxes, np.float32), shape, size, mirrored)
    assert rows.dtype == "uint8" and rows.shape == (len(files), size * size // 8)
    return np.unpackbits(rows.numpy(), axis=1).reshape(-1, size, size)


CASES = {
    "many pixels in one": ((70, 90), 20, (3.25, 1.5, 66.5, 80)),
    "one pixel in many": ((20, 15), 28, (4, 5, 10, 9.5)),
    "the whole image": ((12, 16), 16, (0, 0, 12, 16)),
    "thinner than a pixel": ((12, 16), 4, (3.1, 2, 3.3, 9)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mirrored", [False, True])
def test_masks_are_those_of_a_loop(name, mirrored):
    shape, size, box = CASES[name]
    draw = np.random.default_rng(len(name))
    y0, x0, y1, x1 = box
    masks = [draw.random(shape) < 0.5, ellipse(shape, x0, y0, x1 - x0, y1 - y0)]
    masks.append(np.ones(shape, bool))
    found = unpacked([png(mask) for mask in masks], [box] * 3, shape, size, mirrored)
    for mask, bits in zip(masks, found, strict=True):
        share = loop(mask, box, size)[:, :: -1 if mirrored else 1]
        sure = np.abs(share - 0.5) > 1e-4
        assert sure.mean() > 0.8
        np.testing.assert_array_equal(bits[sure], share[sure] >= 0.5)
    assert found[2].all()


def test_white_is_inside_as_well_as_one():
    mask = ellipse((30, 40), 5, 6, 20, 22)
    ones = unpacked([png(mask)], [(6, 5, 28, 25)], (30, 40), 8)
    white = encode_pixels(np.repeat(255 * mask[..., None].astype(np.uint8), 3, 2), "PNG")
    np.testing.assert_array_equal(unpacked([white], [(6, 5, 28, 25)], (30, 40), 8), ones)
    assert 0.5 < ones.mean() < 0.9


def test_no_object():
    empty = packed(tensorflow().constant([], "string"), np.zeros((0, 4), np.float32), (8, 9), 4)
    assert empty.shape == (0, 2)


def test_a_half_is_inside():
    """The centres lie between two pixels: 1 and 1, 1 and 0, 0 and 0, and at the border 0."""
    mask = np.array([[1, 1, 0, 0]] * 4, bool)
    found = unpacked([png(mask)], [(0, 0.5, 4, 4.5)], (4, 4), 4)
    np.testing.assert_array_equal(found[0], [[1, 1, 0, 0]] * 4)


def test_a_mask_of_another_size_is_refused():
    tf = tensorflow()
    with pytest.raises(tf.errors.InvalidArgumentError, match="has not the size of the image"):
        unpacked([png(np.ones((4, 5), bool))], [(0, 0, 4, 4)], (4, 4), 4)
