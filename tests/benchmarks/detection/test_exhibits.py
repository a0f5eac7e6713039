"""The exhibits of a detector, against pycocotools' own arrays and against scenes by hand."""

import contextlib
import csv
import dataclasses
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks.detection import scoring
from benchmarks.detection.coco import Annotations
from benchmarks.detection.exhibits import judge
from benchmarks.uses import Exhibit
from tests.benchmarks.detection.ssd.test_ssd import make, perfect_rows

LEAST = 0.5  # the score from which on a detection counts


@pytest.fixture(scope="module")
def benchmark(tiny_scenes):
    benchmark = make(tiny_scenes)
    benchmark.open("eval")
    return benchmark


@pytest.fixture(scope="module")
def rows(benchmark):
    """Predictions with mistakes: boxes are moved, classes are changed, and some repeat."""
    draw, changed = np.random.default_rng(3), []
    for row in perfect_rows(benchmark):
        boxes, scores, classes = (row[name].copy() for name in ("boxes", "score", "class"))
        exists = scores > 0
        boxes += draw.normal(0, 1.5, boxes.shape).astype(np.float32)
        scores[exists] = draw.random(exists.sum(), np.float32)
        wrong = exists & (draw.random(exists.shape) < 0.25)
        classes[wrong] = draw.integers(1, 5, wrong.sum())
        extra = ~exists & (draw.random(exists.shape) < 0.3)
        scores[extra] = draw.random(extra.sum(), np.float32)
        boxes[extra] = boxes[np.nonzero(extra)[0], 0] + draw.normal(0, 3, (extra.sum(), 4))
        changed.append(row | {"boxes": boxes, "score": scores, "class": classes})
    return changed


@pytest.fixture(scope="module")
def exhibits(benchmark, rows) -> dict[str, Exhibit]:
    shown = benchmark.uses.exhibits(iter(rows))
    assert len({one.title for one in shown}) == len(shown)
    return {one.title: one for one in shown}


def official(benchmark: Any, rows: Any, least: float = 0.0, category: int = 0) -> Any:
    """pycocotools' own evaluation of the detections from a score on, from the annotations' file.

    With the id of a `category`, it has only that one.
    """
    columns = benchmark.scorer.columns(iter(rows))
    keys = ("image_id", "category_id", "score")
    table = zip(*(columns[key].tolist() for key in keys), columns["bbox"].tolist(), strict=True)
    results: Any = [
        dict(zip((*keys, "bbox"), row, strict=True)) for row in table if row[2] >= least
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(benchmark.annotations.path)
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        if category:
            evaluation.params.catIds = [category]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def table(exhibit: Exhibit, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(exhibit.files[name].decode())))


def test_the_precision_of_each_class_is_pycocotools_s(benchmark, rows, exhibits):
    precision = official(benchmark, rows).eval["precision"][:, :, :, 0, -1]
    shown = {row["class"]: row for row in table(exhibits["Classes"], "per_class.csv")}
    for k, (_, name) in enumerate(benchmark.annotations.categories):
        assert float(shown[name]["AP"]) == pytest.approx(precision[:, :, k].mean(), abs=1e-6)
        assert float(shown[name]["AP50"]) == pytest.approx(precision[0, :, k].mean(), abs=1e-6)
    mean = np.mean([float(row["AP"]) for row in shown.values()])
    assert mean == pytest.approx(benchmark.score(iter(rows))["mAP"], abs=1e-6)
    assert 0.1 < mean < 0.9
    assert exhibits["Classes"].rows[-1][2] == f"{100 * mean:.1f}\u00a0%"
    order = [float(row["AP"]) for row in table(exhibits["Classes"], "per_class.csv")]
    assert order == sorted(order)


def test_the_objects_found_are_those_that_pycocotools_matches(benchmark, rows, exhibits):
    evaluation = official(benchmark, rows, LEAST)
    everywhere = tuple(evaluation.params.areaRng[0])
    matched: dict[int, int] = {}
    for one in evaluation.evalImgs:
        if one and tuple(one["aRng"]) == everywhere:
            counted = (one["dtMatches"][0] > 0) & ~one["dtIgnore"][0].astype(bool)
            matched[one["category_id"]] = matched.get(one["category_id"], 0) + int(counted.sum())
    shown = {row["class"]: row for row in table(exhibits["Classes"], "per_class.csv")}
    truth = benchmark.annotations
    for number, name in truth.categories:
        objects = int((~truth.crowd & (truth.category_ids == number)).sum())
        assert int(shown[name]["found"]) == matched[number] > 0
        assert int(shown[name]["missed"]) == objects - matched[number] > 0


def test_the_groups_are_the_categories_with_objects(benchmark, rows, monkeypatch):
    """Each against pycocotools' mAP of that category alone; categories may have equal names."""
    truth = benchmark.annotations
    groups, expected = benchmark.group_scores(iter(rows)), {}
    with open(truth.path) as file:
        objects = [each for each in json.load(file)["annotations"] if not each["iscrowd"]]
    for number, name in truth.categories:
        ap = official(benchmark, rows, category=number).stats[0]
        count = sum(each["category_id"] == number for each in objects)
        expected[name] = pytest.approx(ap), count
    assert groups == expected and len({ap for ap, _ in groups.values()}) == len(groups) == 4
    nothing = [row | {"score": np.zeros_like(row["score"])} for row in rows]
    none = {name: (0, count) for name, (_, count) in groups.items()}
    assert benchmark.group_scores(iter(nothing)) == none
    # A category of which there are only crowds is no group.
    first, second, *others = truth.categories
    crowd = truth.crowd | (truth.category_ids == others[0][0])
    named = (first, (second[0], first[1]), *others)
    changed = dataclasses.replace(truth, categories=named, crowd=crowd)
    monkeypatch.setattr(benchmark, "annotations", changed)
    monkeypatch.setattr(benchmark, "scorer", scoring.Scorer(changed))
    names = [f"{first[1]} ({first[0]})", f"{first[1]} ({second[0]})", others[1][1]]
    again = benchmark.group_scores(iter(rows))
    assert list(again) == names
    kept = [groups[name] for _, name in (first, second, others[1])]
    assert list(again.values()) == kept


def test_an_evaluation_is_scored_once(benchmark, rows, monkeypatch):
    """The report and the groups have the numbers of the score that the evaluation has computed."""
    scores = benchmark.score(iter(rows))
    monkeypatch.setattr("benchmarks.detection.scoring.quality", lambda *_: 1 / 0)
    monkeypatch.setattr("benchmarks.detection.exhibits.Artist.draw", lambda *_: b"")
    assert benchmark.uses.exhibits(iter(rows))
    groups = benchmark.group_scores(iter(rows))
    assert np.mean([ap for ap, _ in groups.values()]) == pytest.approx(scores["mAP"])


def test_the_worst_images_come_first(benchmark, rows, exhibits):
    worst, truth, costs = exhibits["Worst images"], benchmark.annotations, {}
    quality = benchmark.scorer.quality(benchmark.scorer.columns(iter(rows)))
    for mistake in judge(truth, quality)[0]:
        costs[mistake.image_id] = costs.get(mistake.image_id, 0.0) + mistake.cost
    expected = sorted(costs, key=lambda image_id: -costs[image_id])[:9]
    names = [truth.file_names[truth.image_ids.tolist().index(image_id)] for image_id in expected]
    assert [picture.caption[0].split(",")[0] for picture in worst.pictures] == names
    drawn = Image.open(io.BytesIO(worst.pictures[0].data))
    assert drawn.format == "JPEG" and worst.pictures[0].wide


# (objects, detections, (category, score, cost) of each mistake, found, missed, false of cat and
# dog); rows are (category, x, y, crowd or score) of boxes of 10 x 10
CASES: list[Any] = [
    ([(2, 0, 0, 0)], [(2, 1, 0, 0.75)], [], [1, 0, 0], [0, 0, 0]),
    ([(2, 0, 0, 0)], [], [(2, 0, 1)], [0, 1, 0], [0, 0, 0]),
    # A weak detection makes a miss cheaper; one of another class or elsewhere does not.
    ([(2, 0, 0, 0)], [(2, 1, 0, 0.25)], [(2, 0, 0.75)], [0, 1, 0], [0, 0, 0]),
    ([(2, 0, 0, 0)], [(5, 1, 0, 0.25), (2, 50, 0, 0.25)], [(2, 0, 1)], [0, 1, 0], [0, 0, 0]),
    ([(2, 0, 0, 0)], [(5, 1, 0, 0.75)], [(2, 0, 1), (5, 0.75, 0.75)], [0, 1, 0], [0, 0, 1]),
    # The object is found, although the wrong class has the higher score.
    ([(2, 0, 0, 0)], [(5, 0, 0, 0.75), (2, 1, 0, 0.5)], [(5, 0.75, 0.75)], [1, 0, 0], [0, 0, 1]),
    # It is found twice.
    ([(2, 0, 0, 0)], [(2, 2, 0, 0.5), (2, 0, 0, 0.75)], [(2, 0.5, 0.5)], [1, 0, 1], [0, 0, 0]),
    ([(2, 0, 0, 0)], [(2, 6, 0, 0.75)], [(2, 0, 1), (2, 0.75, 0.75)], [0, 1, 1], [0, 0, 0]),
    # A crowd is not missed, and takes many detections of its class.
    ([(2, 0, 0, 1)], [(2, 0, 0, 0.75), (2, 1, 1, 0.75)], [], [0, 0, 0], [0, 0, 0]),
    ([(2, 0, 0, 1)], [(5, 0, 0, 0.75)], [(5, 0.75, 0.75)], [0, 0, 0], [0, 0, 1]),
    ([(2, 0, 0, 0)], [(2, 0, 0, np.nan)], [(2, 0, 1)], [0, 1, 0], [0, 0, 0]),
]


@pytest.mark.parametrize(("objects", "detections", "expected", "cat", "dog"), CASES)
def test_mistakes(objects, detections, expected, cat, dog):
    boxes = np.array([[x, y, 10, 10] for _, x, y, _ in objects], np.float64).reshape(-1, 4)
    truth = Annotations(
        path="",
        digest="",
        categories=((2, "cat"), (5, "dog")),
        image_ids=np.array([7]),
        sizes=np.array([[99, 99]]),
        file_names=["a.jpg"],
        rows=np.zeros(len(objects), int),
        category_ids=np.array([category for category, *_ in objects], int),
        boxes=boxes,
        areas=np.full(len(objects), 100.0),
        crowd=np.array([bool(crowd) for *_, crowd in objects], bool),
        outlines=[],
    )
    columns = {
        "image_id": np.full(len(detections), 7),
        "category_id": np.array([category for category, *_ in detections], int),
        "score": np.array([score for *_, score in detections], np.float32),
        "bbox": np.array([[x, y, 10, 10] for _, x, y, _ in detections], float).reshape(-1, 4),
    }
    mistakes, counts = judge(truth, scoring.quality(truth, columns))
    assert [tuple(mistake) for mistake in mistakes] == [(7, *row) for row in expected]
    assert counts.tolist() == [cat, dog]
