"""Shows what a classifier gets wrong, for the report: `benchmarks.uses.Uses.exhibits`.

First the figures: confusion, classes, calibration, mistakes; then how they are shown.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.uses import Bar, Exhibit, Matrix, Picture
from common.data import shards
from common.images import pixels
from common.images.manifest import DataManifest
from common.text import csv_text, percent
from input_pipeline import Source

_MATRIX = 50  # classes; of more, the commonest mistakes are listed
_PAIRS = 30
_CLASSES = 50  # rows of the table
_BINS = 10
_MISTAKES = 24  # pictures
_LEFT_OUT = 30  # files
_SIDE = 192  # of a picture, in pixels


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The predictions of n examples.

    Attributes:
      ids: int[n], the number of each example in the data.
      labels: int[n], the true classes, from 0.
      top: int[n, k], the classes with the highest probabilities, the best first.
      probabilities: float[n, k], those of `top`.
      of_label: float[n], the probability of the true class.
    """

    ids: np.ndarray
    labels: np.ndarray
    top: np.ndarray
    probabilities: np.ndarray
    of_label: np.ndarray

    @property
    def guesses(self) -> np.ndarray:
        """int[n], the class that the model takes each example for."""
        return self.top[:, 0]

    @property
    def correct(self) -> np.ndarray:
        """bool[n], whether the guess is the label."""
        return self.guesses == self.labels


def confusion(labels: np.ndarray, guesses: np.ndarray, classes: int) -> np.ndarray:
    """int[classes, classes]: how many examples of each label (row) got each guess (column)."""
    cells = labels.astype(np.int64) * classes + guesses
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


@dataclasses.dataclass(frozen=True)
class PerClass:
    """float[K] each; nan where a quality is not defined, as the recall of a class without examples.

    A class that nothing was taken for has a precision of nan, but an F1 of 0 if it has examples.
    """

    examples: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


def per_class(counts: np.ndarray) -> PerClass:
    """Precision, recall and F1 of each class from a `confusion`."""
    right = np.diag(counts).astype(np.float64)
    actual, guessed = counts.sum(axis=1), counts.sum(axis=0)
    with np.errstate(invalid="ignore"):
        return PerClass(actual, right / guessed, right / actual, 2 * right / (actual + guessed))


def confused_pairs(counts: np.ndarray, most: int) -> list[tuple[int, int, int]]:
    """(label, guess, examples) of the commonest mistakes, the commonest first."""
    mistakes = counts - np.diag(np.diag(counts))
    order = np.argsort(-mistakes, axis=None, kind="stable")[:most]
    pairs = zip(*np.unravel_index(order, counts.shape), strict=True)
    return [(int(a), int(b), int(counts[a, b])) for a, b in pairs if a != b and counts[a, b]]


@dataclasses.dataclass(frozen=True)
class Bin:
    """The examples whose guess has a probability between two bounds."""

    low: float
    high: float
    count: int
    confidence: float  # the mean probability of their guesses
    accuracy: float


def calibration(confidence: np.ndarray, correct: np.ndarray, bins: int) -> tuple[float, list[Bin]]:
    """The expected calibration error and its bins that are not empty (Guo et al. 2017).

    The error is the mean over examples of |accuracy - mean confidence| of their bin; bins have
    equal width, and include their upper bound.
    """
    bounds = np.linspace(0, 1, bins + 1)
    bin_of = np.clip(np.searchsorted(bounds, confidence, side="left") - 1, 0, bins - 1)
    parts = []
    for i in np.unique(bin_of):
        mine = bin_of == i
        means = float(confidence[mine].mean()), float(correct[mine].mean())
        parts.append(Bin(float(bounds[i]), float(bounds[i + 1]), int(mine.sum()), *means))
    error = sum(b.count * abs(b.accuracy - b.confidence) for b in parts) / len(confidence)
    return error, parts


def worst_mistakes(predictions: Predictions) -> np.ndarray:
    """The rows of all mistakes, those with the most probable wrong guess first."""
    rows = np.flatnonzero(~predictions.correct)
    return rows[np.argsort(-predictions.probabilities[rows, 0], kind="stable")]


def doubtful_labels(predictions: Predictions, classes: int) -> np.ndarray:
    """bool[n]: whether the label itself is probably wrong, by confident learning.

    A mistake counts if its guess is at least as probable as that class is, on average, for the
    examples that have it as their label (Northcutt et al. 2021, arXiv:1911.00068, section 3.1).
    """
    sums = np.bincount(predictions.labels, predictions.of_label, classes)
    examples = np.bincount(predictions.labels, minlength=classes)
    usual = np.where(examples, sums / np.maximum(examples, 1), np.inf)
    return ~predictions.correct & (predictions.probabilities[:, 0] >= usual[predictions.guesses])


def thumbnail(encoded: bytes, side: int) -> bytes:
    """A JPEG of at most `side` pixels a side; smaller images keep their size.

    Args:
      encoded: a JPEG, PNG, BMP or GIF that evaluation has decoded before.
      side: of the square that the picture fits into.
    """
    from PIL import Image

    image = Image.fromarray(pixels.decode(encoded).numpy())
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return file.getvalue()


def make(predictions: Predictions, source: Source, content: DataManifest | None) -> list[Exhibit]:
    """Confusion, classes, calibration and the worst mistakes of the predictions on `source`.

    `content` is the data manifest, where the data have one.
    """
    named = any(source.class_names)
    numbers = [f"class {i}" for i in range(source.num_classes)]
    names = list(source.class_names) if named else numbers
    counts = confusion(predictions.labels, predictions.guesses, len(names))
    trained = dict(enumerate(content.train_counts, 1 - source.label_offset)) if content else {}
    exhibits = [
        _confusion_exhibit(counts, names),
        _class_exhibit(counts, names, trained),
        _calibration_exhibit(predictions),
        _mistake_exhibit(predictions, source, names),
    ]
    left_out = content.left_out if content else ()
    return [*exhibits, _left_out_exhibit(left_out)] if left_out else exhibits


def _confusion_exhibit(counts: np.ndarray, names: Sequence[str]) -> Exhibit:
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
    pairs = confused_pairs(counts, _PAIRS)
    totals = counts.sum(axis=1)
    return Exhibit(
        title="Confusion",
        text=f"{wrong:,} of {int(counts.sum()):,} images were taken for another class. The "
        f"{len(pairs)} commonest mistakes; confusion.csv has all {len(names):,} classes.",
        columns=("true class", "taken for", "images", "of the class"),
        rows=[(names[a], names[b], f"{n:,}", percent(n / totals[a])) for a, b, n in pairs],
        files=files,
    )


def _class_exhibit(counts: np.ndarray, names: Sequence[str], trained: Mapping[int, int]) -> Exhibit:
    """The table of classes, those with the lowest F1 first; `trained` has their training images."""
    qualities = per_class(counts)
    known = np.flatnonzero(qualities.examples > 0)
    order = known[np.lexsort((known, qualities.f1[known]))].tolist()
    values = np.stack([qualities.precision, qualities.recall, qualities.f1], axis=1)
    sizes = qualities.examples.tolist()
    # A class that is never guessed has no precision; in the mean it counts as 0, as its F1 does.
    means = np.nan_to_num(values[known]).mean(axis=0)
    columns = ["class", "images", "precision", "recall", "F1"]
    rows = [
        [names[i], f"{sizes[i]:,}", *map(percent, values[i]), _most_taken_for(counts, names, i)]
        for i in order[:_CLASSES]
    ]
    rows.append(["mean over classes", f"{sum(sizes):,}", *map(percent, means), ""])
    table: list[list[Any]] = [
        [names[i], sizes[i], *(f"{x:.6f}" for x in values[i]), trained.get(i, "")] for i in order
    ]
    shown = f"The worst {_CLASSES} of {len(known):,}" if len(known) > _CLASSES else "All classes"
    text = f"{shown}, the lowest F1 first; per_class.csv has the same figures for programs."
    if absent := len(names) - len(known):
        text += f" {absent:,} classes have no image to evaluate."
    shown_columns = [*columns, "most often taken for"]
    if trained:
        shown_columns.append("training images")
        for row, i in zip(rows, order[:_CLASSES], strict=False):
            row.append(f"{trained.get(i, 0):,}")
        rows[-1].append(f"{sum(trained.values()):,}")
    return Exhibit(
        title="Classes",
        text=text,
        columns=shown_columns,
        rows=rows,
        has_mean=True,
        files={"per_class.csv": _csv([*columns, "training_images"], table)},
    )


def _most_taken_for(counts: np.ndarray, names: Sequence[str], label: int) -> str:
    others = counts[label].copy()
    others[label] = 0
    most = int(others.argmax())
    return f"{names[most]} ({others[most]:,})" if others[most] else ""


def _calibration_exhibit(predictions: Predictions) -> Exhibit:
    confidence = predictions.probabilities[:, 0].astype(np.float64)
    error, bins = calibration(confidence, predictions.correct, _BINS)
    accuracy, mean = float(predictions.correct.mean()), float(confidence.mean())
    verdict = "less sure than it could be" if mean < accuracy else "surer than it should be"
    return Exhibit(
        title="Calibration",
        text=f"How often a guess with a given probability is right. The model is {verdict}: "
        f"its guesses have a mean probability of {percent(mean)}, and {percent(accuracy)} are "
        f"right. The expected calibration error is {percent(error)} ({_BINS} bins of equal "
        "width). The mark is where a bar of a perfectly calibrated model ends.",
        bars=[Bar(_range(b), b.accuracy, b.confidence, b.count) for b in bins],
    )


def _range(one: Bin) -> str:
    return f"{100 * one.low:.0f} to {100 * one.high:.0f}\u00a0%"


def _mistake_exhibit(predictions: Predictions, source: Source, names: Sequence[str]) -> Exhibit:
    worst = worst_mistakes(predictions)
    doubtful = doubtful_labels(predictions, len(names))
    pictures = []
    shown = worst[:_MISTAKES].tolist()
    for i, record in zip(
        shown, shards.read_some(source.shards, predictions.ids[shown]), strict=True
    ):
        encoded, name = source.image(record)
        guess, label = int(predictions.guesses[i]), int(predictions.labels[i])
        lines = [
            f"{names[guess]}, {percent(float(predictions.probabilities[i, 0]))}",
            f"labelled {names[label]}, {percent(float(predictions.of_label[i]))}",
            name,
        ]
        flag = "Is the label wrong?" if doubtful[i] else ""
        pictures.append(Picture(thumbnail(encoded, _SIDE), lines, flag))
    count, doubts = f"{len(worst):,} mistake{'s' if len(worst) != 1 else ''}", int(doubtful.sum())
    text = "The model made no mistake." if not len(worst) else f"{count} in all. "
    if len(worst) > 1:
        first = f"These are the {_MISTAKES}" if len(worst) > _MISTAKES else "First come those"
        text += f"{first} with the most probable wrong guess. "
    if len(worst):
        text += "Below each picture: the guess, then the label, with their probabilities. "
    if doubts:
        text += f"In {doubts:,} of them the model is as sure as it usually is of a right guess of "
        text += "that class, so that the label may be wrong. "
    return Exhibit(
        title="Worst mistakes",
        text=text + "predictions.csv has every image.",
        pictures=pictures,
        files={"predictions.csv": _table(predictions, source, names, doubtful)},
    )


def _left_out_exhibit(files: Sequence[tuple[str, str]]) -> Exhibit:
    return Exhibit(
        title="Files left out of the data",
        text=f"{len(files):,} files could not become records when the data were prepared"
        + (f"; the first {_LEFT_OUT}:" if len(files) > _LEFT_OUT else ":"),
        columns=("file", "reason"),
        rows=files[:_LEFT_OUT],
    )


def _table(
    predictions: Predictions, source: Source, names: Sequence[str], doubtful: np.ndarray
) -> bytes:
    """A line for each image: where it is, its label, its five best guesses."""
    ranks = range(1, predictions.top.shape[1] + 1)
    guesses = [f"{what}_{i}" for i in ranks for what in ("guess", "probability")]
    columns = ["file", "record", "label", "correct", "label_probability", *guesses]

    def rows() -> Iterable[list[Any]]:
        for i in np.argsort(predictions.ids, kind="stable").tolist():
            path, record = source.shards.place(int(predictions.ids[i]))
            top = zip(predictions.top[i].tolist(), predictions.probabilities[i], strict=True)
            best = [x for label, share in top for x in (names[label], f"{share:.6f}")]
            label, right = names[int(predictions.labels[i])], int(predictions.correct[i])
            share, doubt = f"{predictions.of_label[i]:.6f}", int(doubtful[i])
            yield [path.rpartition("/")[2], record, label, right, share, *best, doubt]

    return _csv([*columns, "doubtful_label"], rows())


def _labelled(names: Sequence[str], counts: np.ndarray) -> Iterable[list[Any]]:
    return ([name, *row] for name, row in zip(names, counts.tolist(), strict=True))


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """UTF-8 with a line of names, then a line for each row."""
    return csv_text([columns, *rows]).encode()
