"""Precision, recall and F1 of classes or labels, from counts; the scores that average them."""

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


def class_scores(tp: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> ClassScores:
    """The scores of K classes from counts int[K].

    Args:
      tp: the true positives, the examples of a class that are predicted as such.
      predicted: the examples that are predicted to have the class.
      actual: the examples that have it.
    """
    with np.errstate(invalid="ignore"):
        return ClassScores(tp / predicted, tp / actual, 2 * tp / (predicted + actual))


def macro_f1(scores: ClassScores) -> float:
    """The mean F1 of the classes that are present in the labels or in the predictions.

    The same as sklearn's f1_score(average="macro", zero_division=0). nan without any class.
    """
    return _mean(scores.f1)


def balanced_accuracy(scores: ClassScores) -> float:
    """The mean recall of the classes that have examples (sklearn's balanced_accuracy_score)."""
    return _mean(scores.recall)


def _mean(values: np.ndarray) -> float:
    """The mean of the values that are defined; nan without any."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else float("nan")
