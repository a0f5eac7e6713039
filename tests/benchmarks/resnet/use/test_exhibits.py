"""What a classifier's report shows: tables and captions by hand, from unequal numbers of images."""

import types
from typing import Any

import numpy as np
import pytest

from benchmarks.resnet.use import exhibits
from benchmarks.resnet.use.exhibits import Photos, Predictions

NAMES = ["ant", "bee", "cow", "dog", "eel"]
# Label, guess, its probability, that of the label: eel has no image and is guessed, dog never is.
ROWS = [
    *[(0, 0, 0.9, 0.9), (0, 0, 0.8, 0.8), (0, 0, 0.6, 0.6), (0, 1, 0.7, 0.2), (0, 2, 0.55, 0.3)],
    *[(1, 1, 0.95, 0.95), (1, 0, 0.99, 0.01), (1, 0, 0.5, 0.25), (2, 2, 0.4, 0.4)],
    *[(3, 4, 0.65, 0.125), (3, 2, 0.85, 0.05), (3, 2, 0.45, 0.35)],
]
IDS = [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


@pytest.fixture
def shown(monkeypatch):
    """The three exhibits; a picture's caption has its number in the data and its class first."""

    def pictures(self, ids, classes, captions):
        parts = zip(ids.tolist(), classes.tolist(), captions, strict=True)
        return [exhibits.Picture(b"", [i, c, *lines]) for i, c, lines in parts]

    monkeypatch.setattr(Photos, "pictures", pictures)
    monkeypatch.setattr(exhibits, "_MISTAKES", 5)
    monkeypatch.setattr(exhibits, "_HITS", 3)
    shards = types.SimpleNamespace(place=lambda i: (f"gs://b/part-{i // 6}", i % 6))
    source: Any = types.SimpleNamespace(shards=shards, class_names=NAMES, num_classes=5)
    spec: Any = None
    labels, guesses, best, own = map(np.array, zip(*ROWS, strict=True))
    top = np.stack([guesses, (guesses + 1) % 5], 1)
    shares = np.stack([best, best / 4], 1)
    return exhibits.make(Predictions(np.array(IDS), labels, top, shares, own), Photos(source, spec))


def test_the_table_of_classes(shown):
    classes, text = shown[0], shown[0].text
    space = "\u00a0"
    assert [[cell.replace(space, "") for cell in row] for row in classes.rows] == [
        ["dog", "3", "–", "0.0%", "0.0%", "cow (2)"],
        ["bee", "3", "50.0%", "33.3%", "40.0%", "ant (2)"],  # 1 of 2, 1 of 3, 2 of 5
        ["cow", "1", "25.0%", "100.0%", "40.0%", ""],  # 1 of 4, 1 of 1, 2 of 5
        ["ant", "5", "60.0%", "60.0%", "60.0%", "bee (1)"],  # 3 of 5
        ["mean over classes", "12", "33.8%", "48.3%", "28.0%", ""],  # eel's F1 of 0 is in the last
    ]
    assert text.startswith("All classes") and " 1 classes have no image" in text
    assert text.endswith(" 1 of these are guessed, and count as 0 in the mean F1.")
    table = classes.files["per_class.csv"].decode().splitlines()
    assert table[:3] == [
        "class,images,precision,recall,F1",
        "dog,3,nan,0.000000,0.000000",
        "bee,3,0.500000,0.333333,0.400000",
    ]
    assert classes.files["confusion.csv"].decode().splitlines() == [
        "true class \\ guess,ant,bee,cow,dog,eel",
        *("ant,3,1,1,0,0", "bee,2,1,0,0,0", "cow,0,0,1,0,0", "dog,0,0,2,0,1", "eel,0,0,0,0,0"),
    ]


def test_the_most_probable_mistakes_and_hits(shown):
    _, mistakes, hits = shown
    captions = [[str(x).replace("\u00a0", "") for x in p.caption] for p in mistakes.pictures]
    assert captions == [
        ["5", "0", "ant, 99.0%", "labelled bee, 1.0%"],
        ["1", "2", "cow, 85.0%", "labelled dog, 5.0%"],
        ["8", "1", "bee, 70.0%", "labelled ant, 20.0%"],
        ["2", "4", "eel, 65.0%", "labelled dog, 12.5%"],
        ["7", "2", "cow, 55.0%", "labelled ant, 30.0%"],
    ]
    assert mistakes.text.startswith("The 5 most probable of 7 wrong guesses.")
    assert [picture.caption[0] for picture in hits.pictures] == [6, 11, 10]
    assert hits.text.startswith("The 3 most probable of 5 right guesses.")
    head, first, *_, last = mistakes.files["predictions.csv"].decode().splitlines()
    assert head == (
        "file,record,label,correct,label_probability,guess_1,probability_1,guess_2,probability_2"
    )
    assert first == "part-0,0,dog,0,0.350000,cow,0.450000,dog,0.112500"
    assert last == "part-1,5,ant,1,0.900000,ant,0.900000,bee,0.225000"


@pytest.mark.parametrize("classes", [50, 51])
def test_only_the_worst_classes_are_on_the_page(classes):
    labels = np.arange(classes)
    ones = np.ones((classes, 1))
    names = [f"c{i}" for i in range(classes)]
    found = exhibits._classes(Predictions(labels, labels, labels[:, None], ones, ones[:, 0]), names)
    assert len(found.rows) == 51 and found.rows[-1][0] == "mean over classes"
    assert found.text.startswith("All classes" if classes == 50 else "The worst 50 of 51")
    assert "no image" not in found.text and "guessed" not in found.text
