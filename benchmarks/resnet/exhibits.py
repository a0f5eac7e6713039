"""Shows what a classifier gets wrong, for the report: `base.Benchmark.exhibits`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.base import Bar, Exhibit, Matrix, Picture
from ops import classification, shards
from ops.classification import Predictions
from ops.images import thumbnails
from ops.images.labelled import Source

_MATRIX = 50  # classes; of more, the commonest mistakes are listed
_PAIRS = 30
_CLASSES = 50  # rows of the table
_BINS = 10
_MISTAKES = 24  # pictures
_SIDE = 192  # of a picture, in pixels


def make(predictions: Predictions, source: Source) -> list[Exhibit]:
    """Confusion, classes, calibration and the worst mistakes of the predictions on `source`."""
    named = any(source.class_names)
    names = source.class_names if named else [f"class {i}" for i in range(source.num_classes)]
    counts = classification.confusion(predictions.labels, predictions.guesses, len(names))
    return [
        _confusion(counts, names),
        _classes(counts, names),
        _calibration(predictions),
        _mistakes(predictions, source, names),
    ]


def _confusion(counts: np.ndarray, names: Sequence[str]) -> Exhibit:
    wrong = int(counts.sum() - np.trace(counts))
    files = {"confusion.csv": _csv(["true class \\ guess", *names], _labelled(names, counts))}
    if len(names) <= _MATRIX:
        return Exhibit(
            title="Confusion",
            text=f"Each row is a true class, each column what the model took it for. {wrong:,} of "
            f"{int(counts.sum()):,} images are off the diagonal.",
            matrix=Matrix(names, counts),
            files=files,
        )
    pairs = classification.confused_pairs(counts, _PAIRS)
    totals = counts.sum(axis=1)
    return Exhibit(
        title="Confusion",
        text=f"{wrong:,} of {int(counts.sum()):,} images were taken for another class. The "
        f"{len(pairs)} commonest mistakes; confusion.csv has all {len(names):,} classes.",
        columns=("true class", "taken for", "images", "of the class"),
        rows=[(names[a], names[b], f"{n:,}", _percent(n / totals[a])) for a, b, n in pairs],
        files=files,
    )


def _classes(counts: np.ndarray, names: Sequence[str]) -> Exhibit:
    """The table of classes, those with the lowest F1 first."""
    qualities = classification.per_class(counts)
    columns = ("class", "images", "precision", "recall", "F1")
    known = np.flatnonzero(qualities.examples > 0)
    order = known[np.lexsort((known, qualities.f1[known]))]
    values = np.stack([qualities.precision, qualities.recall, qualities.f1], axis=1)
    # A class that is never guessed has no precision; in the mean it counts as 0, as its F1 does.
    means = np.nan_to_num(values[known]).mean(axis=0)
    others = [_most_taken_for(counts, names, i) for i in order[:_CLASSES]]
    rows = [
        (names[i], f"{int(qualities.examples[i]):,}", *map(_percent, values[i]), other)
        for i, other in zip(order[:_CLASSES], others, strict=True)
    ]
    total = f"{int(qualities.examples.sum()):,}"
    rows.append(("mean over classes", total, *map(_percent, means), ""))
    shown = f"The worst {_CLASSES} of {len(known):,}" if len(known) > _CLASSES else "All classes"
    text = f"{shown}, the lowest F1 first; per_class.csv has the same figures for programs."
    if absent := len(names) - len(known):
        text += f" {absent:,} classes have no image to evaluate."
    table = [
        (names[i], int(qualities.examples[i]), *(f"{x:.6f}" for x in values[i])) for i in order
    ]
    return Exhibit(
        title="Classes",
        text=text,
        columns=(*columns, "most often taken for"),
        rows=rows,
        files={"per_class.csv": _csv(columns, table)},
    )


def _most_taken_for(counts: np.ndarray, names: Sequence[str], label: int) -> str:
    others = counts[label].copy()
    others[label] = 0
    most = int(others.argmax())
    return f"{names[most]} ({others[most]:,})" if others[most] else ""


def _calibration(predictions: Predictions) -> Exhibit:
    confidence = predictions.probabilities[:, 0].astype(np.float64)
    error, bins = classification.calibration(confidence, predictions.correct, _BINS)
    accuracy, mean = float(predictions.correct.mean()), float(confidence.mean())
    verdict = "less sure than it is right" if mean < accuracy else "surer than it is right"
    return Exhibit(
        title="Calibration",
        text=f"How often a guess with a given probability is right. The model is {verdict}: its "
        f"guesses have a mean probability of {_percent(mean)}, and {_percent(accuracy)} are right. "
        f"The expected calibration error is {_percent(error)} ({_BINS} bins of equal width). The "
        "mark is where a bar of a perfectly calibrated model ends.",
        bars=[
            Bar(f"{100 * b.low:.0f} to {100 * b.high:.0f} %", b.accuracy, b.confidence, b.count)
            for b in bins
        ],
    )


def _mistakes(predictions: Predictions, source: Source, names: Sequence[str]) -> Exhibit:
    rows, doubtful = (
        classification.worst_mistakes(predictions),
        classification.doubtful_labels(predictions, len(names)),
    )
    pictures = []
    records = shards.read_some(source.shards, predictions.ids[rows[:_MISTAKES]])
    for row, record in zip(rows, records, strict=False):
        encoded, name = source.image(record)
        truth = f"{names[predictions.labels[row]]}, {_percent(predictions.of_label[row])}"
        guess = f"{names[predictions.guesses[row]]}, {_percent(predictions.probabilities[row, 0])}"
        lines = [f"taken for {guess}", f"labelled {truth}", name]
        flag = "Is the label wrong?" if doubtful[row] else ""
        pictures.append(Picture(thumbnails.jpeg(encoded, _SIDE), lines, flag))
    text = "The model made no mistake."
    if len(rows):
        shown = f"the {_MISTAKES} of {len(rows):,}" if len(rows) > _MISTAKES else "all, those"
        text = (
            f"{len(rows):,} mistakes: {shown} with the most probable wrong guess first. For "
            f"{int(doubtful.sum()):,} of them the model is as sure of its guess as it usually is of "
            "a right one, so look whether the label is wrong. predictions.csv has every image."
        )
    return Exhibit(
        title="Worst mistakes",
        text=text,
        pictures=pictures,
        files={"predictions.csv": _table(predictions, source, names, doubtful)},
    )


def _table(
    predictions: Predictions, source: Source, names: Sequence[str], doubtful: np.ndarray
) -> bytes:
    """A line for each image: where it is, its label, its five best guesses."""
    places = range(1, predictions.top.shape[1] + 1)
    guesses = [f"{what}_{i}" for i in places for what in ("guess", "probability")]
    columns = [
        "file",
        "record",
        "label",
        "correct",
        "label_probability",
        *guesses,
        "doubtful_label",
    ]

    def rows() -> Iterable[list[Any]]:
        for i in np.argsort(predictions.ids, kind="stable"):
            path, record = source.shards.place(int(predictions.ids[i]))
            top = zip(predictions.top[i], predictions.probabilities[i], strict=True)
            best = [x for label, share in top for x in (names[label], f"{share:.6f}")]
            label, right = names[predictions.labels[i]], int(predictions.correct[i])
            share, doubt = f"{predictions.of_label[i]:.6f}", int(doubtful[i])
            yield [path.rpartition("/")[2], record, label, right, share, *best, doubt]

    return _csv(columns, rows())


def _labelled(names: Sequence[str], counts: np.ndarray) -> Iterable[list[Any]]:
    return ([name, *row] for name, row in zip(names, counts.tolist(), strict=True))


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """UTF-8 with a line of names, then a line for each row."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue().encode()


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"
