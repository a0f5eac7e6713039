"""What the exhibits of several benchmarks have in common."""

import numpy as np
import pytest

from benchmarks.exhibits import even_groups


@pytest.mark.parametrize(
    ("values", "most", "expected"),
    [
        ([], 3, []),
        ([4], 3, [[0]]),
        ([3, 1, 2, 0], 2, [[3, 1], [2, 0]]),
        ([5, 5, 5, 5], 3, [[0, 1, 2, 3]]),
        ([1, 2, 2, 2, 2, 3], 3, [[0, 1, 2, 3, 4], [5]]),
        (list(range(7)), 3, [[0, 1], [2, 3], [4, 5, 6]]),
    ],
)
def test_groups_are_even_and_equal_values_stay_together(values, most, expected):
    assert [group.tolist() for group in even_groups(np.array(values, int), most)] == expected
