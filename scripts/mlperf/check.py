"""Asks MLPerf's checkers about results of run_and_time.sh and prints a verdict for each set.

    python -m scripts.mlperf.check DIR [--ruleset=4.0.0]
    python -m scripts.mlperf.check LOG ... [--curves=FILE.svg]

DIR is $MLP_GCS_MODEL_DIR of run_and_time.sh, or any folder with results/ and systems/. The exit
code is 0 if mlperf-logging's checkers accept the logs, and the package that DIR is. Of logs of v0.5
and v0.6, times and results are read; --ruleset=0.6.0 asks the checkers about v0.6. --curves draws
the scores by epoch.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from benchmarks import mlperf
from common import console, entry
from common.errors import UserError, one_line, parse_json
from scripts.mlperf import curves, logs, official
from scripts.mlperf.official import RULESETS, V06
from scripts.mlperf.request import REQUEST_FILE

_NO_LOG = f"no line begins with {', '.join(logs.FORMS.values())}"


@dataclasses.dataclass
class Result:
    """The runs of one system for one benchmark, and what the checkers say about them.

    Attributes:
      system: its folder in results/.
      benchmark: MLPerf's name, which is the folder of the logs.
      paths: the logs.
      description: of the system, in systems/; None if these are only logs.
      runs: what the logs say, by file name; those that cannot be read are absent.
      ruleset: the rules of the check, or the form of logs that are only read.
      scale: multiplies the minutes if the runs needed fewer epochs than the reference.
      faults: the reasons of a FAIL, a line each.
      notes: further lines for the user.
    """

    system: str
    benchmark: str
    paths: Sequence[Any]
    description: Any = None
    runs: dict[str, logs.Run] = dataclasses.field(default_factory=dict)
    ruleset: str = "-"
    scale: float = 1.0
    faults: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def epochs(self) -> float | None:
        """To the target, the mean without the best and the worst run; None if there is no mean."""
        return logs.olympic([run.epochs for run in self.runs.values()])

    @property
    def minutes(self) -> float | None:
        """To the target, as `epochs`."""
        return logs.olympic([r.minutes if r.success else None for r in self.runs.values()])

    def __str__(self) -> str:
        name, lines = f"{self.benchmark} on {self.system}", self.notes
        if self.paths and not self.runs:
            return f"{name} is not judged: {'; '.join(self.faults)}"
        if self.epochs is None or self.minutes is None:
            mean = "no olympic mean"
            lines = [f"{file}: {run}" for file, run in self.runs.items()] + lines
        else:
            mean = f"olympic mean {self.epochs:.2f} epochs, {self.minutes:.2f} minutes"
            if self.scale != 1:
                mean += f", scaled by {self.scale:.4f} {self.minutes * self.scale:.2f} minutes"
        is_read = self.ruleset in logs.FORMS
        word = "FAIL" if self.faults else "READ" if is_read else "PASS"
        rules = f"logs of {self.ruleset}" if is_read else f"rules {self.ruleset}"
        head = f"{word} {name}, {rules}: {len(self.paths)} runs, {mean}"
        return "\n".join([head, *(f"  {line}" for line in self.faults + lines)])


def judge(result: Result, ruleset: str) -> None:
    """Reads the logs and asks the checkers about them.

    Args:
      result: gets what they say.
      ruleset: of `RULESETS`; "" for the newest ruleset that knows the benchmark.
    """
    runs, faults = result.runs, result.faults
    for path in result.paths:
        try:
            run = logs.load(path)
            if run.form:
                runs[path.name] = run
            else:
                faults.append(f"{path.name}: {_NO_LOG}")
        except UserError as error:
            faults.append(f"{path.name}: {error}")
    if not result.paths:
        faults.append("no run has ended: there is no result_*.txt")
    entries = {entry.name: entry for entry in mlperf.entries().values()}
    names = [run.values.get("submission_benchmark") for run in runs.values()]
    known = next((entries[name] for name in [*names, result.benchmark] if name in entries), None)
    if known and not result.description:  # single logs may be in any folder
        result.benchmark = known.name
    may_miss = 0 if len(result.paths) == 1 else known.may_miss if known else 1
    missed = [file for file, run in runs.items() if not run.success]
    if len(missed) > may_miss:
        faults += [f"{file}: the target was not reached" for file in missed]
        missed = []
    allowed = "one run may" if may_miss == 1 else f"{may_miss} runs may"
    result.notes += [f"{file}: the target was not reached, which {allowed}" for file in missed]
    forms = {run.form for run in runs.values()}
    if len(forms) > 1:
        faults.append(f"the logs are of several forms: {', '.join(sorted(forms))}")
    elif forms == {"mllog"} or (forms == {"v0.6"} and ruleset == V06):
        newest = known.ruleset if known and known.ruleset else RULESETS[-1]
        result.ruleset = ruleset or newest
        _ask(result, missed)
    elif forms:
        (result.ruleset,) = forms
        if ruleset:
            result.notes.append(f"--ruleset={ruleset} is for logs of another form")


def _ask(result: Result, tolerated: Sequence[str]) -> None:
    """Adds what mlperf-logging says: about each log, and about the package if it is one.

    Rules of v0.6 have no package. `tolerated` are the files that may miss the target.
    """
    ruleset, faults, description = result.ruleset, result.faults, result.description
    # The checkers read local files only, and they write files.
    with tempfile.TemporaryDirectory() as copy:
        root = epath.Path(copy)
        folder = root / "results" / result.system / result.benchmark
        folder.mkdir(parents=True)
        for path in result.paths:
            (folder / path.name).write_bytes(path.read_bytes())
        for file in result.runs:
            missed = "Failed checks for eval_accuracy" if file in tolerated else "-"
            texts = official.check_log(folder / file, ruleset)
            faults += [f"{file}: {text}" for text in texts if not text.startswith(missed)]
        if not description or ruleset == V06 or len(result.runs) < len(result.paths):
            return
        name = f"systems/{description.name}"
        if not description.exists():
            faults.append(f"{name} does not exist: run_and_time.sh writes it beside the results")
            return
        (root / "systems").mkdir()
        (root / name).write_bytes(description.read_bytes())
        try:
            parse_json((root / name).read_text())
        except ValueError as error:
            faults.append(f"{name} is not JSON: {one_line(error)}")
            return
        more, result.scale = official.check_package(root, folder, ruleset)
        faults += more


def check(paths: Sequence[str], ruleset: str = "") -> list[Result]:
    """Checks every system and benchmark in a folder, or single logs; local or gs://.

    Args:
      paths: folders of results/ and systems/, or with such a folder for each benchmark; or logs,
        of which those in one folder are the runs of one result.
      ruleset: of `RULESETS`; "" for the newest ruleset that knows the benchmark.

    Raises:
      UserError: a folder has no results.
    """
    found, single = list[Result](), dict[Any, list[Any]]()
    for path in map(epath.Path, paths):
        if not path.is_dir():
            single.setdefault(path.parent, []).append(path)
        elif inside := [*_find(path)]:
            found += inside
        else:
            raise UserError(
                f"{path} has no results/SYSTEM/BENCHMARK: give $MLP_GCS_MODEL_DIR of the runs, or "
                "the logs themselves"
            )
    for folder, files in single.items():
        system, benchmark = os.path.abspath(folder).split("/")[-2:]
        found.append(Result(system, benchmark, files))
    for result in found:
        judge(result, ruleset)
    return found


def _find(root: Any) -> Iterator[Result]:
    """Yields the results in a folder; "no system" has those of a benchmark that has none yet."""
    names = [entry.name for entry in mlperf.entries().values()]
    requested = sorted(path for path in root.iterdir() if (path / REQUEST_FILE).exists())
    for source in [root, *requested]:
        if not (source / "results").is_dir():
            if source != root:
                yield Result("no system", source.name, [])
            continue
        for system in sorted(path for path in (source / "results").iterdir() if path.is_dir()):
            for folder in sorted(path for path in system.iterdir() if path.name in names):
                paths = [p for p in folder.iterdir() if re.fullmatch(r"result_.*\.txt", p.name)]
                description = source / "systems" / f"{system.name}.json"
                yield Result(system.name, folder.name, sorted(paths), description)


def _draw(results: Sequence[Result], path: str) -> list[str]:
    """Draws the runs that have evaluations; returns the lines of their table."""
    sets = list[curves.Runs]()
    for result in results:
        entries = mlperf.entries().values()  # maskrcnn is "mask" in v0.6
        entry = next((e for e in entries if e.name.startswith(result.benchmark)), None)
        runs = [run for run in result.runs.values() if run.evals]
        if entry and runs:
            system = runs[0].values.get("submission_platform", result.system)
            form = "" if runs[0].form == "mllog" else f"{runs[0].form} "
            sets.append(curves.Runs(entry, form + system, runs))
    if not sets:
        raise UserError(f"--curves={path}: no log of the six benchmarks has an evaluation")
    curves.draw(sets, path)
    return curves.table(sets)


def main(argv: list[str] | None = None) -> int:
    """Prints the verdicts; returns the exit code: 1 if a result has a fault."""
    parser = console.Parser(
        prog="python -m scripts.mlperf.check",
        allow_abbrev=False,
        description="Runs MLPerf's checkers over results and prints a verdict; see docs/mlperf.md.",
    )
    what = "$MLP_GCS_MODEL_DIR of run_and_time.sh, local or gs://, a folder with results/, or logs"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    ruleset = "of MLPerf Training, not for v0.5; default: the newest that knows the benchmark"
    parser.add_argument("--ruleset", choices=RULESETS, default="", help=ruleset)
    picture = "a .svg or .png to draw with the scores by epoch; a table of them is printed"
    parser.add_argument("--curves", metavar="FILE", default="", help=picture)
    arguments = parser.parse_args(argv)
    try:
        if arguments.curves and not arguments.curves.endswith((".svg", ".png")):
            raise UserError(f"--curves={arguments.curves}: give a name that ends in .svg or .png")
        results = check(arguments.paths, arguments.ruleset)
        table = _draw(results, arguments.curves) if arguments.curves else []
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"ERROR: {error}: pip install mlperf-logging", file=sys.stderr)
        return 1
    except Exception as error:  # each file system has errors of its own
        print(f"ERROR: {' '.join(arguments.paths)}: {one_line(error)}", file=sys.stderr)
        return 1
    print("\n".join([*map(str, results), *table]))
    return int(any(result.faults for result in results))


if __name__ == "__main__":
    entry.run(main)
