"""How a score grows with the number of training examples: a power law with its uncertainty.

The law is error(n) = c + a n^-b, where the error is 1 - score: Hestness et al., "Deep Learning
Scaling is Predictable, Empirically", arXiv:1712.00409; Hoiem et al., "Learning Curves for Analysis
of Deep Networks", arXiv:2010.11029. A few runs do not decide its three parameters; therefore a
fitted law is all laws that the runs allow, each with its probability.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

AHEAD = (2, 4)  # times the largest measured number of examples, which are foretold
LIMIT = 64  # times the largest measured number of examples; nobody can tell what is beyond

# Priors, as median and deviation of a logarithm. The papers have exponents of 0.07 to 0.5. Noise is
# in parts of the evaluation's sampling error: all runs are evaluated on the same examples, and
# differ less than that; a t-distribution of 4 degrees allows for other noise.
_EXPONENT = (math.log(0.25), 1.0)
_NOISE = (math.log(0.7), 0.7)
_DEGREES = 4
_BEND = 0.45  # of the log of a true rise from the law's, because no curve is quite a power law
_CLEAR = 2.0  # deviations that a score must rise by
_FASTER = 3.5  # the same for a rise per doubling that grows, which no power law has
_FEWEST = 20  # examples that an evaluation needs
_NOT_BEGUN = 0.005  # a score below it is no success
_DRAWS = 16384
_CELLS = 96  # of the grid, along each side
_NORMAL = np.array([statistics.NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)])
_R3 = 1.2207440846057596 ** -np.arange(1.0, 4.0)  # of Roberts' sequence, which fills a cube evenly


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
        rise = (target - self.top) / np.maximum(self.excess, 1e-12)
        left = 1 - np.where(rise > 0, rise / self.bend, rise)  # of the excess, at the target
        logs = -np.log(np.maximum(left, 1e-300)) / self.power
        times = dataclasses.astuple(_interval(np.exp(np.minimum(logs, math.log(2 * LIMIT)))))
        return Interval(*(x * self.largest if x <= LIMIT else math.inf for x in times))

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


def fit(
    points: Sequence[Point], evaluated: int, *, unit: str = "examples", percent: bool = False
) -> Law | Unclear:
    """Fits the law to all runs; `evaluated` is the number of examples that each score is from.

    The same points give the same law. It is Unclear if there are fewer than three sizes, a score is
    outside 0..1, nothing was learnt, the score does not rise by more than runs differ by chance,
    or it rises ever faster. The reason names the `unit` and shows scores in per cent if `percent`.
    """
    if evaluated < _FEWEST:
        return Unclear(f"{evaluated} evaluated examples are too few: chance decides the score")
    for point in points:
        if not 0 <= point.score <= 1:  # also nan
            size = f"{point.examples:,} {unit}"
            return Unclear(f"the score with {size} is {point.score:g}, which is not in 0..1")
    means = _means(points)
    if len(means) < 3:
        sizes = ", ".join(f"{n:,}" for n in means) or "none"
        return Unclear(f"a law needs three numbers of {unit}, there are: {sizes}")
    shown = {n: in_words(score, percent) for n, score in means.items()}
    best = max(means, key=means.__getitem__)
    if means[best] < max(_NOT_BEGUN, 1.5 / evaluated):
        return Unclear(
            f"nothing was learnt yet: the best score is {shown[best]}, from {evaluated:,} "
            "evaluated examples; train longer first, or look for a fault in the data"
        )
    examples, scores = np.array(sorted((point.examples, point.score) for point in points)).T
    hits = (scores.mean() * evaluated + 1) / (evaluated + 2)  # never 0 or 1
    sampling = math.sqrt(hits * (1 - hits) / evaluated)
    law = _posterior(examples, 1 - scores, sampling)
    sizes, levels = list(means), np.array(list(means.values()))
    runs = np.array([(examples == n).sum() for n in sizes])
    apart = _CLEAR * np.sqrt(1 / runs + 1 / runs[-1])  # deviations, from the largest size's score
    quiet = min(law.noise, sampling)  # points that no law fits make the law's noise large
    peak = int(levels.argmax())

    def change(first: int) -> str:
        last = sizes[-1]
        return f"from {shown[first]} with {first:,} {unit} to {shown[last]} with {last:,}"

    if levels[peak] - levels[-1] > apart[peak] * quiet:
        return Unclear(
            f"the score falls {change(sizes[peak])}: something other than their "
            "number decides it, as faults in the labels or a training that does not fit"
        )
    slopes = np.diff(levels) / np.diff(np.log2(sizes))
    if slopes[-1] - slopes[0] > _FASTER * quiet:
        return Unclear(
            f"the score rises {change(sizes[0])}, ever faster: more data helps, but how much "
            "follows no law yet"
        )
    chance = apart[0] * law.noise
    if levels[-1] - levels[0] <= chance:
        return Unclear(
            f"the score goes {change(sizes[0])}, and chance alone could make a difference of "
            f"{in_words(chance, percent)}, with {evaluated:,} evaluated examples: either more of "
            "the same data no longer helps, or something else limits the score, as faults in the "
            "labels, or they are too few"
        )
    return law


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


def in_words(score: float, percent: bool) -> str:
    """A score such as "0.123", or "12.3 %"."""
    return f"{100 * score:.1f} %" if percent else f"{score:.3f}"


def _posterior(examples: np.ndarray, errors: np.ndarray, sampling: float) -> Law:
    """Draws laws from the posterior for `examples` and `errors`, of shape [runs].

    A law is error(n) = E (r + (1 - r) (n / largest)^-b). The priors of r, log b and log sigma are
    Beta(1, 1/2), normal and a t-distribution; that of the error with the fewest examples is flat,
    and is integrated analytically. The grid is over log b, log sigma, and instead of r over the
    logarithm of how many times the error falls from the fewest to the most examples, which the runs
    tell almost independently of b. It shrinks around what is probable.
    """
    logs = np.log(examples / examples.max())
    spread = np.linspace(-3.0, max(3.0, (math.log(0.5 / sampling) - _NOISE[0]) / _NOISE[1]), 40)
    sigma = sampling * np.exp(_NOISE[0] + _NOISE[1] * spread)
    prior = -(_DEGREES + 1) / 2 * np.log1p(spread**2 / _DEGREES)
    sides = [(0.0, 8.0), (-3.0, 3.0)]  # of the fall, and of log b in deviations
    while True:
        cells = [low + (high - low) * (np.arange(_CELLS) + 0.5) / _CELLS for low, high in sides]
        fall, z = np.exp(cells[0])[:, None], cells[1][None, :]
        b = np.exp(_EXPONENT[0] + _EXPONENT[1] * z)
        most = np.exp(-b * logs.min())  # what the error falls by if r = 0
        r = (most - fall) / (most - 1)
        shape = r[..., None] + (1 - r[..., None]) * np.exp(-b[..., None] * logs)
        shape /= fall[..., None]
        square = (shape**2).sum(-1)
        level = (shape * errors).sum(-1) / square
        rest = ((errors - level[..., None] * shape) ** 2).sum(-1) / 2
        density = np.log(fall / (most - 1)) - np.log(np.maximum(1 - r, 1e-9)) / 2  # over log fall
        density = np.where(r >= 0, density, -np.inf)
        log_weight = prior - (len(errors) - 1) * np.log(sigma) - rest[..., None] / sigma**2
        log_weight += (density - np.log(square) / 2 - z**2 / 2)[..., None]
        weight = np.exp(log_weight - log_weight.max())
        smaller = []
        for side, axes, (low, high) in zip(cells, ((1, 2), (0, 2)), sides, strict=True):
            sums, cell = weight.sum(axes), side[1] - side[0]
            kept = side[sums > 1e-4 * sums.max()]
            smaller.append((max(low, kept[0] - 1.5 * cell), min(high, kept[-1] + 1.5 * cell)))
        if all(x[1] - x[0] > 0.7 * (y[1] - y[0]) for x, y in zip(smaller, sides, strict=True)):
            break
        sides = smaller
    count, total = np.arange(_DRAWS), weight.cumsum()
    index = np.searchsorted(total, (count + 0.5) / _DRAWS * total[-1])
    row, column, noise = np.unravel_index(index, weight.shape)
    normal = _NORMAL[(4096 * ((0.5 + count * _R3[:, None]) % 1)).astype(int)]
    error = level[row, column] + sigma[noise] / np.sqrt(square[row, column]) * normal[0]
    error = np.clip(error, 0, 1) / fall[row, 0]
    return Law(
        largest=int(examples.max()),
        top=1 - error,
        excess=error * (1 - r[row, column]),
        power=b[0, column],
        bend=np.exp(_BEND * normal[1]),
        deviation=sigma[noise],
        chance=normal[2],
    )


def _interval(draws: np.ndarray) -> Interval:
    low, median, high = np.quantile(draws, [0.1, 0.5, 0.9]).tolist()
    return Interval(low, median, high)
