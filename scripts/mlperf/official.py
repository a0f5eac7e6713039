"""What MLPerf's own checkers, those of mlperf-logging, say of results; see mlperf_check.py."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from errors import one_line

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
      files: the logs, sorted.
      tolerated: the one of them that may miss the target, or "".
      scale: what the minutes are multiplied with, since the runs were faster than the reference.
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

    def ask(self, sound: list[str], known: list[str]) -> list[str]:
        """Asks every checker.

        Args:
          sound: the files that can be read; if one cannot, only these are looked at, one by one.
          known: what is wrong already.

        Returns:
          `known`, and what else is wrong; what a checker only sums up is not said again.
        """
        faults = [*known, *self._guarded(lambda: self._compliance(sound), "log")]
        if sound == self.files:
            faults += self._guarded(self._seeds, "seed") + self._guarded(self._rcp, "RCP")
            described = list(self._described())
            faults += described or self._guarded(self._system, "system")
            if not described:
                faults += self._guarded(lambda: self._package(bool(faults)), "package")
                faults += [] if faults else self._guarded(self._summary, "summary")
        return faults

    def _guarded(self, check: Callable[[], Iterator[str]], who: str) -> list[str]:
        """What a checker says; one that fails itself has found something, too."""
        try:
            return [self._short(text) for text in check()]
        except Exception as error:  # the checkers raise whatever a log makes them stumble over
            text = f"{type(error).__name__}: {one_line(error)}"
            return [self._short(f"the {who} checker failed: {text}")]

    def _short(self, text: str) -> str:
        """The start of a checker's message, in one line and without the place of the copy."""
        text = text.split("current context")[0].replace(f"{self.folder}/", "")
        return " ".join(text.replace(f"{self.root}/", "").split())[:300]

    def _compliance(self, files: list[str]) -> Iterator[str]:
        from mlperf_logging.compliance_checker import mlp_compliance

        for file in files:
            with _heard():
                checker = mlp_compliance.make_checker("training", self.ruleset, False, False)
                valid = checker.check_file(file, f"training_{self.ruleset}/common.yaml")
            if not valid:
                said = [*checker.overwritable.values(), *checker.not_overwritable]
                missed = "Failed checks for eval_accuracy" if file == self.tolerated else "-"
                said = [text for text in said if not text.startswith(missed)]
                yield from (f"{name(file)}: {text}" for text in said)

    def _seeds(self) -> Iterator[str]:
        from mlperf_logging.package_checker.seed_checker import SeedChecker

        with _heard() as said:
            valid = SeedChecker(self.ruleset).check_seeds(self.files)
        if not valid:
            yield from said

    def _rcp(self) -> Iterator[str]:
        """Whether the runs converge no faster than the reference implementation does."""
        from mlperf_logging.rcp_checker import rcp_checker

        if self.ruleset not in _WITH_RCP or len(self.files) < 3:  # the number is said elsewhere
            return
        with _heard(logging.INFO) as said:
            try:
                valid, text, scale = rcp_checker.check_directory(
                    *(str(self.folder), "training", self.ruleset, False, False),
                    rcp_pass="pruned_rcps",
                )
            except KeyError as error:  # where logs differ it looks for the points of nothing
                valid, text, scale = False, repr(error), 1
        if valid:
            self.scale = float(scale)
        elif text != "Insufficient convergence":  # which is said of every run
            yield f"reference convergence points: {_reason(text, said)}"

    def _described(self) -> Iterator[str]:
        """What keeps the other checkers from reading the description."""
        path = f"systems/{self.description.name}"
        if not self.description.exists():
            yield f"{path} is not there: run_and_time.sh writes it beside the results"
            return
        try:
            found = json.loads(self.description.read_text())
        except ValueError as error:
            yield f"{path} is not JSON: {one_line(error)}"
            return
        if not isinstance(found, dict) or "division" not in found:
            yield f"{path}: Missing field division"

    def _system(self) -> Iterator[str]:
        from mlperf_logging.system_desc_checker import system_desc_checker

        with _heard() as said:
            valid, *_ = system_desc_checker.check_system_desc(
                str(self.description), "training", self.ruleset
            )
        if not valid:
            yield from (f"{self.description.name}: {text}" for text in said)

    def _package(self, faulty: bool) -> Iterator[str]:
        """`faulty`: something is wrong already, and a general complaint would only repeat it."""
        from mlperf_logging.package_checker import package_checker

        with _heard(logging.INFO) as said:
            package_checker.check_training_package(
                *(str(self.root), "training", self.ruleset, False, False, False, False, False),
                log_output="",
            )
        if any("FOUND NO ERRORS" in text for text in said):
            return
        counted = [m[0] for text in said if (m := re.search(r"found \d+, expected \d+", text))]
        yield from (f"number of runs: {text}" for text in counted)
        if not counted and not faulty:
            yield "package: found errors"

    def _summary(self) -> Iterator[str]:
        from mlperf_logging.result_summarizer import result_summarizer

        with _heard() as said:
            strong, *_ = result_summarizer.summarize_results(
                str(self.root), "training", self.ruleset
            )
        if strong.empty or strong[self.benchmark].isna().any():
            yield "summary: " + (" ".join(said) or "no score")


def _reason(text: str, said: list[str]) -> str:
    """Why the RCP checker does not take the runs, from what it logs; `text` is its answer."""
    log = "\n".join(said)
    record = dict(_RECORD.findall(log))
    mean = re.search(r"Submission mean epochs: ([\d.]+)", log)
    if mean and len(record) == 3:
        how = " (between two points)" if text == "RCP Interpolation" else ""
        return (
            f"mean {float(mean[1]):.2f} epochs is less than the {float(record['Min Epochs']):.2f} "
            f"that batch {record['BS']}{how} may have"
        )
    if batch := re.search(r"Missing RCP.*BS = (\d+)", text):
        return f"batch {batch[1]} is larger than any that there is one for"
    differ = [line.strip() for line in said if "do not match" in line]
    return (differ or [text])[0]


@contextlib.contextmanager
def _heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What the checkers log and print, instead of the terminal."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    root, ear = logging.getLogger(), Ear(level)
    before, handlers = root.level, root.handlers[:]
    root.handlers[:], printed = [ear], io.StringIO()
    root.setLevel(level)
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield said
    finally:
        root.handlers[:] = handlers
        root.setLevel(before)
        said += printed.getvalue().splitlines() if level == logging.WARNING else []


def name(file: str) -> str:
    """The last part of a path."""
    return file.rsplit("/", 1)[-1]
