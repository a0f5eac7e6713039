"""Data manifests of images, and images that a data set has several times."""

import json
import re
from typing import Any

import numpy as np
import pytest

from common.errors import DataError
from common.images import manifest

CONTENT = {
    "num_label_classes": 2,
    "classes": [  # in any order
        {"label": 2, "name": "bee", "id": 9, "train": 4},
        {"label": 1, "name": "ant", "id": 7, "train": 3},
    ],
    "splits": {
        "train": {
            "shards": [{"name": "a", "examples": 5, "bytes": 2}],
            "boxes": {"per_image": [1, 0, 2]},
        },
        "val": {"shards": [{"name": "b", "examples": 2, "bytes": 3}], "image_ids": [12, 11]},
    },
    "left_out": [{"file": "x.jpg", "reason": "is empty"}],
}


def test_everything_that_it_says(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(CONTENT))
    loaded: Any = manifest.load(str(tmp_path))
    assert loaded == manifest.DataManifest(
        ("ant", "bee"), {"a": 5, "b": 2}, (7, 9), {"train": (1, 0, 2), "val": ()}, (12, 11)
    )
    assert loaded.counts(str(tmp_path), [f"{tmp_path}/b", f"{tmp_path}/a"]) == (2, 5)
    assert loaded.counts(str(tmp_path), [f"{tmp_path}/b", f"{tmp_path}/c"]) is None


def test_a_folder_without_one(tmp_path):
    assert manifest.load(str(tmp_path)) is None


@pytest.mark.parametrize(("labels", "count"), [([1, 2], 3), ([0, 1], 2), ([1, 3], 2), ([1, 1], 2)])
def test_labels_count_from_one_to_their_number(labels, count):
    classes = [{"label": label, "name": "x"} for label in labels]
    data = json.dumps({"num_label_classes": count, "classes": classes, "splits": {}}).encode()
    with pytest.raises(DataError, match=re.escape("path was not written by")) as caught:
        manifest.parse(data, "path")
    assert "(ValueError('its labels do not count from 1'))" in str(caught.value)


def repeated(rows):
    digests, labels, splits = map(np.array, zip(*rows, strict=True))
    return manifest.repeated_images(digests, labels, splits, lambda i: f"file {i}")


def test_a_photo_under_two_labels_is_told_first():
    rows = [
        *[("a", 1, "train"), ("b", 1, "train"), ("a", 1, "train"), ("c", 2, "train")],
        *[("c", 2, "validation"), ("d", 1, "train"), ("d", 2, "validation"), ("e", 1, "train")],
    ]
    two, both, several = repeated(rows)
    assert "two labels" in two and "file 5 = file 6" in two
    assert "both splits" in both and "file 3 = file 4" in both
    assert "in one split" in several and "file 0 = file 2" in several
    assert repeated(rows[3:4]) == []


def test_few_of_many_are_named():
    (line,) = repeated([(i % 9, 1, 0) for i in range(90)])
    assert line.startswith("9 images are") and line.endswith("; and 6 more")
    assert line.count(" = ") == 9
