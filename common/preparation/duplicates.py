"""Images that a data set has several times: a preparation names them at its end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from common.errors import visible

_SHOWN_GROUPS = 3  # groups of equal images that a line names
_KINDS_OF_REPEATS = (
    "under two labels, of which one is wrong",
    "in both splits, so that the score counts what was trained on",
    "several times in one split",
)


def repeated_images(
    digests: np.ndarray,
    labels: np.ndarray,
    splits: np.ndarray,
    name: Callable[[int], str],
) -> list[str]:
    """A line for each kind of images that occur several times, the worst kind first.

    The arrays are [n]; equal images have equal digests. `name(i)` describes the i-th image, for the
    few that a line names.
    """
    _, number, counts = np.unique(digests, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[number] > 1)
    order = repeated[np.argsort(number[repeated], kind="stable")]
    kinds: dict[str, list[np.ndarray]] = {kind: [] for kind in _KINDS_OF_REPEATS}
    for group in np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if len(order) else ():
        kind = 0 if len({*labels[group].tolist()}) > 1 else 1 if len(set(splits[group])) > 1 else 2
        kinds[_KINDS_OF_REPEATS[kind]].append(group)
    return [
        f"{len(groups):,} {'image is' if len(groups) == 1 else 'images are'} there {kind}: "
        + "; ".join(" = ".join(map(name, group.tolist()[:4])) for group in groups[:_SHOWN_GROUPS])
        + (f"; and {len(groups) - _SHOWN_GROUPS:,} more" if len(groups) > _SHOWN_GROUPS else "")
        for kind, groups in kinds.items()
        if groups
    ]


def report_repeated(results: Sequence[Mapping[str, Any]]) -> None:
    """Prints which images are several times in the shards; `writing.write` returned `results`."""
    seen = [(*row, shard["split"]) for shard in results for row in shard.get("digests", ())]
    if seen:
        digests, labels, paths, splits = map(np.array, zip(*seen, strict=True))
        for line in repeated_images(digests, labels, splits, lambda i: str(paths[i])):
            print(visible(f"warning: {line}"))
