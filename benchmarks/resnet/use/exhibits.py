"""Shows what a classifier gets wrong, for the report: `benchmarks.uses.Uses.exhibits`."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.exhibits import CLASSES, MATRIX, confused_classes, csv_file, thumbnail
from benchmarks.uses import Bar, Exhibit, Matrix, Picture
from common.data import shards
from common.images.manifest import DataManifest
from common.text import percent
from input_pipeline import Source

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


def make(predictions: Predictions, source: Source, content: DataManifest | None) -> list[Exhibit]:
    """Confusion, classes, calibration and the worst mistakes of the predictions on `source`.

    `content` is the data manifest, where the data have one.
    """
    names = list(source.class_names)
    if not any(names):
        names = [f"class {i}" for i in range(source.num_classes)]
    size = len(names)
    cells = predictions.labels.astype(np.int64) * size + predictions.guesses
    counts = np.bincount(cells, minlength=size**2).reshape(size, size)
    trained = dict(enumerate(content.train_counts, 1 - source.label_offset)) if content else {}
    exhibits = [
        _confusion(counts, names),
        _classes(counts, names, trained),
        _calibration(predictions),
        _mistakes(predictions, source, names),
    ]
    if content and (files := content.left_out):
        text = f"{len(files):,} files could not become records when the data were prepared"
        text += f"; the first {_LEFT_OUT}:" if len(files) > _LEFT_OUT else ":"
        columns, title = ("file", "reason"), "Files left out of the data"
        exhibits.append(Exhibit(title=title, text=text, columns=columns, rows=files[:_LEFT_OUT]))
    return exhibits


def _confusion(counts: np.ndarray, names: Sequence[str]) -> Exhibit:
    """`counts` is int[K, K]: how many examples of each label (row) got each guess (column)."""
    total = int(counts.sum())
    wrong = total - int(np.trace(counts))
    table = ([name, *row] for name, row in zip(names, counts.tolist(), strict=True))
    files = {"confusion.csv": csv_file(["true class \\ guess", *names], table)}
    if len(names) <= MATRIX:
        return Exhibit(
            title="Confusion",
            text=f"Each row is a true class, each column what the model took it for. {wrong:,} of "
            f"{total:,} images are off the diagonal.",
            matrix=Matrix(names, counts),
            files=files,
        )
    rows = confused_classes(counts, names)
    return Exhibit(
        title="Confusion",
        text=f"{wrong:,} of {total:,} images were taken for another class. The {len(rows)} "
        f"commonest mistakes; confusion.csv has all {len(names):,} classes.",
        columns=("true class", "taken for", "images", "of the class"),
        rows=rows,
        files=files,
    )


def _classes(counts: np.ndarray, names: Sequence[str], trained: Mapping[int, int]) -> Exhibit:
    """The table of classes, those with the lowest F1 first; `trained` has their training images.

    A class that nothing was taken for has a precision of nan, but an F1 of 0 if it has examples.
    """
    right, actual, guessed = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    with np.errstate(invalid="ignore"):
        values = np.stack([right / guessed, right / actual, 2 * right / (actual + guessed)], axis=1)
    known = np.flatnonzero(actual)
    order = known[np.argsort(values[known, 2], kind="stable")].tolist()
    head = ["class", "images", "precision", "recall", "F1"]
    rows, table = [], []
    for i in order:
        others = np.where(np.arange(len(names)) == i, 0, counts[i])
        most = int(others.argmax())
        taken_for = f"{names[most]} ({others[most]:,})" if others[most] else ""
        rows.append([names[i], f"{actual[i]:,}", *map(percent, values[i]), taken_for])
        rows[-1] += [f"{trained.get(i, 0):,}"] if trained else []
        table.append([names[i], actual[i], *(f"{x:.6f}" for x in values[i]), trained.get(i, "")])
    # A class that is never guessed has no precision; in the mean it counts as 0, as its F1 does.
    means = map(percent, np.nan_to_num(values[known]).mean(axis=0))
    mean = ["mean over classes", f"{actual.sum():,}", *means, ""]
    mean += [f"{sum(trained.values()):,}"] if trained else []
    text = f"The worst {CLASSES} of {len(known):,}" if len(known) > CLASSES else "All classes"
    text += ", the lowest F1 first; per_class.csv has the same figures for programs."
    if absent := len(names) - len(known):
        text += f" {absent:,} classes have no image to evaluate."
    return Exhibit(
        title="Classes",
        text=text,
        columns=[*head, "most often taken for", *(["training images"] if trained else [])],
        rows=[*rows[:CLASSES], mean],
        has_mean=True,
        files={"per_class.csv": csv_file([*head, "training_images"], table)},
    )


def calibration_bins(confidence: np.ndarray, correct: np.ndarray) -> tuple[float, list[Bar]]:
    """The expected calibration error and its bins that are not empty (Guo et al. 2017).

    The error is the mean over examples of |accuracy - mean confidence| of their bin; bins have
    equal width, and include their upper bound. A bar is the accuracy, its mark the confidence.
    """
    bounds = np.linspace(0, 1, _BINS + 1)
    bin_of = np.clip(np.searchsorted(bounds, confidence, side="left") - 1, 0, _BINS - 1)
    bars = []
    for i in np.unique(bin_of):
        mine = bin_of == i
        means = float(correct[mine].mean()), float(confidence[mine].mean())
        label = f"{100 * bounds[i]:.0f} to {100 * bounds[i + 1]:.0f}\u00a0%"
        bars.append(Bar(label, *means, int(mine.sum())))
    return sum(b.count * abs(b.value - b.ideal) for b in bars) / len(confidence), bars


def _calibration(predictions: Predictions) -> Exhibit:
    confidence = predictions.probabilities[:, 0].astype(np.float64)
    error, bars = calibration_bins(confidence, predictions.correct)
    accuracy, mean = float(predictions.correct.mean()), float(confidence.mean())
    verdict = "less sure than it could be" if mean < accuracy else "surer than it should be"
    return Exhibit(
        title="Calibration",
        text=f"How often a guess with a given probability is right. The model is {verdict}: "
        f"its guesses have a mean probability of {percent(mean)}, and {percent(accuracy)} are "
        f"right. The expected calibration error is {percent(error)} ({_BINS} bins of equal "
        "width). The mark is where a bar of a perfectly calibrated model ends.",
        bars=bars,
    )


def doubtful_labels(predictions: Predictions, classes: int) -> np.ndarray:
    """bool[n]: whether the label itself is probably wrong, by confident learning.

    A mistake counts if its guess is at least as probable as that class is, on average, for the
    examples that have it as their label (Northcutt et al. 2021, arXiv:1911.00068, section 3.1).
    """
    sums = np.bincount(predictions.labels, predictions.of_label, classes)
    examples = np.bincount(predictions.labels, minlength=classes)
    usual = np.where(examples, sums / np.maximum(examples, 1), np.inf)
    return ~predictions.correct & (predictions.probabilities[:, 0] >= usual[predictions.guesses])


def _mistakes(predictions: Predictions, source: Source, names: Sequence[str]) -> Exhibit:
    """Pictures of the mistakes with the most probable wrong guesses, the worst first."""
    wrong = np.flatnonzero(~predictions.correct)
    doubtful = doubtful_labels(predictions, len(names))
    order = np.argsort(-predictions.probabilities[wrong, 0], kind="stable")
    shown, pictures = wrong[order][:_MISTAKES].tolist(), []
    read = shards.read_some(source.shards, predictions.ids[shown])
    for i, record in zip(shown, read, strict=True):
        encoded, name = source.image(record)
        guess, label = names[int(predictions.guesses[i])], names[int(predictions.labels[i])]
        lines = [
            f"{guess}, {percent(float(predictions.probabilities[i, 0]))}",
            f"labelled {label}, {percent(float(predictions.of_label[i]))}",
            name,
        ]
        file = io.BytesIO()
        thumbnail(encoded, _SIDE).save(file, "JPEG", quality=85)
        flag = "Is the label wrong?" if doubtful[i] else ""
        pictures.append(Picture(file.getvalue(), lines, flag))
    text, doubts = "The model made no mistake.", int(doubtful.sum())
    if len(wrong):
        text = f"{len(wrong):,} mistake{'s' if len(wrong) > 1 else ''} in all. "
    if len(wrong) > 1:
        first = f"These are the {_MISTAKES}" if len(wrong) > _MISTAKES else "First come those"
        text += f"{first} with the most probable wrong guess. "
    if len(wrong):
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


def _table(
    predictions: Predictions, source: Source, names: Sequence[str], doubtful: np.ndarray
) -> bytes:
    """A line for each image: where it is, its label, its five best guesses."""
    ranks = range(1, predictions.top.shape[1] + 1)
    columns = ["file", "record", "label", "correct", "label_probability"]
    columns += [f"{what}_{i}" for i in ranks for what in ("guess", "probability")]
    rows: list[list[Any]] = []
    for i in np.argsort(predictions.ids, kind="stable").tolist():
        path, record = source.shards.place(int(predictions.ids[i]))
        row = [path.rpartition("/")[2], record, names[int(predictions.labels[i])]]
        row += [int(predictions.correct[i]), f"{predictions.of_label[i]:.6f}"]
        top = zip(predictions.top[i].tolist(), predictions.probabilities[i], strict=True)
        for label, share in top:
            row += [names[label], f"{share:.6f}"]
        rows.append([*row, int(doubtful[i])])
    return csv_file([*columns, "doubtful_label"], rows)
