"""Shows what a classifier gets wrong, for the report: `benchmarks.uses.Uses.exhibits`."""

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.exhibits import CLASSES, beside, csv_file, heated, percent, sigmoid, thumbnail
from benchmarks.resnet import scores
from benchmarks.uses import Exhibit, Picture
from common.data import shards
from common.images.input_spec import InputSpec
from input_pipeline import Source

_MISTAKES, _HITS = 24, 12  # pictures
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


@dataclasses.dataclass(frozen=True)
class Photos:
    """The evaluated photos, and how they are shown.

    `heat` makes heat maps f32[n, size, size] of n encoded images with a class for each; None: there
    are none. `spec` says how the images become the model's pixels.
    """

    source: Source
    spec: InputSpec
    heat: Callable[[Sequence[bytes], np.ndarray], np.ndarray] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the classes, or their numbers where the data have no names."""
        names = list(self.source.class_names)
        return names if any(names) else [f"class {i}" for i in range(self.source.num_classes)]

    @property
    def about(self) -> str:
        """What is beside each picture, as a sentence; "" if nothing is."""
        if not self.heat:
            return ""
        text = "Beside it: what the model sees, in the frame, and the brighter and yellower, the "
        return text + "more it speaks for the class that is named (Grad-CAM at the last stage). "

    def pictures(
        self, ids: np.ndarray, classes: np.ndarray, captions: Sequence[Sequence[str]]
    ) -> list[Picture]:
        """The pictures with these numbers in the data, each with its lines and its file's name.

        Beside each is the heat map of its class in `classes` int[n].
        """
        images = [self.source.image(x) for x in shards.read_some(self.source.shards, ids)]
        maps, shown = None, []
        if self.heat and images:
            maps = self.heat([encoded for encoded, _ in images], classes)
        for i, (encoded, name) in enumerate(images):
            image, file = thumbnail(encoded, _SIDE), io.BytesIO()
            if maps is not None:
                image = beside(image, heated(image, maps[i], self.spec))
            image.save(file, "JPEG", quality=85)
            shown.append(Picture(file.getvalue(), [*captions[i], name], wide=maps is not None))
        return shown


def make(predictions: Predictions, photos: Photos) -> list[Exhibit]:
    """The classes, the worst mistakes and the best hits of the predictions."""
    return [_classes(predictions, photos.names), *_pictures(predictions, photos)]


def _classes(predictions: Predictions, names: Sequence[str]) -> Exhibit:
    """The table of classes, those with the lowest F1 first.

    A class that is never predicted has a precision of nan, but an F1 of 0 if it has examples.
    """
    size = len(names)
    cells = predictions.labels.astype(np.int64) * size + predictions.guesses
    counts = np.bincount(cells, minlength=size**2).reshape(size, size)  # row: label, column: guess
    right, actual, guessed = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    found = scores.class_scores(right, guessed, actual)
    values, present = np.stack(found, axis=1), np.flatnonzero(actual)
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
    precision = float(np.nan_to_num(found.precision[present]).mean())
    means = map(percent, [precision, scores.balanced_accuracy(found), scores.macro_f1(found)])
    text = f"The worst {CLASSES} of {len(present):,}" if len(present) > CLASSES else "All classes"
    text += ", the lowest F1 first. For programs: per_class.csv has the same figures, "
    text += "confusion.csv how often each class was taken for each other."
    if absent := size - len(present):
        text += f" {absent:,} classes have no image to evaluate."
    if guesses := np.count_nonzero(guessed[actual == 0]):
        text += f" {guesses:,} of these are guessed, and count as 0 in the mean F1."
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


def _pictures(predictions: Predictions, photos: Photos) -> list[Exhibit]:
    """Pictures of the mistakes and of the hits with the most probable guesses, the first first."""
    order = np.argsort(-predictions.probabilities[:, 0], kind="stable")
    correct, names, captions = predictions.correct[order], photos.names, []
    wrong, right = order[~correct], order[correct]
    shown = np.concatenate([wrong[:_MISTAKES], right[:_HITS]])
    for i in shown.tolist():
        guess, label = names[int(predictions.guesses[i])], names[int(predictions.labels[i])]
        lines = [f"{guess}, {percent(float(predictions.probabilities[i, 0]))}"]
        if not predictions.correct[i]:
            lines.append(f"labelled {label}, {percent(float(predictions.of_label[i]))}")
        captions.append(lines)
    pictures = photos.pictures(predictions.ids[shown], predictions.guesses[shown], captions)
    mistakes, hits = pictures[: len(wrong[:_MISTAKES])], pictures[len(wrong[:_MISTAKES]) :]
    text = "The model made no mistake. "
    if mistakes:
        text = f"The {len(mistakes)} most probable of {len(wrong):,} wrong guesses. Below each "
        text += f"picture: the guess, then the label, with their probabilities. {photos.about}"
    best = "The model made no right guess."
    if hits:
        best = f"The {len(hits)} most probable of {len(right):,} right guesses. {photos.about}"
    files = {"predictions.csv": _table(predictions, photos.source, names)}
    text += "predictions.csv has every image."
    return [
        Exhibit(title="Worst mistakes", text=text, pictures=mistakes, files=files),
        Exhibit(title="Best hits", text=best, pictures=hits),
    ]


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


_SHOWN = 12  # pictures of each kind


def make_of_labels(
    ids: np.ndarray, logits: np.ndarray, labels: np.ndarray, precisions: np.ndarray, photos: Photos
) -> list[Exhibit]:
    """The table of labels, then labels too many, labels missed and right ones, the surest first.

    Args:
      ids: int[n], the number of each picture in the data.
      logits: float[n, K]; a label is predicted where it is above 0, which is a probability of 0.5.
      labels: bool[n, K], which labels each picture has.
      precisions: float[K], the average precision of each label, nan where no picture has it.
      photos: the pictures.
    """
    names = np.array(photos.names)
    shares, found = sigmoid(logits), logits > 0
    head = ["file", "record", "labels", "exact", *(f"probability of {name}" for name in names)]
    table = []
    for i in np.argsort(ids, kind="stable").tolist():
        path, record = photos.source.shards.place(int(ids[i]))
        row = [path.rpartition("/")[2], record, "|".join(names[labels[i]])]
        row.append(int((found[i] == labels[i]).all()))
        table.append([*row, *(f"{share:.6f}" for share in shares[i])])
    kinds = (  # and how sure the model is of them
        ("Labels too many", "worst", "labels that are not the picture's", found & ~labels, shares),
        ("Labels missed", "worst", "labels missed", ~found & labels, 1 - shares),
        ("Best hits", "most probable", "right labels", found & labels, shares),
    )
    exhibits = [_labels(found, labels, precisions, names, csv_file(head, table))]
    for title, which, noun, chosen, sureness in kinds:
        rows, columns = np.nonzero(chosen)
        order = np.argsort(-sureness[rows, columns], kind="stable")[:_SHOWN]
        text, captions = "There is none.", []
        for i, k in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
            own = ", ".join(names[labels[i]]) or "with none"
            captions.append([f"{names[k]}, {percent(float(shares[i, k]))}", f"labelled {own}"])
        if captions:
            text = f"The {len(order)} {which} of {len(rows):,} {noun}. Below each picture: "
            text += f"that label with its probability, then the labels it has. {photos.about}"
        shown = photos.pictures(ids[rows[order]], columns[order], captions)
        exhibits.append(Exhibit(title=title, text=text, pictures=shown))
    return exhibits


def _labels(
    found: np.ndarray,
    labels: np.ndarray,
    precisions: np.ndarray,
    names: np.ndarray,
    predictions: bytes,
) -> Exhibit:
    """The table of labels, those with the lowest average precision first."""
    actual = labels.sum(axis=0)
    values = scores.of_labels(found, labels)
    present = np.flatnonzero(actual)
    order = present[np.argsort(precisions[present], kind="stable")].tolist()
    columns = np.stack([precisions, *values], axis=1)
    head = ["label", "images", "average precision", "precision", "recall", "F1"]
    rows = [[names[i], f"{actual[i]:,}", *map(percent, columns[i])] for i in order]
    means = map(percent, np.nan_to_num(columns[present]).mean(axis=0)) if order else [""] * 4
    bare = int((~labels.any(axis=1)).sum())
    text = f"The worst {CLASSES} of {len(order):,}" if len(order) > CLASSES else "All labels"
    text += ", the lowest average precision first; the other figures are for labels with a "
    text += f"probability above 50 %. {bare:,} of {len(labels):,} images have no label. For "
    text += "programs: per_class.csv has the same figures, predictions.csv has every image."
    if absent := len(names) - len(order):
        text += f" {absent:,} labels have no image to evaluate."
    table = [[names[i], actual[i], *(f"{x:.6f}" for x in columns[i])] for i in order]
    return Exhibit(
        title="Labels",
        text=text,
        columns=head,
        rows=[*rows[:CLASSES], ["mean over labels", f"{actual.sum():,}", *means]],
        has_mean=True,
        files={"per_class.csv": csv_file(head, table), "predictions.csv": predictions},
    )
