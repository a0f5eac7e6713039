"""Plans of records of images with one label, several or none."""

import pytest

from benchmarks.resnet.preparation import examples
from common.preparation.sources import File, Source, SourceError
from common.tensorflow import tensorflow


def test_an_image_counts_for_its_rarest_label():
    """Of equally rare ones for the first; an image without a label has a number of its own."""
    rarest = examples._rarest({0: (1, 2), 1: (2,), 2: (3, 1), 3: (1,), 4: (), 5: (2, 1)}, 3)
    assert [rarest(i) for i in range(6)] == [2, 2, 3, 1, 4, 2]


def test_labels_are_those_of_folders_or_lines():
    source = Source("photos", [File(name, 1) for name in ("b/1.jpg", "a/2.jpg", "3.jpg")])
    rows, labels = examples._labelled(source, {"a": 1, "b": 2})
    assert rows.tolist() == [0, 1] and labels == {0: (2,), 1: (1,)}
    flat = Source("photos", [File(name, 1) for name in ("1.jpg", "2.jpg", "3.jpg")])
    rows, labels = examples._labelled(flat, {"a": 1, "b": 2}, ["b", "b", "a"])
    assert rows.tolist() == [0, 1, 2] and labels == {0: (2,), 1: (2,), 2: (1,)}
    for lines, words in (
        (["b", "b"], "^--validation_labels has 2 lines for the 3 images"),
        (["b", "c", "a"], "^line 2 of --validation_labels: no class 'c'"),
        ([], "has no class folders"),
    ):
        with pytest.raises(SourceError, match=words):
            examples._labelled(flat, {"a": 1, "b": 2}, lines)
    with pytest.raises(SourceError, match="has class folders: leave out"):
        examples._labelled(source, {"a": 1}, ["a"] * 3)


def test_imagenets_schema():
    data = examples.tf_example(b"JPG", [3, 1], ["n3", "n1"], "x.JPEG", (7, 9), "", "film")
    found = tensorflow().train.Example.FromString(data).features.feature
    assert [*found["image/class/label"].int64_list.value] == [3, 1]
    assert [*found["image/class/synset"].bytes_list.value] == [b"n3", b"n1"]
    sides = [found[f"image/{x}"].int64_list.value[0] for x in ("height", "width", "channels")]
    assert sides == [7, 9, 3] and "image/class/text" not in found
    one = examples.tf_example(b"JPG", 5, "n5", "x.JPEG", (7, 9), "cat")
    found = tensorflow().train.Example.FromString(one).features.feature
    assert [*found["image/class/text"].bytes_list.value] == [b"cat"]
    assert [*found["image/class/label"].int64_list.value] == [5]
