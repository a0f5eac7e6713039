"""Labels that must be mistakes, and weak training data: against counts by hand."""

import json

import pytest

from benchmarks.detection import coco


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
        ([(7, 3, A, 0), (7, 3, B, 0), (7, 5, A, 0), (8, 3, A, 0), (8, 5, A, 1)], []),
        (
            [(7, 3, A, 1), (8, 5, A, 1)],
            ["all 2 objects of 2 categories, such as 3, are crowds (iscrowd 1)"],
        ),
        (
            [(7, 3, A, 0), (7, 9, A, 1), (8, 9, B, 1), (8, 5, A, 1)],
            ["all 3 objects of 2 categories, such as 5, are crowds (iscrowd 1)"],
        ),
        (
            [(7, 5, A, 0), (8, 3, A, 0), (8, 3, A, 0), (8, 3, A, 0), (7, 5, B, 0), (7, 5, B, 0)],
            ["3 of 6 boxes are copies of others, with the same image, category and bbox"],
        ),
        ([(7, 3, A, 1), (7, 3, A, 1)], ["all 2 objects of 1 category"]),  # copies spoil no score
    ],
)
def test_labels_that_cannot_be_meant(rows, texts):
    findings = coco.oddities(annotations(*rows))
    assert [status for status, *_ in findings] == ["warn"] * len(texts)
    for (_, text, fix), start in zip(findings, texts, strict=True):
        assert text.startswith(start) and fix
        assert "copies" not in text or f"first in {8 if len(rows) > 3 else 7}.jpg" in text


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
    findings = coco.weaknesses(parsed, masks)
    assert all(word in findings[0][1] for word in words) and len(findings) == bool(words)
