"""Asks MLPerf's checkers about results of run_and_time.sh and prints a verdict for each set.

    python -m scripts.mlperf.check DIR [--ruleset=4.0.0]
    python -m scripts.mlperf.check LOG ... [--curves=FILE.svg]

DIR is $MLP_GCS_MODEL_DIR of run_and_time.sh, or any folder with results/ and systems/. The exit
code is 0 if mlperf-logging's checkers accept the logs, and the package that DIR is. They do not
know logs of v0.5 and v0.6: of these, times and results are read. --curves draws the scores by
epoch.
"""

import contextlib
import dataclasses
import io
import logging.handlers
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from benchmarks import mlperf
from common import console, entry
from common.errors import UserError, one_line, parse_json
from scripts.mlperf import curves, logs
from scripts.mlperf.request import REQUEST_FILE

RULESETS = ("0.7.0", "1.0.0", "1.1.0", "2.0.0", "2.1.0", "3.0.0", "3.1.0", "4.0.0")
# Errors of the package checker that only repeat errors of the other checkers.
_REPEATED = r"\d+ files do not comply|Seed checker failed$|System description file checker failed"


@dataclasses.dataclass
class Result:
    """The runs of one system for one benchmark, and what the checkers say about them."""

    system: str  # the name of its folder in results/
    benchmark: str  # MLPerf's name, which is the folder of the logs
    paths: Sequence[Any]  # the logs
    description: Any = None  # the system's file in systems/; None if there are only logs
    # The readable logs, by file name.
    runs: dict[str, logs.Run] = dataclasses.field(default_factory=dict)
    ruleset: str = ""  # the rules of the check; "" if the logs are only read
    scale: float = 1.0  # multiplies the minutes if the runs need fewer epochs than the reference
    errors: list[str] = dataclasses.field(default_factory=list)  # the reasons of a FAIL

    @property
    def epochs(self) -> float | None:
        """Epochs to the target, the mean without the best and the worst run; None without one."""
        return logs.olympic([run.epochs for run in self.runs.values()])

    @property
    def minutes(self) -> float | None:
        """Minutes to the target, the mean without the best and the worst run; None without one."""
        return logs.olympic([r.minutes if r.success else None for r in self.runs.values()])

    def __str__(self) -> str:
        word = "FAIL" if self.errors else "PASS" if self.ruleset else "READ"
        forms = ", ".join(sorted({run.form for run in self.runs.values()}))
        rules = f"rules {self.ruleset}" if self.ruleset else f"logs of {forms or 'no form'}"
        lines = [*self.errors]
        if self.epochs is None or self.minutes is None:
            mean = "no olympic mean"
            lines += [f"{file}: {run}" for file, run in self.runs.items()]
        else:
            mean = f"olympic mean {self.epochs:.2f} epochs, {self.minutes:.2f} minutes"
            if self.scale != 1:
                mean += f", scaled by {self.scale:.4f} {self.minutes * self.scale:.2f} minutes"
        head = f"{word} {self.benchmark} on {self.system}, {rules}: {len(self.paths)} runs, {mean}"
        return "\n".join([head, *(f"  {line}" for line in lines)])


def check(paths: Sequence[str], ruleset: str = "") -> list[Result]:
    """Checks every system and benchmark in a folder, or single logs; local or gs://.

    Args:
      paths: folders of results/ and systems/, or with such a folder for each benchmark; or logs,
        of which those in one folder are the runs of one result.
      ruleset: of `RULESETS`; "" for the newest ruleset that knows the benchmark.
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
        _judge(result, ruleset)
    return found


def _find(root: Any) -> Iterator[Result]:
    """Yields the results in a folder; a benchmark without results has the system "no system"."""
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


def _judge(result: Result, ruleset: str) -> None:
    """Reads the logs, and runs the checkers on logs of a format that they know."""
    runs, errors = result.runs, result.errors
    for path in result.paths:
        try:
            run = logs.load(path)
        except Exception as error:  # a damaged log, or what the file system raises
            errors.append(f"{path.name}: {one_line(error)}")
            continue
        if run.form:
            runs[path.name] = run
        else:
            errors.append(f"{path.name}: no line is one of MLPerf's log")
    if not result.paths:
        errors.append("no run has ended: there is no result_*.txt")
    entries = {entry.name: entry for entry in mlperf.entries().values()}
    names = [run.values.get("submission_benchmark") for run in runs.values()]
    known = next((entries[name] for name in [*names, result.benchmark] if name in entries), None)
    if known and not result.description:  # single logs may be in any folder
        result.benchmark = known.name
    forms = {run.form for run in runs.values()}
    if len(forms) > 1:
        errors.append(f"the logs are of several forms: {', '.join(sorted(forms))}")
    elif forms == {"mllog"}:
        result.ruleset = ruleset or (known.ruleset if known else "") or RULESETS[-1]
        _ask(result)


def _ask(result: Result) -> None:
    """Adds what mlperf-logging says: about each log, and about the package if it is one."""
    missed = [file for file, run in result.runs.items() if not run.success]
    tolerated = missed if len(missed) == 1 < len(result.paths) else []  # the rules allow one
    # The checkers read local files only, and they write files.
    with tempfile.TemporaryDirectory() as copy:
        root = epath.Path(copy)
        folder = root / "results" / result.system / result.benchmark
        folder.mkdir(parents=True)
        for path in result.paths:
            (folder / path.name).write_bytes(path.read_bytes())
        for file in result.runs:
            texts = _log_errors(folder / file, result.ruleset)
            if file in tolerated:
                texts = [x for x in texts if not x.startswith("Failed checks for eval_accuracy")]
            result.errors += [f"{file}: {text}" for text in texts]
        if not result.description or len(result.runs) < len(result.paths):
            return
        if not result.description.exists():
            name = f"systems/{result.description.name}"
            result.errors.append(f"{name} does not exist: run_and_time.sh writes it")
            return
        (root / "systems").mkdir()
        (root / "systems" / result.description.name).write_bytes(result.description.read_bytes())
        result.errors += _package_errors(root, result.ruleset)
        if (scaling := folder / "scaling.json").exists():
            result.scale = parse_json(scaling.read_text())["scaling_factor"]


def _log_errors(path: Any, ruleset: str) -> list[str]:
    """The errors in one log, a line each."""
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", ruleset, False, False)
    with _collected():
        try:
            checker.check_file(str(path), f"training_{ruleset}/common.yaml")
        except Exception as error:  # a damaged log makes the checker raise any error
            text = f"the log checker failed: {type(error).__name__}: {one_line(error)}"
            checker.not_overwritable.append(text)
    return [_short(text) for text in (*checker.overwritable.values(), *checker.not_overwritable)]


def _package_errors(root: Any, ruleset: str) -> list[str]:
    """The errors in the package: the number of runs, seeds, convergence, the system's description.

    `root` is a local copy with systems/ and results/; the checkers write to it.
    """
    from mlperf_logging.package_checker import package_checker

    with _collected() as records:
        try:
            package_checker.check_training_package(
                str(root), "training", ruleset, True, False, False, False, False, log_output=""
            )
        except Exception as error:  # damaged files make the checkers raise any error
            logging.error("the package checker failed: %s: %s", type(error).__name__, error)
    errors = []
    for record in records:
        text = record.getMessage().strip()
        is_news = record.levelno >= logging.ERROR or "in files do not match" in text
        if is_news and not re.match(_REPEATED, text):
            errors.append(_short(text.replace(f"{root}/", "")))
    return errors


def _short(text: str) -> str:
    """The start of a checker's message, in one line."""
    return " ".join(text.split("current context")[0].split())[:300]


@contextlib.contextmanager
def _collected() -> Iterator[list[logging.LogRecord]]:
    """Collects what the checkers log, and keeps them from printing."""
    handler, root = logging.handlers.BufferingHandler(sys.maxsize), logging.getLogger()
    old_level, old_handlers = root.level, root.handlers[:]
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield handler.buffer
    finally:
        root.handlers[:] = old_handlers
        root.setLevel(old_level)


def main(argv: list[str] | None = None) -> int:
    """Prints the verdicts; returns the exit code: 1 if a result has an error."""
    parser = console.Parser(
        prog="python -m scripts.mlperf.check",
        allow_abbrev=False,
        description="Runs MLPerf's checkers over results and prints a verdict; see docs/mlperf.md.",
    )
    what = "$MLP_GCS_MODEL_DIR of run_and_time.sh, local or gs://, a folder with results/, or logs"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    ruleset = "of MLPerf Training; default: the newest that knows the benchmark"
    parser.add_argument("--ruleset", choices=RULESETS, default="", help=ruleset)
    picture = "a .svg or .png to draw with the scores by epoch; a table of them is printed"
    parser.add_argument("--curves", metavar="FILE", default="", help=picture)
    arguments = parser.parse_args(argv)
    if arguments.curves and not arguments.curves.endswith((".svg", ".png")):
        raise UserError(f"--curves={arguments.curves}: give a name that ends in .svg or .png")
    results = check(arguments.paths, arguments.ruleset)
    print("\n".join(map(str, results)))
    if arguments.curves:
        sets = [(result.system, result.benchmark, [*result.runs.values()]) for result in results]
        print("\n".join(curves.draw(sets, arguments.curves)))
    return int(any(result.errors for result in results))


if __name__ == "__main__":
    entry.run(main)
