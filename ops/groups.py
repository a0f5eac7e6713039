"""Cuts examples into groups of about one size, along a number that they have."""

from __future__ import annotations

import numpy as np


def even(values: np.ndarray, most: int) -> list[np.ndarray]:
    """The indices of values int[n] in at most `most` groups, the least values first.

    Equal values stay together. So groups may differ in size, and there may be fewer of them; none
    is empty.
    """
    order = np.argsort(values, kind="stable")
    ordered, n = values[order], len(values)
    if not n:
        return []
    lasts = [max(n * (i + 1) // most, 1) - 1 for i in range(most)]
    ends = np.unique(np.searchsorted(ordered, ordered[lasts], side="right"))
    return np.split(order, ends[:-1])
