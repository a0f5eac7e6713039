"""Which examples are held out for validation: groups stay together, each class gives a share."""

import argparse
import collections
import math
import re
from collections.abc import Sequence

import numpy as np

from common.preparation import writing
from common.preparation.sources import SourceError


def fraction(text: str) -> float:
    """The type of a flag for the share that is held out, between 0 and 1."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError("must be between 0 and 1")
    return float(text)


def pattern(text: str) -> str:
    """The type of a flag with a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        text = f"{text!r} is not a regular expression: {error}"
        raise argparse.ArgumentTypeError(text) from error
    return text


def groups(names: Sequence[str], pattern: str, flag: str = "--group") -> list[str]:
    """The group of each example: what the pattern finds in its name; without a pattern, the name.

    The first parenthesis counts, if there is one. SourceError if the pattern, which the `flag` has,
    finds nothing.
    """
    if not pattern:
        return [*names]
    found = [group(name, pattern) for name in names]
    if None in found:
        name = names[found.index(None)]
        raise SourceError(f"{flag}={pattern}: the pattern finds nothing in {name}")
    return [text or "" for text in found]


def group(name: str, pattern: str) -> str | None:
    """What the pattern finds in a name; None if it finds nothing."""
    match = re.search(pattern, name)
    return match and (match[min(1, match.re.groups)] or "")


def choose(groups: Sequence[str], labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """bool[n]: which examples are held out: complete groups, a share of each class or more.

    A class of two groups gives at least one of them, and keeps at least one example for training.
    `labels` int[n] are from 1.
    """
    is_held_out, rows = np.zeros(len(labels), bool), collections.defaultdict(list)
    for k, group in enumerate(groups):
        rows[group].append(k)
    left = np.bincount(labels)  # by label, how many stay for training
    for label in range(1, len(left)):
        members = np.flatnonzero(labels == label)
        number = max(1, math.floor(fraction * len(members) + 0.5))
        names = sorted({groups[k] for k in members.tolist()})
        for i in writing.shuffled(seed, "validation", names).tolist():
            if len(members) - left[label] >= number:
                break
            group = rows[names[i]]
            counts = np.bincount(labels[group], minlength=len(left))
            if not is_held_out[group[0]] and np.all((counts < left) | (counts == 0)):
                is_held_out[group] = True
                left -= counts
    return is_held_out
