"""Groups of about one size."""

import numpy as np
import pytest

from ops import groups


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
    assert [group.tolist() for group in groups.even(np.array(values, int), most)] == expected
