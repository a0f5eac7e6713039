"""Runs the checkers of mlperf-logging, MLPerf's own, over results; for scripts.mlperf.check."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from common.errors import one_line, parse_json

RULESETS = ("0.7.0", "1.0.0", "1.1.0", "2.0.0", "2.1.0", "3.0.0", "3.1.0", "4.0.0")
_WITH_RCP = RULESETS[1:]
_RECORD = re.compile(r"'(BS|RCP Mean|Min Epochs)': (?:np\.float64\()?([\d.]+)")


def available() -> bool:
    """Whether the checkers are installed."""
    return importlib.util.find_spec("mlperf_logging") is not None


@dataclasses.dataclass
class Package:
    """A local copy of the results of one system for one benchmark; the checkers may write to it.

    Attributes:
      root: the copy, with results/ and systems/.
      system: its folder in results/.
      benchmark: MLPerf's name.
      ruleset: of `RULESETS`.
      files: the logs, sorted.
      tolerated: the log that may miss the target, or "".
      scale: multiplies the minutes if the runs needed fewer epochs than the reference.
    """

    root: Any
    system: str
    benchmark: str
    ruleset: str

    def __post_init__(self) -> None:
        self.folder = self.root / "results" / self.system / self.benchmark
        self.files = sorted(map(str, self.folder.glob("result_*.txt")))
        self.description = self.root / "systems" / f"{self.system}.json"
        self.tolerated, self.scale = "", 1.0

    def ask(self, readable: list[str], faults: list[str]) -> list[str]:
        """Runs every checker.

        Args:
          readable: the files that can be read. If some cannot, only the log checker runs, on each
            of these.
          faults: the faults that are known already.

        Returns:
          All faults. A checker that only repeats the others' faults adds none.
        """
        faults = [*faults, *self._guarded(lambda: self._compliance(readable), "log")]
        if readable == self.files:
            faults += self._guarded(self._seeds, "seed") + self._guarded(self._rcp, "RCP")
            described = list(self._described())
            faults += described or self._guarded(self._system, "system")
            if not described:
                faults += self._guarded(lambda: self._package(bool(faults)), "package")
                faults += [] if faults else self._guarded(self._summary, "summary")
        return faults

    def _guarded(self, check: Callable[[], Iterator[str]], name: str) -> list[str]:
        """The faults that a checker reports; a checker that crashes is a fault, too."""
        try:
            return [self._short(text) for text in check()]
        except Exception as error:  # a faulty log makes the checkers raise anything
            text = f"{type(error).__name__}: {one_line(error)}"
            return [self._short(f"the {name} checker failed: {text}")]

    def _short(self, text: str) -> str:
        """The start of a checker's message, in one line and without the path of the copy."""
        text = text.split("current context")[0].replace(f"{self.folder}/", "")
        return " ".join(text.replace(f"{self.root}/", "").split())[:300]

    def _compliance(self, files: list[str]) -> Iterator[str]:
        from mlperf_logging.compliance_checker import mlp_compliance

        for file in files:
            with _captured():
                checker = mlp_compliance.make_checker("training", self.ruleset, False, False)
                valid = checker.check_file(file, f"training_{self.ruleset}/common.yaml")
            if not valid:
                faults = [*checker.overwritable.values(), *checker.not_overwritable]
                missed = "Failed checks for eval_accuracy" if file == self.tolerated else "-"
                faults = [text for text in faults if not text.startswith(missed)]
                yield from (f"{file_name(file)}: {text}" for text in faults)

    def _seeds(self) -> Iterator[str]:
        from mlperf_logging.package_checker.seed_checker import SeedChecker

        with _captured() as lines:
            valid = SeedChecker(self.ruleset).check_seeds(self.files)
        if not valid:
            yield from lines

    def _rcp(self) -> Iterator[str]:
        """Yields a fault if the runs converge faster than the reference implementation."""
        from mlperf_logging.rcp_checker import rcp_checker

        if self.ruleset not in _WITH_RCP or len(self.files) < 3:  # "number of runs" reports it
            return
        with _captured(logging.INFO) as lines:
            try:
                valid, text, scale = rcp_checker.check_directory(
                    *(str(self.folder), "training", self.ruleset, False, False),
                    rcp_pass="pruned_rcps",
                )
            except KeyError as error:  # the checker raises this if the logs differ
                valid, text, scale = False, repr(error), 1
        if valid:
            self.scale = float(scale)
        elif text != "Insufficient convergence":  # the log checker reports every such run
            yield f"reference convergence points: {_reason(text, lines)}"

    def _described(self) -> Iterator[str]:
        """Yields the faults that prevent the other checkers from reading the description."""
        path = f"systems/{self.description.name}"
        if not self.description.exists():
            yield f"{path} does not exist: run_and_time.sh writes it beside the results"
            return
        try:
            description = parse_json(self.description.read_text())
        except ValueError as error:
            yield f"{path} is not JSON: {one_line(error)}"
            return
        if not isinstance(description, dict) or "division" not in description:
            yield f"{path}: Missing field division"

    def _system(self) -> Iterator[str]:
        from mlperf_logging.system_desc_checker import system_desc_checker

        with _captured() as lines:
            valid, *_ = system_desc_checker.check_system_desc(
                str(self.description), "training", self.ruleset
            )
        if not valid:
            yield from (f"{self.description.name}: {text}" for text in lines)

    def _package(self, faulty: bool) -> Iterator[str]:
        """`faulty`: other checkers have reported faults; a general message would repeat them."""
        from mlperf_logging.package_checker import package_checker

        with _captured(logging.INFO) as lines:
            package_checker.check_training_package(
                *(str(self.root), "training", self.ruleset, False, False, False, False, False),
                log_output="",
            )
        if any("FOUND NO ERRORS" in text for text in lines):
            return
        counted = [m[0] for text in lines if (m := re.search(r"found \d+, expected \d+", text))]
        yield from (f"number of runs: {text}" for text in counted)
        if not counted and not faulty:
            yield "package: found errors"

    def _summary(self) -> Iterator[str]:
        from mlperf_logging.result_summarizer import result_summarizer

        with _captured() as lines:
            strong, *_ = result_summarizer.summarize_results(
                str(self.root), "training", self.ruleset
            )
        if strong.empty or strong[self.benchmark].isna().any():
            yield "summary: " + (" ".join(lines) or "no score")


def _reason(text: str, lines: list[str]) -> str:
    """Why the RCP checker refuses the runs; `text` is its answer, `lines` are its log."""
    log = "\n".join(lines)
    record = dict(_RECORD.findall(log))
    mean = re.search(r"Submission mean epochs: ([\d.]+)", log)
    if mean and len(record) == 3:
        method = " (between two points)" if text == "RCP Interpolation" else ""
        return (
            f"mean {float(mean[1]):.2f} epochs is less than the {float(record['Min Epochs']):.2f} "
            f"that batch {record['BS']}{method} may have"
        )
    if batch := re.search(r"Missing RCP.*BS = (\d+)", text):
        return f"no reference has a batch as large as {batch[1]}"
    differ = [line.strip() for line in lines if "do not match" in line]
    return (differ or [text])[0]


@contextlib.contextmanager
def _captured(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collects the log and the output of the checkers, without printing them."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    root, printed = logging.getLogger(), io.StringIO()
    old_level, old_handlers = root.level, root.handlers[:]
    root.handlers[:] = [Collector(level)]
    root.setLevel(level)
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield lines
    finally:
        root.handlers[:] = old_handlers
        root.setLevel(old_level)
        lines += printed.getvalue().splitlines() if level == logging.WARNING else []


def file_name(path: str) -> str:
    """The last part of a path."""
    return path.rsplit("/", 1)[-1]
