"""How a score grows with the number of training examples: a power law with its uncertainty.

The law is error(n) = c + a n^-b with error = 1 - score, as Hestness et al. 2017 (arXiv:1712.00409)
and Hoiem et al. 2021 (arXiv:2010.11029) measure it. A few runs do not decide its three parameters;
therefore `fit` keeps all laws that the points allow, each with its probability.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

LIMIT = 64  # times the largest measured number of examples; nobody can tell what is beyond

_SHARE = 0.8  # of the probability that an interval holds
_EXPONENT = (math.log(0.25), 1.0)  # mean and deviation of log b; the papers have 0.07 to 0.5
_BEND = 0.3  # deviation of the log of a true rise from the law's, because no curve is quite a law
# The same for the noise, in parts of the evaluation's sampling error. All runs are evaluated on the
# same examples; therefore they differ less than that. A t-distribution of so many degrees allows
# for noise of other sources.
_NOISE = (math.log(0.6), 0.7)
_NOISE_DEGREES = 4
ACC = 5.0
_CLEAR = 2.0  # deviations that the score must rise by
_NOT_BEGUN = 0.005  # a score below it is no success
_DRAWS = 16384
_CELLS = 40  # of the grid, along each side
_NORMAL = np.array([statistics.NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)])
_R3 = 1.2207440846057596 ** -np.arange(1.0, 4.0)


@dataclasses.dataclass(frozen=True)
class Point:
    """A run: its number of training examples, its score in 0..1, and its seed."""

    examples: int
    score: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Interval:
    """The median and the limits of the central 80 % of the probability."""

    low: float
    median: float
    high: float


@dataclasses.dataclass(frozen=True)
class Unclear:
    """Why the points do not tell a law, in a sentence for users."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Law:
    """The laws that the points allow, as equally probable draws; each array has the shape [draws].

    Numbers of examples may be fractional. Scores are in 0..1.
    """

    largest: int  # measured number of examples
    top: np.ndarray  # the law's score with `largest` examples
    excess: np.ndarray  # the error there beyond c
    power: np.ndarray  # b
    bend: np.ndarray  # factor of the rise beyond `largest`
    deviation: np.ndarray  # of a run's score from the law
    chance: np.ndarray  # of a future run, in deviations

    def mean(self, examples: float) -> Interval:
        """The law's score, which is the mean of many runs."""
        return _interval(self._scores(examples))

    def score(self, examples: float) -> Interval:
        """The score that one more run on so many examples would measure."""
        return _interval(np.clip(self._scores(examples) + self.deviation * self.chance, 0, 1))

    def gain(self, examples: float) -> Interval:
        """What the law's score rises by from the largest measured number of examples."""
        return _interval(self._scores(examples) - self.top)

    @property
    def ceiling(self) -> Interval:
        """The score that no number of examples exceeds."""
        return _interval(np.minimum(self.top + self.bend * self.excess, 1))

    @property
    def exponent(self) -> Interval:
        """b of the law."""
        return _interval(self.power)

    @property
    def noise(self) -> float:
        """The standard deviation of the runs' scores from the law."""
        return float(np.median(self.deviation))

    def examples_for(self, target: float) -> Interval:
        """The number of examples where the law reaches a score.

        It is math.inf beyond LIMIT times the largest measured number, and where it never does.
        """
        rise = (target - self.top) / self.excess
        left = 1 - np.where(rise > 0, rise / self.bend, rise)  # what remains of the excess
        times = np.minimum(np.maximum(left, 1e-300) ** (-1 / self.power), 2 * LIMIT)
        found = _interval(times)
        ends = dataclasses.astuple(found)
        return Interval(*(x * self.largest if x <= LIMIT else math.inf for x in ends))

    def _scores(self, examples: float) -> np.ndarray:
        rise = self.excess * (1 - (examples / self.largest) ** -self.power)
        return np.clip(self.top + (self.bend if examples > self.largest else 1) * rise, 0, 1)


@dataclasses.dataclass(frozen=True)
class Backtest:
    """What the smaller parts foretell for the largest number of examples, and what came."""

    examples: int
    expected: Interval
    measured: float  # the mean over the seeds

    @property
    def inside(self) -> bool:
        """Whether the measured score lies in the expected interval."""
        return self.expected.low <= self.measured <= self.expected.high


def fit(points: Sequence[Point], evaluated: int) -> Law | Unclear:
    """Fits the law to all runs; `evaluated` is the number of examples that each score is from.

    The same points give the same law. It is Unclear if there are fewer than three sizes, a score is
    outside 0..1, nothing was learnt, or the score does not rise by more than runs differ by chance.
    """
    if evaluated < 1:
        return Unclear("no example was evaluated")
    for point in points:
        if not 0 <= point.score <= 1:  # also nan
            size = f"{point.examples:,} training examples"
            return Unclear(f"the score with {size} is {point.score:g}, which is not in 0..1")
    means = _means(points)
    if len(means) < 3:
        sizes = ", ".join(f"{n:,}" for n in means) or "none"
        return Unclear(f"a law needs three numbers of training examples, there are: {sizes}")
    if max(means.values()) < max(_NOT_BEGUN, 1.5 / evaluated):
        best = max(means.values())
        return Unclear(
            f"nothing was learnt yet: the best score is {best:.4f}, from {evaluated:,} evaluated "
            "examples; train longer first, or look for a fault in the data"
        )
    examples = np.array([point.examples for point in points])
    scores = np.array([point.score for point in points])
    hits = (scores.mean() * evaluated + 1) / (evaluated + 2)  # never 0 or 1
    sampling = math.sqrt(hits * (1 - hits) / evaluated)
    law = _posterior(examples, 1 - scores, sampling)
    smallest = int(examples.min())
    runs = [int((examples == n).sum()) for n in (smallest, law.largest)]
    rise = means[law.largest] - means[smallest]
    chance = _CLEAR * law.noise * math.sqrt(sum(1 / n for n in runs))
    slopes = [
        (means[n] - means[m]) / math.log2(n / m)
        for m, n in zip(means, list(means)[1:], strict=False)
    ]
    if slopes[-1] - slopes[0] > ACC * min(law.noise, sampling):
        return Unclear(
            f"the score rises ever faster, to {means[law.largest]:.3f} with {law.largest:,} training "
            "examples: more of them help, but how much follows no law yet"
        )
    if rise > chance:
        return law
    change = (
        f"{means[smallest]:.3f} with {smallest:,} training examples to {means[law.largest]:.3f} "
        f"with {law.largest:,}"
    )
    if rise < 0:
        return Unclear(
            f"the score falls from {change}: something other than their number decides it, as "
            "faults in the labels, or too short a training"
        )
    return Unclear(
        f"the score rises from {change}, by {rise:.3f}; chance alone could make {chance:.3f}: "
        "either more of the same data no longer helps, or something other limits the score, as "
        "faults in the labels or too small an evaluation set"
    )


def backtest(points: Sequence[Point], evaluated: int) -> Backtest | None:
    """Foretells the largest number of examples from the smaller ones; None if they do not tell."""
    means = _means(points)
    largest = max(means, default=0)
    law = fit([point for point in points if point.examples < largest], evaluated)
    if isinstance(law, Unclear) or not 0 <= means[largest] <= 1:
        return None
    return Backtest(largest, law.score(largest), means[largest])


def _means(points: Sequence[Point]) -> dict[int, float]:
    """The mean score of each number of examples, in ascending order."""
    return {
        n: statistics.fmean(point.score for point in points if point.examples == n)
        for n in sorted({point.examples for point in points})
    }


def _posterior(examples: np.ndarray, errors: np.ndarray, sampling: float) -> Law:
    """Draws laws from the posterior for `examples` and `errors`, of shape [runs].

    A law is error(n) = E (r + (1 - r) (n / largest)^-b). The grid is over r, log b and log sigma,
    uniform, log-normal and log-t; E is integrated analytically, with a flat prior. The grid shrinks
    around what is probable.
    """
    logs = np.log(examples / examples.max())
    center, width = _NOISE
    spread = np.linspace(-3.0, max(3.0, (math.log(0.5 / sampling) - center) / width), 24)
    sigma = sampling * np.exp(center + width * spread)
    prior_sigma = -(_NOISE_DEGREES + 1) / 2 * np.log1p(spread**2 / _NOISE_DEGREES)
    sides = [(-1.0, 1.0), (-3.0, 3.0)]  # of r, whose half below 0 stands for 0; of b in deviations
    for _ in range(6):
        cells = [low + (high - low) * (np.arange(_CELLS) + 0.5) / _CELLS for low, high in sides]
        r, z = np.maximum(cells[0], 0)[:, None], cells[1][None, :]
        b = np.exp(_EXPONENT[0] + _EXPONENT[1] * z)
        shape = r[..., None] + (1 - r[..., None]) * np.exp(-b[..., None] * logs)
        square = (shape**2).sum(-1)
        level = (shape * errors).sum(-1) / square
        rest = ((errors - level[..., None] * shape) ** 2).sum(-1)
        log_weight = (
            -rest[..., None] / (2 * sigma**2)
            - (len(errors) - 1) * np.log(sigma)
            + prior_sigma
            - (np.log(square) / 2 + z**2 / 2)[..., None]
        )
        weight = np.exp(log_weight - log_weight.max())
        sums = weight.sum((1, 2)), weight.sum((0, 2))
        smaller = [_probable(*x) for x in zip(cells, sums, sides, strict=True)]
        if all(x[1] - x[0] > 0.7 * (y[1] - y[0]) for x, y in zip(smaller, sides, strict=True)):
            break
        sides = smaller
    count = np.arange(_DRAWS)
    total = weight.cumsum()
    index = np.searchsorted(total, (count + 0.5) / _DRAWS * total[-1])
    row, column, noise = np.unravel_index(index, weight.shape)
    # Three sequences that fill the cube evenly: Roberts' R3.
    normal = _NORMAL[(4096 * ((0.5 + count * _R3[:, None]) % 1)).astype(int)]
    error = level[row, column] + sigma[noise] / np.sqrt(square[row, column]) * normal[0]
    error = np.clip(error, 0, 1)
    return Law(
        largest=int(examples.max()),
        top=1 - error,
        excess=error * (1 - r[row, 0]),
        power=b[0, column],
        bend=np.exp(_BEND * normal[1]),
        deviation=sigma[noise],
        chance=normal[2],
    )


def _probable(
    cells: np.ndarray, weights: np.ndarray, sides: tuple[float, float]
) -> tuple[float, float]:
    """The part of a grid's side that holds all but the improbable cells."""
    kept = cells[weights > 1e-4 * weights.max()]
    cell = cells[1] - cells[0]
    return max(sides[0], kept[0] - 1.5 * cell), min(sides[1], kept[-1] + 1.5 * cell)


def _interval(draws: np.ndarray) -> Interval:
    ends = np.quantile(draws, [(1 - _SHARE) / 2, 0.5, (1 + _SHARE) / 2])
    return Interval(*(float(x) for x in ends))
