"""What detectors are used for: pixels, distances between lists of detections, their order."""

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.detection.mask_rcnn.use import outlined
from benchmarks.detection.use import DetectorUses, distance, scaled_photo
from benchmarks.uses import Detection
from common.images import pixels


@pytest.mark.parametrize(("size", "antialias"), [(300, False), (300, True), (77, True)])
def test_resizing_rounds_as_tensorflow_does(size, antialias):
    resize = jax.jit(lambda photo: scaled_photo(photo, (size, size), (size, size), antialias))
    draw = np.random.default_rng(0)
    for shape in ((480, 640), (375, 500), (500, 333), (31, 87), (300, 300), (1, 2), (900, 5)):
        image = draw.integers(0, 256, (*shape, 3), np.uint8)
        smooth = pixels.shrink if antialias else None
        wanted = smooth(image, size) if smooth else pixels.sample(image, [size] * 2, "bilinear")
        np.testing.assert_array_equal(resize(image), wanted)


def test_a_detection_too_many_is_off_too():
    """So that an export without suppression is noticed; a weak one may come and go."""
    boxes, classes, scores = np.zeros((3, 4)), np.array([1, 0, 0]), np.array([0.9, 0, 0])
    boxes[0, 2:] = 4
    one = {"boxes": boxes, "class": classes, "score": scores}
    for score, is_off in ((0.8, True), (0.0505, False)):
        two = one | {"class": np.array([1, 1, 0]), "score": np.array([0.9, score, 0])}
        for pair in ((one, two), (two, one)):
            assert (distance(*pair, min_score=0.05) > 0.5) == is_off
    assert not distance(one, one | {"score": scores * np.nan}, 0.05) <= 1


def test_the_distance_is_the_largest_of_scores_and_sides():
    """Of boxes, as a share of the largest side; the nearest of the same class is the match."""
    boxes = np.array([[0, 0, 10, 20], [5, 5, 15, 40], [1, 1, 3, 3]], float)
    lists = {"boxes": boxes, "class": np.array([1, 2, 2]), "score": np.array([0.9, 0.6, 0.3])}
    assert distance(lists, lists, 0.05) == 0
    order = [1, 0, 2]
    assert distance(lists, {name: x[order] for name, x in lists.items()}, 0.05) == 0
    for name, change, expected in (
        ("score", [0, 0.25, 0], 0.25),
        ("boxes", [[0] * 4, [0, 0, 0, 10], [0] * 4], 10 / 40),
        ("boxes", [[0] * 4, [0, 0, 0, -8], [0] * 4], 8 / 32),  # by the smaller of the largest sides
        ("class", [0, 1, 0], 1),
    ):
        other = lists | {name: lists[name] + np.array(change)}
        assert distance(lists, other, 0.05) == pytest.approx(expected)
        assert distance(other, lists, 0.05) == pytest.approx(expected)
    last = {name: x[:2] for name, x in lists.items()}
    assert distance(lists, lists | {"score": np.array([0.9, 0.6, 0])}, 0.305) == 0
    assert distance(last, last | {"score": np.array([0.9, 0])}, 0.05) == 0  # the end of a full list


def test_detections_are_sorted_and_have_a_score():
    row = {
        "score": np.array([0.25, 0, 0.75, np.nan, 0.25]),
        "class": np.array([4, 1, 2, 9, 3]),
        "boxes": np.arange(20.0).reshape(5, 4),
    }
    uses: Any = None
    found = DetectorUses.detections(uses, row, 50, 60)
    assert [(each.number, each.score) for each in found] == [(2, 0.75), (4, 0.25), (3, 0.25)]
    assert found[0].box == (8, 9, 10, 11)


def test_an_outline_covers_the_masks_cells_in_its_box():
    mask = np.zeros((4, 4), np.uint8)
    mask[:, 2:] = 255
    found: Any = outlined(Detection(1, 0.5, (2, 4, 10, 20)), mask, 12, 30)
    inside = found.inside()
    assert inside.shape == (12, 30) and found.outline["size"] == [12, 30]
    box = np.zeros((12, 30), bool)
    box[2:10, 12:20] = True
    assert inside[3:9, 13:19].all() and not (inside & ~box).any()  # the corners are round
