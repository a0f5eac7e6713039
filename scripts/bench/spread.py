"""What the ratios of several rounds allow to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def span(ratios: Sequence[float]) -> dict[str, Any]:
    """The least and the largest ratio of the rounds, and whether all are on one side of 1.

    Returns:
      {"least", "largest", "verdict"}: of equal pipelines the ratios lie around 1, so a range with
      1 in it says nothing. One round alone has no range.
    """
    least, largest = min(ratios), max(ratios)
    return {"least": least, "largest": largest, "verdict": not least <= 1 <= largest}


def text(ratio: float, of: dict[str, Any]) -> str:
    """The ratio with its range, "1.55 (1.47 to 1.80)", or "no verdict: 0.93 to 1.56"."""
    bounds = f"{of['least']:.2f} to {of['largest']:.2f}"
    return f"{ratio:.2f} ({bounds})" if of["verdict"] else f"no verdict: {bounds}"
