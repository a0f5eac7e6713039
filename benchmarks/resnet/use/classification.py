"""Looks closely at the predictions of a classifier: confusion, classes, calibration, mistakes."""

from __future__ import annotations

import dataclasses

import numpy as np


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
