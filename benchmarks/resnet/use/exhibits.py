"""Shows what a classifier gets wrong, for the report: `benchmarks.uses.Uses.exhibits`."""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.exhibits import CLASSES, csv_file, percent, thumbnail
from benchmarks.uses import Exhibit, Picture
from common.data import shards
from input_pipeline import Source

_MISTAKES = 24  # pictures
_SIDE = 192  # the side of a picture, in pixels


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The predictions of n examples."""

    ids: np.ndarray  # int[n], the number of each example in the data
    labels: np.ndarray  # int[n], the true classes, from 0
    top: np.ndarray  # int[n, k], the classes with the highest probabilities, the best first
    probabilities: np.ndarray  # float[n, k], of the classes in `top`
    of_label: np.ndarray  # float[n], the probability of the true class

    @property
    def guesses(self) -> np.ndarray:
        """int[n], the class that the model takes each example for."""
        return self.top[:, 0]

    @property
    def correct(self) -> np.ndarray:
        """bool[n], whether the guess is the label."""
        return self.guesses == self.labels


def make(predictions: Predictions, source: Source) -> list[Exhibit]:
    """The classes and the worst mistakes of the predictions on `source`."""
    names = class_names(source)
    return [_classes(predictions, names), _mistakes(predictions, source, names)]


def class_names(source: Source) -> list[str]:
    """The names of the classes, or their numbers where the data have no names."""
    names = list(source.class_names)
    return names if any(names) else [f"class {i}" for i in range(source.num_classes)]


def pictures(source: Source, ids: np.ndarray, captions: Sequence[Sequence[str]]) -> list[Picture]:
    """The pictures with these numbers in the data, each with its lines and the name of its file."""
    shown = []
    read = shards.read_some(source.shards, ids)
    for record, lines in zip(read, captions, strict=True):
        encoded, name = source.image(record)
        file = io.BytesIO()
        thumbnail(encoded, _SIDE).save(file, "JPEG", quality=85)
        shown.append(Picture(file.getvalue(), [*lines, name]))
    return shown


def _classes(predictions: Predictions, names: Sequence[str]) -> Exhibit:
    """The table of classes, those with the lowest F1 first.

    A class that is never predicted has a precision of nan, but an F1 of 0 if it has examples.
    """
    size = len(names)
    cells = predictions.labels.astype(np.int64) * size + predictions.guesses
    counts = np.bincount(cells, minlength=size**2).reshape(size, size)  # row: label, column: guess
    right, actual, guessed = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    with np.errstate(invalid="ignore"):
        values = np.stack([right / guessed, right / actual, 2 * right / (actual + guessed)], axis=1)
    present = np.flatnonzero(actual)
    order = present[np.argsort(values[present, 2], kind="stable")].tolist()
    head = ["class", "images", "precision", "recall", "F1"]
    rows, table = [], []
    for i in order:
        others = np.where(np.arange(size) == i, 0, counts[i])
        confused = int(others.argmax())
        taken_for = f"{names[confused]} ({others[confused]:,})" if others[confused] else ""
        rows.append([names[i], f"{actual[i]:,}", *map(percent, values[i]), taken_for])
        table.append([names[i], actual[i], *(f"{x:.6f}" for x in values[i])])
    # A class that is never guessed has no precision; in the mean it counts as 0, as its F1 does.
    means = map(percent, np.nan_to_num(values[present]).mean(axis=0))
    text = f"The worst {CLASSES} of {len(present):,}" if len(present) > CLASSES else "All classes"
    text += ", the lowest F1 first. For programs: per_class.csv has the same figures, "
    text += "confusion.csv how often each class was taken for each other."
    if absent := size - len(present):
        text += f" {absent:,} classes have no image to evaluate."
    confusion = ([name, *row] for name, row in zip(names, counts.tolist(), strict=True))
    return Exhibit(
        title="Classes",
        text=text,
        columns=[*head, "most often taken for"],
        rows=[*rows[:CLASSES], ["mean over classes", f"{actual.sum():,}", *means, ""]],
        has_mean=True,
        files={
            "per_class.csv": csv_file(head, table),
            "confusion.csv": csv_file(["true class \\ guess", *names], confusion),
        },
    )


def _mistakes(predictions: Predictions, source: Source, names: Sequence[str]) -> Exhibit:
    """Pictures of the mistakes with the most probable wrong guesses, the worst first."""
    wrong = np.flatnonzero(~predictions.correct)
    order = np.argsort(-predictions.probabilities[wrong, 0], kind="stable")
    captions = []
    shown = wrong[order][:_MISTAKES]
    for i in shown.tolist():
        guess, label = names[int(predictions.guesses[i])], names[int(predictions.labels[i])]
        lines = [f"{guess}, {percent(float(predictions.probabilities[i, 0]))}"]
        captions.append([*lines, f"labelled {label}, {percent(float(predictions.of_label[i]))}"])
    text = "The model made no mistake. "
    if captions:
        text = f"The {len(captions)} most probable of {len(wrong):,} wrong guesses. Below each "
        text += "picture: the guess, then the label, with their probabilities. "
    return Exhibit(
        title="Worst mistakes",
        text=text + "predictions.csv has every image.",
        pictures=pictures(source, predictions.ids[shown], captions),
        files={"predictions.csv": _table(predictions, source, names)},
    )


def _table(predictions: Predictions, source: Source, names: Sequence[str]) -> bytes:
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
        rows.append(row)
    return csv_file(columns, rows)
