"""The scores of classes agree with scikit-learn's."""

from typing import Any

import numpy as np
import pytest
import sklearn.metrics

from benchmarks.resnet import scores

metrics: Any = sklearn.metrics


def counts(labels, guesses, classes):
    """(tp, predicted, actual), int[K], counted one by one."""
    pairs = [*zip(labels, guesses, strict=True)]
    return (
        np.array([sum(a == b == k for a, b in pairs) for k in range(classes)]),
        np.array([sum(b == k for _, b in pairs) for k in range(classes)]),
        np.array([sum(a == k for a, _ in pairs) for k in range(classes)]),
    )


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("missing", ["none", "label", "prediction", "both"])
def test_scores_agree_with_sklearn(missing):
    draw = np.random.default_rng(3)
    labels, guesses = draw.integers(0, 5, 60), draw.integers(0, 5, 60)
    guesses[:30] = labels[:30]
    if missing in ("label", "both"):
        labels[labels == 2] = 1
    if missing in ("prediction", "both"):
        guesses[guesses == 2] = 3
    found = scores.class_scores(*counts(labels, guesses, 5))
    macro = metrics.f1_score(labels, guesses, average="macro", zero_division=0)
    assert scores.macro_f1(found) == pytest.approx(macro)
    balanced = metrics.balanced_accuracy_score(labels, guesses)
    assert scores.balanced_accuracy(found) == pytest.approx(balanced)
    of_class = metrics.precision_recall_fscore_support(
        labels, guesses, labels=range(5), zero_division=np.nan
    )
    for ours, theirs in zip(found, of_class[:3], strict=True):
        np.testing.assert_allclose(ours, theirs)


def test_each_class_has_scores_by_its_name():
    found = scores.class_scores(np.array([3, 0, 0]), np.array([4, 0, 2]), np.array([6, 1, 0]))
    each = found.of_each(["a", "b/c", "d"])
    np.testing.assert_equal(
        each,
        {"precision/a": 0.75, "precision/b/c": 0, "precision/d": np.nan}
        | {"recall/a": 0.5, "recall/b/c": 0, "recall/d": np.nan}
        | {"f1/a": 0.6, "f1/b/c": 0, "f1/d": np.nan},
    )
    assert np.isnan(found.precision).tolist() == [False, True, False]


def test_no_example_has_no_score():
    nothing = scores.class_scores(*np.zeros((3, 4), int))
    assert np.isnan(nothing).all()
    assert np.isnan([mean(nothing) for mean in scores.MEANS.values()]).all()
    assert nothing.of_each([]) == {}


def test_scores_of_rows_and_of_several_labels():
    rows = [
        {"label": np.array([0, 2, 2]), "top": np.array([[0, 1], [1, 2], [2, 0]])},
        {"label": np.array([2]), "top": np.array([[0, 2]])},
    ]
    found = scores.of_rows(rows, 4)
    np.testing.assert_equal(found.precision, [1 / 2, 0, 1, np.nan])
    np.testing.assert_equal(found.recall, [1, np.nan, 1 / 3, np.nan])
    guesses = np.array([[1, 0], [1, 1], [1, 0]], bool)
    truth = np.array([[1, 0], [0, 1], [0, 1]], bool)
    found = scores.of_labels(guesses, truth)
    np.testing.assert_equal([*found], [[1 / 3, 1], [1, 1 / 2], [2 / 4, 2 / 3]])
    assert scores.mean(np.array([np.nan, 3.0, 6.0])) == 4.5
