"""The part of the training data that a run uses: `config.train_fraction`.

The parts of one `config.train_fraction_seed` are nested: a smaller one is in every larger one. The
data to evaluate on stay complete.
"""

import dataclasses

import numpy as np

from common.data.order import hash64

_DRAW = 31  # hashed with the seed, so that draws are independent of those of the order


@dataclasses.dataclass
class Part:
    """A share of the training data, drawn from `seed`."""

    fraction: float = 1.0
    seed: int = 0
    complete: int = 0  # the examples of which it is a part, once `choose` has seen them

    def __bool__(self) -> bool:
        """Whether some of the data are left out."""
        return self.fraction < 1

    def choose(
        self, count: int, strata: np.ndarray | None = None, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """Which of `count` examples the part has, bool[count].

        It has the share of every stratum, rounded, and at least one example or group of each. The
        examples of a group stay together; the stratum of a group is that of its first example.

        Args:
          strata: int[count], such as the class of each example; None: all are alike.
          groups: [count], such as the name of the film of each picture; None: each stands alone.
        """
        self.complete = count
        numbers = np.arange(count)
        first, group, sizes = numbers, numbers, np.ones(count, np.int64)
        if groups is not None:
            _, first, group, sizes = np.unique(
                groups, return_index=True, return_inverse=True, return_counts=True
            )
        stratum = np.zeros(len(first), np.int64) if strata is None else np.asarray(strata)[first]
        order = np.lexsort((hash64(self.seed, _DRAW, first), stratum))
        begins = np.flatnonzero(np.diff(stratum[order], prepend=stratum.min(initial=0) - 1))
        stratum_of = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(order)))
        ends = np.cumsum(sizes[order])
        before = np.append(0, ends)[begins]  # examples of the strata before each one
        totals = np.diff(before, append=count)
        middles = ends - sizes[order] / 2 - before[stratum_of]
        chosen = middles <= self.fraction * totals[stratum_of]
        chosen[begins] = True
        kept = np.zeros(len(first), bool)
        kept[order[chosen]] = True
        return kept[group]

    def describe(self) -> str:
        """The part in words, for the log; "" for all data."""
        if not self:
            return ""
        share = f"config.train_fraction={self.fraction:g} of {self.complete:,}"
        return f"{share}, drawn with config.train_fraction_seed={self.seed}"
