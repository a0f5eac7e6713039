"""What the exhibits of several benchmarks have in common."""

import numpy as np

from benchmarks.exhibits import confused_classes


def test_the_commonest_confusions_come_first():
    counts = np.array([[5, 2, 0], [7, 1, 1], [0, 0, 9]])
    assert confused_classes(counts, ["a", "b", "c"]) == [
        ("b", "a", "7", "77.8\u00a0%"),
        ("a", "b", "2", "28.6\u00a0%"),
        ("b", "c", "1", "11.1\u00a0%"),
    ]
    many = confused_classes(np.ones((60, 60), int), [str(i) for i in range(60)])
    assert len(many) == 30 and many[0][:2] == ("0", "1")


def test_what_is_no_class_is_not_confused():
    """A detector's last row and column, which count for the shares only."""
    counts = np.zeros((4, 4), int)
    counts[0, 1], counts[2, 0], counts[1, 1], counts[3, 0], counts[0, 3] = 2, 5, 9, 7, 8
    assert confused_classes(counts, ["a", "b", "c"]) == [
        ("c", "a", "5", "100.0\u00a0%"),
        ("a", "b", "2", "20.0\u00a0%"),
    ]
