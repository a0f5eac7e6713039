"""What the scores of the parts say about more data: as JSON, as lines, and for the report."""

import collections
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from etils import epath

from benchmarks.uses import Exhibit, Picture
from commands.scaling import law
from commands.scaling.law import Law, Point, Unclear
from common.errors import parse_json

FOLDER, JSON, PNG = "scaling", "scaling.json", "scaling.png"  # the folder is in the workdir
_NAMED = 5  # groups that the lines name
_Content = Mapping[str, Any]


class Result(NamedTuple):
    """A run on a part of the data."""

    fraction: float  # of the training data that the config asks for
    seed: int
    examples: int  # it was trained on
    score: float  # of its best evaluation
    step: int  # of that evaluation
    groups: Mapping[str, tuple[float, int]]  # by `Benchmark.group_scores`
    workdir: str


def part_name(fraction: float) -> str:
    """A share of the data in words, such as "1/8"."""
    return "all" if fraction == 1 else str(Fraction(fraction).limit_denominator(1000))


def points(about: _Content, results: Sequence[Result]) -> list[Point]:
    """The runs for the law, with the number of what people collect, such as pairs."""
    counts = collections.defaultdict(list)  # those of several seeds may differ a little
    for x in results:
        counts[x.fraction].append(x.examples * about["per_example"])
    sizes = {fraction: round(statistics.fmean(each)) for fraction, each in counts.items()}
    return [Point(sizes[x.fraction], x.score, x.seed) for x in results]


def describe(about: _Content, results: Sequence[Result], found: Law | Unclear) -> dict[str, Any]:
    """The content of scaling.json; numbers that are infinite or unknown are None."""
    measured = points(about, results)
    content = {
        **{key: about[key] for key in ("metric", "percent", "target", "unit", "left_out")},
        "evaluated": f"{about['evaluated']:,} {about['evaluated_unit']}",
        "parts": [
            {**x._asdict(), "part": part_name(x.fraction), about["unit"]: point.examples}
            for x, point in zip(results, measured, strict=True)
        ],
        "interval": "80 % of the probability",
        "cannot_tell": found.reason if isinstance(found, Unclear) else "",
        "groups": _groups(about, results),
    }
    if isinstance(found, Unclear):
        return content
    content["expected"] = [
        {"times": times, about["unit"]: times * found.largest}
        | _ends(found.score(times * found.largest))
        for times in law.AHEAD
    ]
    content |= {"ceiling": _ends(found.ceiling), "exponent": _ends(found.exponent)}
    content["noise"] = found.noise
    if about["target"]:
        content["needed"] = _ends(found.examples_for(about["target"]))
    if check := law.backtest(measured, about["evaluated"]):
        content["check"] = {"measured": check.measured, "inside": check.inside}
        content["check"] |= _ends(check.expected)
    return content


def _groups(about: _Content, results: Sequence[Result]) -> list[dict[str, Any]]:
    """The groups' own scores and what twice the data would bring, the greatest gain first."""
    rows, measured = [], points(about, results)
    for name in results[-1].groups:
        own = [
            dataclasses.replace(point, score=x.groups[name][0])
            for point, x in zip(measured, results, strict=True)
            if name in x.groups
        ]
        evaluated = results[-1].groups[name][1]
        found = law.fit(own, evaluated)
        rows.append({"name": name, "evaluated": evaluated, "scores": [x.score for x in own]})
        if isinstance(found, Law):
            rows[-1] |= {"gain_of_twice": _ends(found.gain(2 * found.largest))}
    return sorted(rows, key=lambda row: -row.get("gain_of_twice", {"median": 0.0})["median"])


def _ends(interval: law.Interval) -> dict[str, float | None]:
    values = dataclasses.asdict(interval)
    return {name: x if math.isfinite(x) else None for name, x in values.items()}


def table(content: _Content) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the scores, measured and expected."""
    unit, number = content["unit"], _number(content)
    rows = [
        [row["part"], str(row["seed"]), f"{row[unit]:,}", number(row["score"]), "measured"]
        for row in content["parts"]
    ]
    rows += [
        [f"{row['times']}x", "", f"{row[unit]:,}", number(row["median"]), _span(content, row)]
        for row in content.get("expected", ())
    ]
    return ["part", "seed", unit, content["metric"].replace("_", " "), "80 % interval"], rows


def sentences(content: _Content) -> list[str]:
    """What the law says, in sentences."""
    number, unit = _number(content), content["unit"]
    lines = [f"Left out: {text}." for text in content["left_out"]]
    if content["cannot_tell"]:
        return [*lines, f"Cannot tell what more data would bring: {content['cannot_tell']}."]
    ceiling = content["ceiling"]
    lines += [
        f"The law's ceiling is {number(ceiling['median'])} ({_span(content, ceiling)}): more "
        f"{unit} of this kind alone do not bring this recipe above it."
    ]
    if target := content["target"]:
        reached = content["parts"][-1]["score"] >= target
        needed = "is reached with all data" if reached else f"needs {_needed(content)}"
        lines.append(f"A score of {number(target)} {needed}.")
    rising = [row for row in content["groups"] if "gain_of_twice" in row]
    if content["groups"]:
        named = ", ".join(
            f"{row['name']} ({_gain(content, row['gain_of_twice'])})" for row in rising[:_NAMED]
        )
        lines.append(
            f"Twice the data would bring most to: {named}."
            if named
            else "No group's own scores rise by more than chance: see scaling.json."
        )
    if check := content.get("check"):
        inside = "inside" if check["inside"] else "OUTSIDE"
        lines.append(
            f"Check: the smaller parts alone foretold {number(check['median'])} "
            f"({_span(content, check)}) for the largest; measured: {number(check['measured'])}, "
            f"{inside}."
        )
    return lines


def exhibits(workdir: str) -> list[Exhibit]:
    """What the report of a run shows of its scaling.json and scaling.png; [] without them."""
    own = epath.Path(workdir)
    folders = own / FOLDER, own.parent  # the second one of the run on all data in the first one
    folder = next((path for path in folders if (path / JSON).exists()), None)
    if folder is None:
        return []
    content = parse_json((folder / JSON).read_bytes())
    columns, rows = table(content)
    picture = Picture((folder / PNG).read_bytes(), ["The score by the data to train on"], wide=True)
    text = " ".join(sentences(content))
    return [Exhibit(title="More data", text=text, columns=columns, rows=rows, pictures=[picture])]


def _number(content: _Content) -> Callable[[float], str]:
    return functools.partial(law.in_words, percent=content["percent"])


def _gain(content: _Content, ends: _Content) -> str:
    """A difference of scores in words."""
    low, median, high = (100 * ends[key] for key in ("low", "median", "high"))
    if content["percent"]:
        return f"+{median:.1f} points, {low:.1f} to {high:.1f}"
    return f"+{median / 100:.3f}, {low / 100:.3f} to {high / 100:.3f}"


def _span(content: _Content, ends: _Content) -> str:
    number = _number(content)
    return f"{number(ends['low'])} to {number(ends['high'])}"


def _needed(content: _Content) -> str:
    """How much data the target needs, in words."""
    most = law.LIMIT * content["parts"][-1][content["unit"]]
    low, median, high = (content["needed"][key] for key in ("low", "median", "high"))

    def amount(x: float | None) -> str:
        if x is None:
            return f"more than {most:,}"
        return f"{float(f'{x:.2g}'):,.0f}"

    if median is None:
        least = f"; at least {amount(low)}" if low is not None else ""
        return f"{amount(None)} {content['unit']}, if it can be reached at all{least}"
    return f"about {amount(median)} {content['unit']} ({amount(low)} to {amount(high)})"
