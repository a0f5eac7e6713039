"""Asks MLPerf's checkers about results of run_and_time.sh and prints their verdict on each set.

    python -m scripts.mlperf.check DIR [--ruleset=4.0.0]
    python -m scripts.mlperf.check LOG ...

DIR is $MLP_GCS_MODEL_DIR of run_and_time.sh, or any folder with results/ and systems/.
mlperf-logging's package checker judges a DIR, its compliance checker judges LOGs; the exit code is
0 if they accept all of them. They do not know logs of v0.5 and v0.6: of these, times and results
are read.
"""

import contextlib
import io
import itertools
import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

from etils import epath

from benchmarks import mlperf
from common import cli, entry
from common.errors import UserError, one_line, parse_json
from scripts.mlperf import results
from scripts.mlperf.results import REQUEST_FILE, find

RULESETS = ("0.7.0", "1.0.0", "1.1.0", "2.0.0", "2.1.0", "3.0.0", "3.1.0", "4.0.0")


def check(paths: Sequence[str], ruleset: str = "") -> list[tuple[bool, str]]:
    """Judges the sets in folders like $MLP_GCS_MODEL_DIR; logs of one folder are a set, too.

    Returns for each whether nothing is wrong with it, and the lines that say so. `ruleset` is one
    of `RULESETS`; "" for the newest ruleset that knows the benchmark.
    """
    verdicts, single = list[tuple[bool, str]](), list[Any]()
    for path in map(epath.Path, paths):
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder")
        if not path.is_dir():
            single.append(path)
            continue
        inside = [root for root in sorted(path.iterdir()) if (root / REQUEST_FILE).exists()]
        if not inside and not find(path):
            raise UserError(
                f"{path} has no results/SYSTEM/BENCHMARK/result_*.txt: give $MLP_GCS_MODEL_DIR of "
                "the runs, or the logs themselves"
            )
        for root in [path, *inside]:
            sets = _by_folder(find(root))
            verdicts += [judge(each, ruleset, is_package=True) for each in sets]
            if root in inside and not sets:
                verdicts.append((False, f"FAIL {root.name}: no run has ended"))
    return verdicts + [judge(each, ruleset, is_package=False) for each in _by_folder(single)]


def _by_folder(paths: Sequence[Any]) -> list[list[Any]]:
    return [list(group) for _, group in itertools.groupby(sorted(paths), lambda path: path.parent)]


def judge(paths: Sequence[Any], ruleset: str, is_package: bool) -> tuple[bool, str]:
    """Judges the logs in one folder, which is results/SYSTEM/BENCHMARK of a package."""
    runs, lines = dict[str, results.Run](), list[str]()
    for path in paths:
        try:
            run = results.load(path)
            if not run.form:
                raise UserError("no line is one of MLPerf's log")
            runs[path.name] = run
        except Exception as error:  # a damaged log, or what the file system raises
            lines.append(f"{path.name}: {one_line(error)}")
    system, benchmark = os.path.abspath(paths[0].parent).split("/")[-2:]
    if not is_package:  # the logs may be in any folder
        names = [run.values.get("submission_benchmark") for run in runs.values()]
        benchmark = next(filter(None, names), benchmark)
    forms, passed, scale = {run.form for run in runs.values()}, not lines, 1.0
    word, rules = "READ", f"logs of {', '.join(sorted(forms)) or 'no form'}"
    if "mllog" in forms:
        newest = {entry.name: entry.ruleset for entry in mlperf.entries().values()}
        ruleset = ruleset or newest.get(benchmark) or RULESETS[-1]
        word, rules = "PASS", f"rules {ruleset}"
        if passed:
            passed, scale = _ask(paths, is_package, benchmark, ruleset, lines)
    mean = "no olympic mean"
    minutes, epochs = (results.olympic(runs.values(), key) for key in ("minutes", "epochs"))
    if minutes is None or epochs is None:
        lines += [f"{file}: {run}" for file, run in runs.items()]
    else:
        mean = f"olympic mean {epochs:.2f} epochs, {minutes:.2f} minutes"
        if scale != 1:  # the runs need fewer epochs than the reference
            mean += f", scaled by {scale:.4f} {minutes * scale:.2f} minutes"
    word = word if passed else "FAIL"
    head = f"{word} {benchmark} on {system}, {rules}: {len(paths)} runs, {mean}"
    return passed, "\n  ".join([head, *lines])


def _ask(
    paths: Sequence[Any], is_package: bool, benchmark: str, ruleset: str, lines: list[str]
) -> tuple[bool, float]:
    """mlperf-logging's verdict and its factor for the minutes; its messages go to `lines`."""
    from mlperf_logging import benchmark_meta
    from mlperf_logging.compliance_checker import mlp_compliance
    from mlperf_logging.package_checker import package_checker

    if benchmark not in benchmark_meta.get_allowed_benchmarks("training", ruleset):
        lines.append(f"rules {ruleset} do not have {benchmark}")  # the checker would skip it
        return False, 1.0
    messages, logger, scale = _Messages(), logging.getLogger(), 1.0
    level, handlers, logger.handlers = logger.level, logger.handlers, []
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    # The checkers read local files only, and they write files. They print and warn.
    with (
        tempfile.TemporaryDirectory() as copy,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(action="ignore"),
    ):
        system = paths[0].parent.parent
        folder = f"{copy}/results/{system.name}/{benchmark}"
        files = {f"{folder}/{path.name}": path for path in paths}
        if is_package:
            name = f"systems/{system.name}.json"
            files[f"{copy}/{name}"] = system.parent.parent / name
        try:
            for name, path in files.items():
                epath.Path(name).parent.mkdir(parents=True, exist_ok=True)
                path.copy(name)
            if is_package:
                package_checker.check_training_package(
                    copy, "training", ruleset, True, False, False, False, False, log_output=""
                )
                passed = messages.package_passed
            else:
                passed, rules = True, f"training_{ruleset}/common.yaml"
                for name in files:
                    checker = mlp_compliance.make_checker("training", ruleset, True, False)
                    passed &= mlp_compliance.main(name, rules, checker)[0]
            if (scaling := epath.Path(folder) / "scaling.json").exists():
                scale = parse_json(scaling.read_text())["scaling_factor"]
        except Exception as error:  # damaged files make the checkers raise any error
            passed = False
            messages.lines.append(f"not checked: {type(error).__name__}: {one_line(error)}")
        finally:
            logger.handlers = handlers
            logger.setLevel(level)
    lines += [line.replace(f"{copy}/", "") for line in messages.lines]
    return passed, scale


class _Messages(logging.Handler):
    """Collects the warnings and errors of the checkers, a line each."""

    def __init__(self):
        super().__init__()
        self.lines, self._log = list[str](), ""
        self.package_passed = False  # the checker only logs this

    def emit(self, record: logging.LogRecord) -> None:
        text, is_of_log = record.getMessage(), record.module == "mlp_compliance"
        if text.startswith("Running compliance on file: "):
            self._log = f"{os.path.basename(text)}: "
        elif text.startswith("PACKAGE CHECKER FOUND NO ERRORS"):
            self.package_passed = True
        elif record.levelno >= logging.WARNING:
            for part in text.split(f"\n{'-' * 30}\n"):
                line = " ".join(part.split("current context")[0].split())
                self.lines.append((self._log if is_of_log else "") + line)


def main(argv: list[str] | None = None) -> int:
    """Prints the verdicts; returns the exit code: 1 if one is FAIL."""
    parser = cli.Parser(
        prog="python -m scripts.mlperf.check",
        allow_abbrev=False,
        description="Runs MLPerf's checkers over results and prints a verdict; see docs/mlperf.md.",
    )
    what = "$MLP_GCS_MODEL_DIR of run_and_time.sh, local or gs://, a folder with results/, or logs"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    ruleset = "of MLPerf Training; default: the newest that knows the benchmark"
    parser.add_argument("--ruleset", choices=RULESETS, default="", help=ruleset)
    arguments = parser.parse_args(argv)
    verdicts = check(arguments.paths, arguments.ruleset)
    print("\n".join(text for _, text in verdicts))
    return int(not all(passed for passed, _ in verdicts))


if __name__ == "__main__":
    entry.run(main)
