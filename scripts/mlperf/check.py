"""Runs MLPerf's checkers over the results of run_and_time.sh and prints a verdict for each set.

    python -m scripts.mlperf.check DIR [--ruleset=4.0.0]

DIR is $MLP_GCS_MODEL_DIR of run_and_time.sh, or any folder with results/ and systems/. The exit
code is 0 if every checker of mlperf-logging accepts the results (logs, seeds, reference
convergence points, system, package, summary) and this module's own checks pass: the number of
examples, the order of the log, the same settings in all runs, an end at the first evaluation that
reaches the target, the epochs of the evaluations, the dropped caches. mlperf-logging does not know
v0.5; this module compares logs of v0.5 with the benchmark's own facts.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from benchmarks import mlperf
from benchmarks.mlperf import Entry
from common import console, entry
from common.data import files
from common.errors import UserError, one_line
from scripts.mlperf import logs, official
from scripts.mlperf.official import RULESETS, Package, file_name
from scripts.mlperf.request import REQUEST_FILE

_V05 = (
    "v0.5 has no official checker; numbers of examples and runs, evaluations, target{} and caches "
    "were checked"
)
_MISSED = "the target was not reached"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result for one system and one benchmark; it is PASS if there are no faults.

    Attributes:
      system: its folder in results/.
      benchmark: MLPerf's name.
      ruleset: the rules of the check.
      runs: the number of runs.
      epochs: to the target, the mean without the best and the worst run; None if there is no mean.
      minutes: to the target, as `epochs`.
      scale: multiplies the minutes if the runs needed fewer epochs than the reference.
      faults: the reasons of a FAIL, a line each.
      notes: further lines for the user.
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


def judge(package: Package, entry: Entry) -> Verdict:
    """Checks the results of one system for one benchmark."""
    runs, faults, notes = {}, [], []
    for file in package.files:
        try:
            runs[file] = logs.load(epath.Path(file))
        except UserError as error:
            faults.append(f"{file_name(file)}: {error}")
    ruleset, old = package.ruleset, [file for file, run in runs.items() if run.is_v05]
    missed = [file for file, run in runs.items() if not run.success]
    if len(missed) > entry.may_miss:
        faults += [f"{file_name(file)}: {_MISSED}" for file in missed]
    elif missed:
        package.tolerated = missed[0]
        allowed = "one run may" if entry.may_miss == 1 else f"{entry.may_miss} runs may"
        notes += [f"{file_name(file)}: {_MISSED}, which {allowed}" for file in missed]
    if not package.files:
        folder = f"results/{package.system}/{package.benchmark}"
        faults.append(f"{folder} has no result_*.txt: no run has ended")
    elif old and len(old) < len(runs):
        names = ", ".join(map(file_name, old))
        faults.append(f"some results have logs of v0.5 and some do not: {names}")
    elif old:
        seeds = ", seeds" if entry.logs_seed else ""
        ruleset, notes = "v0.5", [*notes, _V05.format(seeds)]
        faults += _check_v05(runs, entry)
    elif "mllog" not in entry.targets:
        faults.append(
            f"MLPerf has only logs of v0.5 for {entry.name}, and these logs have another format"
        )
    else:
        for file, run in runs.items():
            faults += [f"{file_name(file)}: {text}" for text in _check_run(run, entry)]
        faults = package.ask(list(runs), faults)
    if runs and len(old) in (0, len(runs)):
        faults += _check_settings(runs, faults)
    epochs = logs.olympic([run.epochs for run in runs.values()])
    minutes = logs.olympic([r.minutes if r.success else None for r in runs.values()])
    about = package.system, package.benchmark, ruleset, len(package.files)
    return Verdict(*about, epochs, minutes, package.scale, faults, notes)


def _check_run(run: logs.Run, entry: Entry) -> Iterator[str]:
    """Yields the faults of one run that the official checkers do not check."""
    for key, expected in entry.counts["v0.5" if run.is_v05 else "mllog"].items():
        if run.values.get(key) != expected:
            yield f"{key} is {run.values.get(key)}, not {expected:,}"
    yield from logs.disorder(run)
    yield from _check_success(run, entry)
    yield from _check_spacing(run, entry.period)
    yield from _check_epochs(run, entry.evaluations.get("v0.5" if run.is_v05 else "mllog", ()))
    if run.is_v05 and "run_clear_caches" not in run.values:
        yield "no run_clear_caches: the hosts' file caches were not dropped before the run"
    if not run.is_v05 and run.values.get("cache_clear") is not True:
        yield "cache_clear is not true: the hosts' file caches were not dropped before the run"


def _check_success(run: logs.Run, entry: Entry) -> Iterator[str]:
    """Yields a fault unless success is the first evaluation that reaches the target."""
    form = "v0.5" if run.is_v05 else "mllog"
    target = entry.evaluation(entry.targets[form], form)
    reached = [logs.reaches(score, target) for _, score in run.evals]
    if run.success and not any(reached[-1:]):
        yield f"success is claimed, but the last score is below {target}"
    if any(reached[:-1]):
        epoch = run.evals[reached.index(True)][0]
        yield f"the target was reached at epoch {epoch:g}, and the run had to stop there"


def _check_settings(runs: dict[str, logs.Run], faults: list[str]) -> Iterator[str]:
    """Yields a fault for each setting that differs from the first run's, unless one names it."""
    name, first = next(iter(runs.items()))
    for file, run in runs.items():
        for key in sorted((first.values.keys() | run.values.keys()) - logs.VARYING):
            value, expected = run.values.get(key), first.values.get(key)
            if value != expected and not any(key in fault for fault in faults):
                yield (
                    f"{file_name(file)}: {key} is {value}, but {expected} in {file_name(name)}: "
                    "all runs of a result have the same settings"
                )


def _check_spacing(run: logs.Run, period: float) -> Iterator[str]:
    """Yields a fault unless the evaluations are `period` epochs apart."""
    epochs = [epoch for epoch, _ in run.evals]
    if not epochs or not period:
        return
    regular = all(b - a == period for a, b in zip(epochs, epochs[1:], strict=False))
    if not (0 < epochs[0] <= period and regular):
        shown = ", ".join(f"{epoch:g}" for epoch in epochs)
        apart = "1 epoch" if period == 1 else f"{period:g} epochs"
        yield f"evaluations must be {apart} apart, from {period:g} or before: {shown}"


def _check_epochs(run: logs.Run, expected: Sequence[float]) -> Iterator[str]:
    """Yields a fault unless the evaluations are the first of the `expected` epochs; () are any."""
    epochs = [epoch for epoch, _ in run.evals]
    if expected and epochs != list(expected[: len(epochs)]):
        shown, rule = (", ".join(f"{e:g}" for e in row) for row in (epochs, expected))
        yield f"evaluations must be at the epochs {rule}: {shown}"


def _check_v05(runs: dict[str, logs.Run], entry: Entry) -> Iterator[str]:
    """Yields the faults of runs in the format of v0.5."""
    for file, run in runs.items():
        yield from (f"{file_name(file)}: {text}" for text in _check_run(run, entry))
    seeds = [run.values.get("seed") for run in runs.values()]
    if entry.logs_seed and (len(set(seeds)) < len(seeds) or None in seeds):
        yield f"every run must have its own seed: {', '.join(map(str, seeds))}"
    if len(runs) != entry.runs:
        yield f"number of runs: found {len(runs)}, expected {entry.runs}"


def check(folder: str, ruleset: str) -> list[Verdict]:
    """Checks every system and benchmark in `folder`, local or gs://.

    Args:
      folder: the folder of results/ and systems/, or one with such a folder for each benchmark.
      ruleset: of `RULESETS`; "" for the newest ruleset that knows the benchmark.

    Raises:
      UserError: the folder has no results.
    """
    root, verdicts = epath.Path(folder), []
    entries = {entry.name: entry for entry in mlperf.entries().values()}
    sources = [root] if (root / "results").is_dir() else []
    # A folder's name is no pattern.
    requests = files.matching_paths(f"{root}/*/{REQUEST_FILE}", str(root))
    sources += sorted(epath.Path(path).parent for path in requests)
    if not sources:
        raise UserError(f"{folder} has no folder results/: give $MLP_GCS_MODEL_DIR of the runs")
    for source in sources:
        verdicts += _check_one(source, entries, ruleset)
    if not verdicts:
        known = "|".join(entries)
        raise UserError(f"{folder}/results has no folder SYSTEM/BENCHMARK, BENCHMARK being {known}")
    return verdicts


def _check_one(source: Any, entries: Mapping[str, Entry], ruleset: str) -> Iterator[Verdict]:
    """Yields the verdicts for a folder with results/ and systems/."""
    if not (source / "results").is_dir():
        name = source.name
        yield Verdict("no system", name, "-", 0, None, None, 1.0, ["no run has ended"], [])
        return
    for system in sorted(path for path in (source / "results").iterdir() if path.is_dir()):
        for benchmark in sorted(path.name for path in system.iterdir() if path.name in entries):
            entry = entries[benchmark]
            # The checkers read local files only, and they write files.
            with tempfile.TemporaryDirectory() as copy:
                _copy(source, epath.Path(copy), system.name, benchmark)
                rules = ruleset or entry.ruleset or RULESETS[-1]
                package = Package(epath.Path(copy), system.name, benchmark, rules)
                yield judge(package, entry)


def _copy(source: Any, root: Any, system: str, benchmark: str) -> None:
    """Copies the results and the description of one system."""
    inside = f"results/{system}/{benchmark}"
    results = files.matching_paths(f"{source / inside}/result_*.txt", str(source))
    for path in map(epath.Path, results):
        (root / inside).mkdir(parents=True, exist_ok=True)
        (root / inside / path.name).write_bytes(path.read_bytes())
    description = source / "systems" / f"{system}.json"
    (root / "systems").mkdir()
    if description.exists():
        (root / "systems" / description.name).write_bytes(description.read_bytes())


def main(argv: list[str] | None = None) -> int:
    """Prints the verdicts; returns the exit code: 1 if a result has a fault."""
    parser = console.Parser(
        prog="python -m scripts.mlperf.check",
        allow_abbrev=False,
        description="Runs MLPerf's checkers over results and prints a verdict; see docs/mlperf.md.",
    )
    folder = "$MLP_GCS_MODEL_DIR of run_and_time.sh, local or gs://, or a folder with results/"
    parser.add_argument("folder", metavar="DIR", help=folder)
    ruleset = "of MLPerf Training, not for v0.5; default: the newest that knows the benchmark"
    parser.add_argument("--ruleset", choices=RULESETS, default="", help=ruleset)
    arguments = parser.parse_args(argv)
    if not official.available():
        print("ERROR: the checkers are missing: pip install mlperf-logging", file=sys.stderr)
        return 1
    try:
        verdicts = check(arguments.folder, arguments.ruleset)
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # each file system has errors of its own
        print(f"ERROR: {arguments.folder}: {one_line(error)}", file=sys.stderr)
        return 1
    print("\n".join(map(str, verdicts)))
    return int(any(verdict.faults for verdict in verdicts))


if __name__ == "__main__":
    entry.run(main)
