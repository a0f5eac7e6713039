"""Precision, recall and F1 of classes or labels, from counts; the scores that average them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class ClassScores(NamedTuple):
    """How well K classes, or labels that each image may have, are found: float64[K] in [0, 1].

    A value is nan where it has no denominator: the precision of a class that is never predicted,
    the recall of one without an example, the F1 of one that has neither.
    """

    precision: np.ndarray  # tp / predicted
    recall: np.ndarray  # tp / actual
    f1: np.ndarray  # 2 tp / (predicted + actual), their harmonic mean

    def of_each(self, names: Sequence[str]) -> dict[str, float]:
        """The "precision/NAME", "recall/NAME" and "f1/NAME" of each class; {} without `names`.

        The precision of a class that is never predicted counts as 0, so that it has a curve. A
        class without an example has nan.
        """
        absent = np.isnan(self.recall)
        columns = [np.where(absent, math.nan, np.nan_to_num(values)) for values in self]
        values = np.stack(columns)[:, : len(names)].ravel().tolist()
        return dict(zip(names_of_each(names), values, strict=True))


def names_of_each(names: Sequence[str]) -> list[str]:
    """The scores of `ClassScores.of_each`."""
    return [f"{kind}/{name}" for kind in ClassScores._fields for name in names]


def class_scores(tp: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> ClassScores:
    """The scores of K classes from counts int[K].

    Args:
      tp: the true positives, the examples of a class that are predicted as such.
      predicted: the examples that are predicted to have the class.
      actual: the examples that have it.
    """
    with np.errstate(invalid="ignore"):
        return ClassScores(tp / predicted, tp / actual, 2 * tp / (predicted + actual))


def of_rows(rows: Iterable[Mapping[str, np.ndarray]], classes: int) -> ClassScores:
    """The scores of K classes from "label" int[n] and "top" int[n, k], the best guess first."""
    pairs = [(row["label"], row["top"][:, 0]) for row in rows]
    labels, guesses = map(np.concatenate, zip(*pairs, strict=True))
    columns = labels[labels == guesses], guesses, labels
    return class_scores(*(np.bincount(column, minlength=classes) for column in columns))


def of_labels(guesses: np.ndarray, labels: np.ndarray) -> ClassScores:
    """The scores of K labels from bool[n, K] each: which ones are predicted, and which are true."""
    return class_scores(*(x.sum(axis=0) for x in (guesses & labels, guesses, labels)))


def macro_f1(scores: ClassScores) -> float:
    """The mean F1 of the classes that are present in the labels or in the predictions.

    The same as sklearn's f1_score(average="macro", zero_division=0). nan without any class.
    """
    return mean(scores.f1)


def balanced_accuracy(scores: ClassScores) -> float:
    """The mean recall of the classes that have examples (sklearn's balanced_accuracy_score)."""
    return mean(scores.recall)


def mean(values: np.ndarray) -> float:
    """The mean of the values that are defined; nan without any."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else math.nan


MEANS = {"macro_f1": macro_f1, "balanced_accuracy": balanced_accuracy}
