"""Runs MLPerf's own checkers over the results of run_and_time.sh, and gives one verdict.

    python -m scripts.mlperf.check DIR [--ruleset=4.0.0]

DIR is $MLP_GCS_MODEL_DIR of run_and_time.sh, or any folder with results/ and systems/. Exit code 0
if every checker of mlperf-logging is content (logs, seeds, reference convergence points, system,
package, summary), and what they do not look at is right, too: the number of images, the epochs
of the evaluations, the caches. Of v0.5, which they do not know, only the latter is looked at.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from etils import epath

from errors import one_line
from scripts import console
from scripts.mlperf import logs as mlperf_logs
from scripts.mlperf import official as mlperf_official
from scripts.mlperf.official import RULESETS, Package, name

_V05 = "v0.5 has no official checker; images, evaluations, target, seeds and caches were looked at"
_MISSED = "the target was not reached"


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the rules say of a benchmark."""

    train: int  # examples
    evaluation: int
    period: int  # epochs between evaluations
    runs: int
    target: float  # of v0.5; the official checkers know the others


_FACTS = {"resnet": _Facts(1_281_167, 50_000, 4, 5, 0.749)}


class CheckError(ValueError):
    """There is nothing to check; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found of one system's results for one benchmark; no faults is a success.

    `scale` is what the minutes are multiplied with, because the runs needed fewer epochs than the
    reference does; `notes` are no faults.
    """

    system: str
    benchmark: str
    ruleset: str
    runs: int
    epochs: float | None
    minutes: float | None
    scale: float
    faults: list[str]
    notes: list[str]

    def __str__(self) -> str:
        mean = ", no olympic mean"
        if self.epochs is not None and self.minutes is not None:
            mean = f", olympic mean {self.epochs:.2f} epochs, {self.minutes:.2f} minutes"
            if self.scale != 1:
                scaled = self.minutes * self.scale
                mean += f", scaled by {self.scale:.4f} {scaled:.2f} minutes"
        word = "FAIL" if self.faults else "PASS"
        head = f"{word} {self.benchmark} on {self.system}, rules {self.ruleset}: {self.runs} runs"
        return "\n".join([f"{head}{mean}", *(f"  {line}" for line in self.faults + self.notes)])


def judge(package: Package) -> Verdict:
    """Asks everybody about one system and benchmark."""
    runs, faults, notes = {}, [], []
    for file in package.files:
        try:
            runs[file] = mlperf_logs.load(epath.Path(file))
        except mlperf_logs.LogError as error:
            faults.append(f"{name(file)}: {error}")
    ruleset, old = package.ruleset, [file for file, run in runs.items() if run.is_v05]
    missed = [file for file, run in runs.items() if not run.success]
    if len(missed) > 1:
        faults += [f"{name(file)}: {_MISSED}" for file in missed]
    elif missed:
        package.tolerated = missed[0]
        notes.append(f"{name(missed[0])}: {_MISSED}, which one run may")
    if not package.files:
        place = f"results/{package.system}/{package.benchmark}"
        faults.append(f"{place} has no result_*.txt: no run has ended")
    elif old and len(old) < len(runs):
        faults.append(f"some results are of v0.5 and some are not: {', '.join(map(name, old))}")
    elif old:
        ruleset, notes = "v0.5", [*notes, _V05]
        faults += _check_v05(runs, _FACTS[package.benchmark])
    else:
        for file, run in runs.items():
            faults += [f"{name(file)}: {t}" for t in _content(run, _FACTS[package.benchmark])]
        faults = package.ask(list(runs), faults)
    epochs = mlperf_logs.olympic([run.epochs for run in runs.values()])
    minutes = mlperf_logs.olympic([r.minutes if r.success else None for r in runs.values()])
    about = package.system, package.benchmark, ruleset, len(package.files)
    return Verdict(*about, epochs, minutes, package.scale, faults, notes)


def _content(run: mlperf_logs.Run, facts: _Facts) -> Iterator[str]:
    """What no official checker looks at."""
    for key, wanted in (("train_samples", facts.train), ("eval_samples", facts.evaluation)):
        if run.values.get(key) != wanted:
            yield f"{key} is {run.values.get(key)}, not {wanted:,}"
    yield from _spacing(run, facts.period)
    if run.values.get("cache_clear") is not True:
        yield "cache_clear is not true: the hosts' file caches were not dropped before the run"


def _spacing(run: mlperf_logs.Run, period: int) -> Iterator[str]:
    epochs = [epoch for epoch, _ in run.evals]
    if epochs and not (
        0 < epochs[0] <= period
        and all(b - a == period for a, b in zip(epochs, epochs[1:], strict=False))
    ):
        shown = ", ".join(f"{epoch:g}" for epoch in epochs)
        yield f"evaluations are to be {period} epochs apart, from {period} or before: {shown}"


def _check_v05(runs: dict[str, mlperf_logs.Run], facts: _Facts) -> Iterator[str]:
    """What can be checked of v0.5."""
    for file, run in runs.items():
        yield from (f"{name(file)}: {text}" for text in _content_v05(run, facts))
    seeds = [run.values.get("seed") for run in runs.values()]
    if len(set(seeds)) < len(seeds) or None in seeds:
        yield f"every run is to have a seed of its own: {', '.join(map(str, seeds))}"
    if len(runs) != facts.runs:
        yield f"number of runs: found {len(runs)}, expected {facts.runs}"


def _content_v05(run: mlperf_logs.Run, facts: _Facts) -> Iterator[str]:
    for key, wanted in (
        ("preproc_num_train_examples", facts.train),
        ("preproc_num_eval_examples", facts.evaluation),
        ("eval_size", facts.evaluation),
    ):
        if run.values.get(key) != wanted:
            yield f"{key} is {run.values.get(key)}, not {wanted:,}"
    yield from _spacing(run, facts.period)
    if run.success and not (run.evals and run.evals[-1][1] >= facts.target):
        yield f"success is claimed, but the last accuracy is below {facts.target:g}"
    if "run_clear_caches" not in run.values:
        yield "no run_clear_caches: the hosts' file caches were not dropped before the run"


def check(folder: str, ruleset: str) -> list[Verdict]:
    """Checks every system and benchmark in `folder`, local or gs://.

    Raises:
      CheckError: there are no results in it.
    """
    source, verdicts = epath.Path(folder), []
    if not (source / "results").is_dir():
        raise CheckError(f"{folder} has no folder results/: give $MLP_GCS_MODEL_DIR of the runs")
    for system in sorted(path for path in (source / "results").iterdir() if path.is_dir()):
        for benchmark in sorted(p.name for p in system.iterdir() if p.name in _FACTS):
            # The checkers know local files only, and leave some of their own.
            with tempfile.TemporaryDirectory() as place:
                root = epath.Path(place)
                _copy(source, root, system.name, benchmark)
                verdicts.append(judge(Package(root, system.name, benchmark, ruleset)))
    if not verdicts:
        raise CheckError(f"{folder}/results has no folder SYSTEM/{'|'.join(_FACTS)}")
    return verdicts


def _copy(source: Any, root: Any, system: str, benchmark: str) -> None:
    """Copies what belongs to one system and one benchmark."""
    inside = f"results/{system}/{benchmark}"
    for path in sorted((source / inside).glob("result_*.txt")):
        (root / inside).mkdir(parents=True, exist_ok=True)
        (root / inside / path.name).write_bytes(path.read_bytes())
    description = source / "systems" / f"{system}.json"
    (root / "systems").mkdir()
    if description.exists():
        (root / "systems" / description.name).write_bytes(description.read_bytes())


def main(argv: list[str] | None = None) -> int:
    """Prints the verdict; returns the exit code: 1 if anything is wrong."""
    parser = console.Parser(
        prog="mlperf_check",
        allow_abbrev=False,
        description="Runs MLPerf's checkers over results, and gives one verdict; docs/mlperf.md.",
    )
    place = "$MLP_GCS_MODEL_DIR of run_and_time.sh, local or gs://, or a folder with results/"
    parser.add_argument("folder", metavar="DIR", help=place)
    parser.add_argument(
        "--ruleset",
        choices=RULESETS,
        default=RULESETS[-1],
        help="of MLPerf Training, for logs that are not v0.5's; default: %(default)s",
    )
    given = parser.parse_args(argv)
    if not mlperf_official.available():
        print("ERROR: the checkers are not here: pip install mlperf-logging", file=sys.stderr)
        return 1
    try:
        verdicts = check(given.folder, given.ruleset)
    except CheckError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # each file system has errors of its own
        print(f"ERROR: {given.folder}: {one_line(error)}", file=sys.stderr)
        return 1
    print("\n".join(map(str, verdicts)))
    return int(any(verdict.faults for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
