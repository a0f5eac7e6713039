"""Images that a data set has several times."""

import numpy as np

from common.preparation.duplicates import repeated_images


def repeated(rows):
    digests, labels, splits = map(np.array, zip(*rows, strict=True))
    return repeated_images(digests, labels, splits, lambda i: f"file {i}")


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
