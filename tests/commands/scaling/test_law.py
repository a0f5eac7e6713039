"""Tests of the fitted law of scores."""

import math

import numpy as np
import pytest

from commands.scaling import law as laws
from commands.scaling.law import Law, Point, Unclear, backtest, fit

_EIGHTHS = (1 / 8, 1 / 4, 1 / 2, 1.0)


def _points(scores, first=100, seed=0):
    """Runs on 100, 200, 400, ... examples."""
    return [Point(first * 2**i, score, seed) for i, score in enumerate(scores)]


def _fitted(points, evaluated) -> Law:
    law = fit(points, evaluated)
    assert isinstance(law, Law), law
    return law


def test_many_exact_points_give_back_the_law():
    """c = 0.1, b = 0.6, and 0.9 of error beyond c with 10 examples, up to 10,240."""

    def curve(n):
        return 1 - 0.1 - 0.9 * (n / 10) ** -0.6

    law = _fitted(_points([curve(10 * 2**i) for i in range(11)], first=10), 10_000_000)
    assert law.exponent.median == pytest.approx(0.6, abs=0.005)
    assert law.exponent.low <= 0.6 <= law.exponent.high
    assert law.ceiling.median == pytest.approx(0.9, abs=0.002)
    assert law.score(10_240).median == pytest.approx(curve(10_240), abs=3e-4)
    assert law.mean(80).median == pytest.approx(curve(80), abs=3e-4)
    assert law.score(40_960).median == pytest.approx(curve(40_960), abs=1e-3)
    assert law.gain(40_960).median == pytest.approx(curve(40_960) - curve(10_240), abs=1e-3)
    assert law.noise < 2e-4  # the sampling error is 1.3e-4 or less
    for target in (0.5, 0.89):  # the second is reached with 18,000 examples
        needed = 10 * (0.9 / (0.9 - target)) ** (1 / 0.6)
        assert law.examples_for(target).median == pytest.approx(needed, rel=0.02)


def test_posterior_is_that_of_importance_sampling():
    """Laws are drawn from the prior and weighted; three sizes, two of them with two runs."""
    points = [*_points([0.50, 0.74, 0.78]), *_points([0.53, 0.73], seed=1)]
    evaluated = 300
    n = np.array([point.examples for point in points])
    score = np.array([point.score for point in points])
    rng, count = np.random.default_rng(0), 1_500_000
    b = 0.25 * np.exp(rng.standard_normal(count))
    r = 1 - rng.uniform(0, 1, count) ** 2  # Beta(1, 1/2)
    hits = (score.mean() * evaluated + 1) / (evaluated + 2)
    sampling = np.sqrt(hits * (1 - hits) / evaluated)
    sigma = 0.7 * sampling * np.exp(0.7 * rng.standard_t(4, count))
    first = rng.uniform(0.3, 0.7, count)  # the error with 100 examples; beyond is no weight
    last = first / (r + (1 - r) * 4**b)
    errors = [last * (r + (1 - r) * (x / 400) ** -b) for x in n]
    fits = sum(-(((1 - s - e) / sigma) ** 2) / 2 for s, e in zip(score, errors, strict=True))
    weight = np.exp(fits - len(n) * np.log(sigma))
    weight[(b < 0.25 * math.exp(-3)) | (b > 0.25 * math.exp(3)) | (sigma < 1e-9)] = 0
    weight /= weight.sum()
    rise = last * (1 - r) * (1 - 2**-b) * np.exp(0.45 * rng.standard_normal(count))
    run = np.clip(1 - last + rise, 0, 1) + sigma * rng.standard_normal(count)
    law = _fitted(points, evaluated)
    for found, values in (
        (law.score(800), np.clip(run, 0, 1)),
        (law.mean(800), np.clip(1 - last + rise, 0, 1)),
        (law.mean(400), 1 - last),
        (law.gain(800), np.clip(1 - last + rise, 0, 1) - (1 - last)),
    ):
        order = np.argsort(values)
        summed = np.cumsum(weight[order])
        low, median, high = values[order][np.searchsorted(summed, [0.1, 0.5, 0.9])]
        assert found.low == pytest.approx(low, abs=0.005)
        assert found.median == pytest.approx(median, abs=0.005)
        assert found.high == pytest.approx(high, abs=0.005)
    assert law.noise == pytest.approx(_median(sigma, weight), rel=0.1)
    assert law.exponent.median == pytest.approx(_median(b, weight), rel=0.1)


def _median(values, weight):
    order = np.argsort(values)
    return values[order][np.searchsorted(np.cumsum(weight[order]), 0.5)]


def _simulate(parts, seeds, target, evaluated, share, count=120):
    """How often the interval holds what a run at `target` measures; its width; the refusals."""
    rng = np.random.default_rng(0)
    inside, widths, refused = [], [], 0
    for _ in range(count):
        limit, b = rng.uniform(0, 0.4), np.exp(rng.normal(np.log(0.35), 0.5))
        excess = min(rng.uniform(0.03, 0.4), (0.95 - limit) * 16**-b)

        def measure(part, limit=limit, b=b, excess=excess):
            score = 1 - limit - excess * part**-b
            sigma = share * math.sqrt(score * (1 - score) / evaluated)
            return min(max(score + sigma * rng.standard_normal(), 0.0), 1.0)

        points = [
            Point(round(1600 * part), measure(part), seed)
            for part, runs in zip(parts, seeds, strict=True)
            for seed in range(runs)
        ]
        law = fit(points, evaluated)
        if isinstance(law, Unclear):
            refused += 1
        else:
            expected = law.score(1600 * target)
            inside.append(expected.low <= measure(target) <= expected.high)
            widths.append(expected.high - expected.low)
    return np.mean(inside), np.median(widths), refused / count


@pytest.mark.parametrize(
    ("parts", "seeds", "target"),
    [
        ((1 / 16, 1 / 8, 1 / 4, 1 / 2), (1, 1, 1, 1), 1),
        ((1 / 16, 1 / 8, 1 / 4, 1 / 2), (3, 3, 1, 1), 1),
        (_EIGHTHS, (1, 1, 1, 1), 2),
        (_EIGHTHS, (1, 1, 1, 1), 4),
        ((1 / 4, 1 / 2, 1), (1, 1, 1), 2),
    ],
)
def test_intervals_hold_four_of_five_runs(parts, seeds, target):
    inside, width, refused = _simulate(parts, seeds, target, 1000, share=0.8)
    assert 0.73 <= inside <= 0.97
    assert 0.02 <= width <= 0.13  # one run's own spread is 0.03 wide
    assert refused <= 0.1


def test_saturated_scores_are_mostly_refused():
    rng, laws_found = np.random.default_rng(0), 0
    for _ in range(100):
        scores = 0.8 + 0.7 * math.sqrt(0.16 / 1000) * rng.standard_normal(4)
        laws_found += isinstance(fit(_points(scores.tolist()), 1000), Law)
    assert laws_found <= 12


def test_scores_linear_in_the_logarithm_continue():
    """As BLEU of Koehn & Knowles 2017: about the same rise with each doubling."""
    law = _fitted(_points([0.20, 0.23, 0.26, 0.29]), 3000)
    assert law.score(1600).low <= 0.32 <= law.score(1600).high
    assert law.score(3200).low <= 0.35 <= law.score(3200).high


def test_errors_that_vanish_fast_are_a_steep_law():
    """Errors of 0.5, 0.1, 0.02 and 0.004, which are 0.5 n^-2.32."""
    law = _fitted(_points([0.5, 0.9, 0.98, 0.996]), 1000)
    assert law.exponent.low > 1.8 and law.exponent.high < 2.8
    assert law.mean(800).median == pytest.approx(0.996, abs=0.003)


def test_a_narrow_posterior_is_found():
    """The errors are 0.3, and 0.2 that falls as n^-1.5; the noise is 0.002."""
    law = _fitted(_points([0.7 - 0.2 * 2 ** (-1.5 * i) for i in range(5)]), 50_000)
    assert law.exponent.median == pytest.approx(1.5, abs=0.05)
    assert law.ceiling.median == pytest.approx(0.7, abs=0.003)
    assert law.noise < 0.004


def test_more_seeds_and_more_evaluated_examples_are_surer():
    scores = [0.5, 0.62, 0.7, 0.76]

    def width(law):
        return law.score(1600).high - law.score(1600).low

    few = _fitted(_points(scores), 300)
    many = _fitted(_points(scores), 30_000)
    assert width(many) < 0.8 * width(few)
    repeated = [point for seed in range(4) for point in _points(scores, seed=seed)]
    assert width(_fitted(repeated, 300)) < width(few)
    assert _fitted(repeated, 300).noise < few.noise


def test_spread_of_repeats_is_noise():
    repeats = [
        Point(point.examples, point.score + 0.05 * sign, sign)
        for point in _points([0.4, 0.6, 0.7, 0.75])
        for sign in (-1, 1)
    ]
    assert 0.03 < _fitted(repeats, 10_000).noise < 0.08  # the sampling error is 0.005


def test_examples_for_a_score():
    law = _fitted(_points([0.5, 0.6, 0.68, 0.74]), 2000)
    reached = law.examples_for(0.6)
    assert 150 < reached.low < reached.median < reached.high < 300
    later = law.examples_for(0.8)
    assert 800 < later.low < later.median < later.high
    never = law.examples_for(1.0)
    assert never.median == never.high == math.inf
    for target in (0.1, 0.79, 0.9, 0.999):
        for n in vars(law.examples_for(target)).values():
            assert n == math.inf or n <= laws.LIMIT * 800


def test_intervals_stay_scores():
    law = _fitted(_points([0.5, 0.9, 0.99, 1.0]), 50)
    for interval in (law.score(1600), law.mean(1600), law.mean(50), law.ceiling):
        assert 0 <= interval.low <= interval.median <= interval.high <= 1


def test_the_same_points_give_the_same_law():
    points = _points([0.5, 0.62, 0.7, 0.76])
    assert _fitted(points, 300).score(1600) == _fitted(points[::-1], 300).score(1600)


@pytest.mark.parametrize(
    ("scores", "evaluated", "figures"),
    [
        ([0.5, 0.6], 100, ("100, 200",)),
        ([], 100, ("none",)),
        ([0.5, math.nan, 0.7], 100, ("200", "nan")),
        ([0.5, 0.6, 38.2], 100, ("400", "38.2")),
        ([0.5, 0.6, 0.7], 0, ("evaluated",)),
        ([0.0, 0.0, 0.001, 0.001], 1000, ("nothing", "0.001")),
        ([0.0, 0.0, 0.04, 0.04], 24, ("nothing", "0.040")),
        ([0.25, 0.5, 0.75, 0.75], 4, ("4 evaluated", "few")),
        ([0.0, 0.0, 0.0, 0.0], 100, ("nothing",)),
        ([0.912, 0.915, 0.909, 0.917], 500, ("0.912", "0.917", "chance", "no longer helps")),
        ([0.5, 0.75, 0.5, 0.625], 8, ("chance", "evaluated")),
        ([1.0, 1.0, 1.0, 1.0], 500, ("chance",)),
        ([0.8, 0.7, 0.65, 0.6], 500, ("falls", "0.800", "0.600")),
        ([0.3, 0.5, 0.7, 0.6], 1000, ("falls", "0.700 with 400", "0.600 with 800")),
        ([0.01, 0.02, 0.06, 0.15], 1000, ("ever faster", "0.010", "0.150")),
    ],
)
def test_unclear_points_are_refused_with_figures(scores, evaluated, figures):
    unclear = fit(_points(scores), evaluated)
    assert isinstance(unclear, Unclear)
    for figure in figures:
        assert figure in unclear.reason


def test_reasons_can_be_in_per_cent():
    unclear = fit(_points([0.8, 0.7, 0.65, 0.6]), 500, percent=True)
    assert isinstance(unclear, Unclear)
    assert "80.0 % with 100" in unclear.reason and "60.0 % with 800" in unclear.reason


def test_backtest_foretells_the_largest_from_the_others():
    points = _points([0.50, 0.62, 0.70, 0.76])
    tested = backtest(points, 1000)
    assert tested is not None
    assert tested.examples == 800
    assert tested.measured == 0.76
    assert tested.expected == _fitted(points[:3], 1000).score(800)
    assert tested.inside
    missed = backtest([*points[:3], Point(800, 0.95, 0)], 1000)
    assert missed is not None and not missed.inside
    assert backtest(points[:3], 1000) is None  # two sizes are left
    assert backtest([*points[:3], Point(800, math.nan, 0)], 1000) is None
    assert backtest([], 1000) is None
