"""Labels that cannot be meant, and objects that no anchor fits: against counts by hand."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.detection import boxes, coco, mask_rcnn, records, ssd, survey
from tests.benchmarks.detection.rows import encode, example, write

LAYOUTS = {
    "ssd": ssd.models.SSD300,
    "clipped": dataclasses.replace(ssd.models.SSD300, scales=(21, 45, 99, 153, 207, 400, 500)),
    "mask_rcnn": mask_rcnn.models.Layout((3, 4, 5), 5.0, (0.5, 1.0, 1.6)),
    "corners": mask_rcnn.models.Layout((3, 4), 5.3, (0.5, 1.0), "corners"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_best_overlap_is_that_of_all_anchors(name):
    layout, draw = LAYOUTS[name], np.random.default_rng(3)
    if isinstance(layout, ssd.models.Layout):
        corners = 300 * ssd.models.box_corners(ssd.models.default_boxes(layout))
        grids, side = layout.grids, 300
    else:
        corners, grids, side = np.concatenate(layout.corners(160, 160)), layout.grids(160), 160
    low = draw.uniform(0, 0.7, (200, 2)) * side
    objects = np.concatenate([low, (low + draw.exponential(0.3, (200, 2)) * side).clip(0, side)], 1)
    objects = objects[(objects[:, 2:] - objects[:, :2]).min(axis=1) > 1]
    expected = np.asarray(boxes.iou(objects, corners.astype(np.float32))).max(axis=1)
    found = survey.best_overlap(objects, grids)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (found < survey.FIT).any() and (found > 0.7).any()


def annotations(*rows):
    """Two images, three categories, and objects (image, category, box, iscrowd)."""
    images = [{"id": i, "file_name": f"{i}.jpg", "height": 90, "width": 90} for i in (7, 8)]
    names = [{"id": i, "name": f"name {i}"} for i in (3, 5, 9)]
    keys = "image_id", "category_id", "bbox", "iscrowd"
    objects = [dict(zip(keys, row, strict=True)) for row in rows]
    content = {"images": images, "categories": names, "annotations": objects}
    return coco.Annotations.parse(json.dumps(content).encode(), "a.json")


A, B = [1, 2, 30, 40], [1, 2, 30, 41]


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        ([], []),
        ([(7, 3, A, 0), (7, 3, B, 0), (7, 5, A, 0), (8, 3, A, 0), (8, 5, A, 1)], []),
        ([(7, 3, A, 1), (8, 5, A, 1)], ["all 2 objects are crowds (iscrowd 1)"]),
        (
            [(7, 3, A, 0), (7, 9, A, 1), (8, 9, B, 1), (8, 5, A, 1)],
            ["all 3 objects of 2 categories, such as 5, are crowds (iscrowd 1)"],
        ),
        (
            [(7, 5, A, 0), (8, 3, A, 0), (8, 3, A, 0), (8, 3, A, 0), (7, 5, B, 0), (7, 5, B, 0)],
            ["3 of 6 boxes are copies of others, with the same image, category and bbox"],
        ),
        ([(7, 3, A, 1), (7, 3, A, 1)], ["all 2 objects are crowds"]),  # copies spoil no score
        ([(7, 3, A, 1), (7, 3, A, 0)], []),
        ([(7, 3, A, 1), (7, 3, A, 0), (7, 3, A, 0)], ["1 of 3 boxes are copies"]),
    ],
)
def test_labels_that_cannot_be_meant(rows, texts):
    findings = survey.oddities(annotations(*rows))
    assert [status for status, *_ in findings] == ["warn"] * len(texts)
    for (_, text, fix), start in zip(findings, texts, strict=True):
        assert text.startswith(start) and fix
        assert "copies" not in text or f"first in {8 if len(rows) > 3 else 7}.jpg" in text


def test_records_have_the_same_columns(tmp_path):
    """The second record has no key for crowds, the third an object without an area."""
    box, other, flat = (0.1, 0.2, 0.5, 0.6), (0, 0, 1.2, 1), (0.3, 0.3, 0.3, 0.9)
    first = [example(encode(), (12, 15), [box, box, other], [4, 4, 9], crowds=[0, 0, 1])]
    second = [
        example(encode(), (20, 10), [box], [9]),
        example(encode(), (12, 15), [flat, box], [4, 4], crowds=[0, 1]),
    ]
    write(tmp_path / "a", first)
    write(tmp_path / "b", second)
    objects = records.read_objects([f"{tmp_path}/a", f"{tmp_path}/b"])
    assert objects.rows.tolist() == [0, 0, 0, 1, 2]
    assert objects.category_ids.tolist() == [4, 4, 9, 9, 4]
    assert objects.crowd.tolist() == [False, False, True, False, True]
    np.testing.assert_allclose(objects.boxes[2:4], [(0, 0, 1, 1), box], rtol=1e-6)
    assert objects.sizes.tolist() == [[12, 15], [20, 10], [12, 15]]
    assert objects.file_names[2] == f"{tmp_path}/b, record 1 (counted from 0)"
    ((_, text, _),) = survey.oddities(objects)
    assert text.startswith("1 of 5 boxes are copies") and f"first in {tmp_path}/a, rec" in text


@pytest.mark.parametrize(
    ("sizes", "masks", "words"),
    [
        ([(20, 20)] * 40, False, []),
        ([(20, 20)] * 36 + [(20, 6)] * 4, False, ["4 of 40 objects", "SSD's 300x300"]),
        ([(20, 20)] * 36 + [(20, 6)] * 4, True, []),
        ([(1, 1)] * 40, True, ["40 of 40 objects", "Mask R-CNN's"]),
        ([(20, 20)] * 19, False, ["1 category has fewer than 20 objects: name 3 (19)"]),
    ],
)
def test_tiny_objects_and_rare_categories(sizes, masks, words):
    """An image of 900x300 becomes 300x300, or with masks 1333x444: one of 20x6 is 6.7x6 or 30x9."""
    images = [{"id": 7, "file_name": "7.jpg", "height": 900, "width": 300}]
    objects = [{"image_id": 7, "category_id": 3, "bbox": [1, 1, w, h]} for h, w in sizes]
    content = {"images": images, "categories": [{"id": 3, "name": "name 3"}]}
    content["annotations"] = objects
    parsed = coco.Annotations.parse(json.dumps(content).encode(), "a.json")
    findings = survey.weaknesses(parsed, masks)
    assert all(word in findings[0][1] for word in words) and len(findings) == bool(words)
