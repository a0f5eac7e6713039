"""Finds images that a data set has several times: with two labels, in both splits, in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_SHOWN = 3  # groups of equal images that a line names
_KINDS = (
    "under two labels, of which one is wrong",
    "in both splits, so that the score counts what was trained on",
    "several times in one split",
)


def lines(
    digests: np.ndarray,
    labels: np.ndarray,
    splits: np.ndarray,
    name: Callable[[int], str],
    within: Sequence[Any] = (),
) -> list[str]:
    """A line for each kind of images that occur several times, the worst first.

    Args:
      digests: [n], equal where images are.
      labels, splits: [n].
      name: of the i-th image in words, called for the few that a line names.
      within: only images with one of their copies in one of these splits; () for all.
    """
    _, number, counts = np.unique(digests, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[number] > 1)
    order = repeated[np.argsort(number[repeated], kind="stable")]
    kinds: dict[str, list[np.ndarray]] = {kind: [] for kind in _KINDS}
    for group in np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if len(order) else ():
        if not len(within) or np.isin(splits[group], within).any():
            kind = 0 if np.ptp(labels[group]) else 1 if len(set(splits[group])) > 1 else 2
            kinds[_KINDS[kind]].append(group)
    return [
        f"{len(groups):,} {'image is' if len(groups) == 1 else 'images are'} there {kind}: "
        + "; ".join(" = ".join(map(name, group.tolist()[:4])) for group in groups[:_SHOWN])
        + (f"; and {len(groups) - _SHOWN:,} more" if len(groups) > _SHOWN else "")
        for kind, groups in kinds.items()
        if groups
    ]
