"""How sure a share of few examples is."""

from __future__ import annotations

import math

FEW = 2000  # examples from which on a share is shown without its interval
_Z = 1.959964  # the normal distribution's 97.5 % quantile


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of `count` examples (Wilson 1927).

    With p = share, n = count and z = 1.96 it is

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    middle, scale = share + _Z**2 / (2 * count), 1 + _Z**2 / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def interval(share: float, count: int) -> str:
    """The interval of a share in words, for a line of a report; "" where nobody needs it."""
    if not 0 < count < FEW or not 0 <= share <= 1:
        return ""
    low, high = wilson(share, count)
    return f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"
