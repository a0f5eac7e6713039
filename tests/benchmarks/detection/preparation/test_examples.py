"""Plans of records: boxes as shares, which images count, what looks like no boxes of COCO's."""

from typing import Any

import numpy as np
import pytest

from benchmarks.detection.coco import Annotations
from benchmarks.detection.preparation import examples
from common.preparation.sources import File, Source, SourceError

SIZES = np.array([[100, 200], [50, 80], [60, 60], [40, 30]])  # height, width


def annotations(boxes, rows=None, names=("a.jpg", "b.jpg", "c.jpg", "d.jpg"), **others) -> Any:
    boxes = np.array(boxes, float).reshape(-1, 4)
    count = len(boxes)
    values: dict[str, Any] = {
        **{"path": "all.json", "digest": "", "categories": ((1, "cat"),), "outlines": []},
        **{"image_ids": np.array([7, 5, 9, 3]), "sizes": SIZES, "file_names": [*names]},
        **{"rows": np.zeros(count, int) if rows is None else np.array(rows), "boxes": boxes},
        **{"category_ids": np.ones(count, int), "areas": boxes[:, 2] * boxes[:, 3]},
        "crowd": np.zeros(count, bool),
    }
    return Annotations(**{**values, **others})


def source(*names):
    return Source("photos", [File(name, 1000) for name in names])


PHOTOS = source("a.jpg", "b.jpg", "c.jpg", "d.jpg")


@pytest.mark.parametrize(
    ("name", "keep_empty", "images"),
    [("train", False, [0, 1]), ("train", True, [0, 1, 3]), ("val", False, [0, 1, 2, 3])],
)
def test_which_images_have_a_record(name, keep_empty, images):
    """Image 2 has a box without an area, and image 3 none."""
    boxes = [[8, 5, 32, 15], [20, 10, 100, 25], [10, 10, 0, 5], [-2, 0, 42, 51.5], [80, 9, 3, 3]]
    data = annotations(boxes, [1, 0, 2, 1, 1])
    split = examples.plan_split(name, data, PHOTOS, 0, (1, 0), keep_empty)
    assert sorted(split.order.tolist()) == images and split.shards == 1
    assert split.objects.tolist() == [1, 0, 3] and split.starts.tolist() == [0, 1, 3, 3, 3]
    shares = [[0.1, 0.1, 0.35, 0.6], [0.1, 0.1, 0.4, 0.5], [0, 0, 1, 0.5]]
    np.testing.assert_allclose(split.shares[split.objects], shares, rtol=1e-6)
    assert (split.cut, split.with_boxes) == (1, 2)
    with pytest.raises(SourceError, match="no box with an area"):
        examples.plan_split(name, annotations([[10, 10, 0, 5]]), PHOTOS, 0, (1, 0), True)


def test_a_pixel_beyond_the_image_is_rounding():
    for far, cut in ((1, 0), (1.5, 1)):
        for box in ([-far, 0, 9, 9], [0, -far, 9, 9], [191, 0, 9 + far, 9], [0, 91, 9, 9 + far]):
            split = examples.plan_split("val", annotations([box]), PHOTOS, 0, (1, 0), True)
            assert split.cut == cut, box


CORNERS = [[10, 20, 150, 90], [60, 30, 120, 99], [100, 10, 190, 80]]  # in 100 x 200 pixels
BOXES = [[10, 20, 5, 9], [60, 30, 20, 40], [100, 10, 50, 5]]


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        (CORNERS, r"corners \[x0, y0, x1, y1\]: 100% of them"),
        (CORNERS[:2], ""),
        (BOXES, ""),
        (CORNERS + BOXES * 2, r"corners .*: 33%"),
        (CORNERS + BOXES * 3, ""),  # corners are less than a third
        ([[0.1, 0.2, 0.3, 1]] * 3, "shares of the image"),
        ([[0.1, 0.2, 0.3, 1.1]] * 3, ""),
        ([[0.1, 0.2, 0.3, 1]] * 2, ""),
    ],
)
def test_what_looks_like_no_boxes_of_cocos(boxes, words):
    data = annotations(boxes)
    examples.check_boxes(data, trusted=True)
    if not words:
        return examples.check_boxes(data)
    with pytest.raises(SourceError, match=f"^all.json: the boxes look like {words}"):
        examples.check_boxes(data)


def test_files_are_found_by_the_ends_of_their_paths():
    names = ("x/a.jpg", "B.jpg", r"C:\photos\c.jpg", "./d.jpg")
    files = source("a.jpg", "b.jpg", "deep/c.jpg", "d.jpg", "e/d.jpg")
    assert examples.locate(annotations([], names=names), files).tolist() == [0, 1, 2, 3]
    for others, words in (
        (("a.jpg", "b.jpg", "c.jpg", "z.jpg"), r"^1 of the 4 .* \(z.jpg\): get the missing"),
        (("a.jpg", "b.jpg", "y.jpg", "z.jpg"), r"^2 of the 4 .* \(y.jpg, z.jpg\): get the missing"),
        (
            ("w", "x", "y", "z"),
            r"^4 of the 4 .*\(w, x, y, ...\): it seems to be the .* another set",
        ),
        (("a.jpg", "b.jpg", "c.jpg", "deep/c.jpg"), "images 9 and 3 are both deep/c.jpg"),
    ):
        with pytest.raises(SourceError, match=words):
            examples.locate(annotations([], names=others), files)
    with pytest.raises(SourceError, match=r"image 3 \(f.jpg\) may be 1/f.jpg and 2/f.jpg"):
        twice = ("a.jpg", "b.jpg", "c.jpg", "f.jpg")
        examples.locate(
            annotations([], names=twice), source("a.jpg", "b.jpg", "c.jpg", "1/f.jpg", "2/f.jpg")
        )
