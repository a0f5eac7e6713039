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

    @property
    def means(self) -> dict[str, float]:
        """The scores of all classes; nan without any.

        "macro_f1" is the mean F1 of the classes that are present in labels or predictions, as
        sklearn's f1_score(average="macro", zero_division=0). "balanced_accuracy" is the mean recall
        of the classes that have examples, as sklearn's balanced_accuracy_score.
        """
        means = {"macro_f1": self.f1, "balanced_accuracy": self.recall}
        defined = {name: values[~np.isnan(values)] for name, values in means.items()}
        return {k: float(x.mean()) if len(x) else math.nan for k, x in defined.items()}

    def of_each(self, names: Sequence[str]) -> dict[str, float]:
        """The "precision/NAME", "recall/NAME" and "f1/NAME" of each class; {} without `names`."""
        return {
            f"{kind}/{name}": float(values[i])
            for kind, values in self._asdict().items()
            for i, name in enumerate(names)
        }


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
