"""What the predictions of a classifier say about its mistakes."""

import numpy as np
import pytest

from benchmarks.resnet.use import exhibits
from benchmarks.resnet.use.exhibits import Predictions


def test_calibration_is_guos():
    draw = np.random.default_rng(1)
    confidence, correct = draw.uniform(0.1, 1, 500), draw.random(500) < 0.6
    confidence[:3] = 0.1, 0.5, 1.0
    wanted = 0.0
    for i in range(10):
        mine = [k for k in range(500) if i / 10 < confidence[k] <= (i + 1) / 10 + 1e-12]
        if mine:
            gap = np.mean([correct[k] for k in mine]) - np.mean([confidence[k] for k in mine])
            wanted += len(mine) / 500 * abs(gap)
    error, bins = exhibits.calibration_bins(confidence, correct)
    assert error == pytest.approx(wanted, abs=1e-9)
    assert sum(one.count for one in bins) == 500


def test_a_label_is_doubtful_where_the_model_is_as_sure_as_of_right_ones():
    predictions = Predictions(
        ids=np.arange(4),
        labels=np.array([0, 0, 1, 1]),
        top=np.array([[0, 1], [0, 1], [0, 1], [0, 1]]),
        probabilities=np.array([[0.9, 0.1], [0.7, 0.3], [0.85, 0.15], [0.75, 0.25]]),
        of_label=np.array([0.9, 0.7, 0.15, 0.25]),
    )  # class 0 has 0.8 on average for its own examples
    assert exhibits.doubtful_labels(predictions, 2).tolist() == [False, False, True, False]
