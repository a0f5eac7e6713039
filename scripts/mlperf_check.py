"""Runs MLPerf's own checkers over the results of run_and_time.sh, and gives one verdict.

    python scripts/mlperf_check.py DIR [--ruleset=4.0.0]

DIR is $MLP_GCS_MODEL_DIR of run_and_time.sh, or any folder with results/ and systems/. Exit code 0
if every checker of mlperf-logging is content (logs, seeds, reference convergence points, system,
package, summary), and what they do not look at is right, too: the number of images, the epochs
of the evaluations, the caches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import console
import mlperf_logs
from etils import epath

RULESETS = ("0.7.0", "1.0.0", "1.1.0", "2.0.0", "2.1.0", "3.0.0", "3.1.0", "4.0.0")
_WITH_RCP = RULESETS[1:]
# benchmark: train and evaluation examples, epochs between evaluations.
_FACTS = {"resnet": (1_281_167, 50_000, 4)}


class CheckError(ValueError):
    """There is nothing to check; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found of one system's results for one benchmark; no faults is a success.

    `note` is of the one run that may miss the target.
    """

    system: str
    benchmark: str
    ruleset: str
    runs: int
    epochs: float | None
    minutes: float | None
    faults: list[str]
    note: str

    def __str__(self) -> str:
        mean = ", no olympic mean"
        if self.epochs is not None and self.minutes is not None:
            mean = f", olympic mean {self.epochs:.2f} epochs, {self.minutes:.2f} minutes"
        word = "FAIL" if self.faults else "PASS"
        head = f"{word} {self.benchmark} on {self.system}, rules {self.ruleset}: {self.runs} runs"
        lines = [*self.faults, *([self.note] if self.note else [])]
        return "\n".join([f"{head}{mean}", *(f"  {line}" for line in lines)])


@dataclasses.dataclass
class Results:
    """A copy of the results of one system for one benchmark, which the checkers may write to."""

    root: Any
    system: str
    benchmark: str
    ruleset: str

    def __post_init__(self) -> None:
        self.folder = self.root / "results" / self.system / self.benchmark
        self.files = sorted(map(str, self.folder.glob("result_*.txt")))
        self.description = self.root / "systems" / f"{self.system}.json"
        self.tolerated = ""  # the one file that may miss the target

    def check(self) -> Verdict:
        """Asks everybody."""
        faults, runs = [], {}
        for file in self.files:
            try:
                runs[file] = mlperf_logs.read(epath.Path(file).read_text())
                faults += [f"{_name(file)}: {t}" for t in _content(runs[file], self.benchmark)]
            except mlperf_logs.LogError as error:
                faults.append(f"{_name(file)}: {error}")
        missed = [file for file, run in runs.items() if not run.success]
        text = ": the target was not reached"
        if len(missed) > 1:
            faults += [f"{_name(file)}{text}" for file in missed]
        elif missed:
            self.tolerated = missed[0]
        for who in (
            *(self._compliance, self._seeds, self._rcp),
            *(self._system, self._package, self._summary),
        ):
            faults += self._guarded(who)
        epochs = mlperf_logs.olympic([run.epochs for run in runs.values()])
        minutes = mlperf_logs.olympic([r.minutes if r.success else None for r in runs.values()])
        note = f"{_name(self.tolerated)}{text}, which one run may" if self.tolerated else ""
        about = self.system, self.benchmark, self.ruleset, len(self.files)
        return Verdict(*about, epochs, minutes, faults, note)

    def _guarded(self, check: Callable[[], Iterator[str]]) -> list[str]:
        """What a checker says; one that fails itself has found something, too."""
        try:
            return list(check())
        except Exception as error:
            who = check.__name__.strip("_")
            return [f"{who} checker failed: {type(error).__name__}: {console.one_line(error)}"]

    def _compliance(self) -> Iterator[str]:
        from mlperf_logging.compliance_checker import mlp_compliance

        for file in self.files:
            with _heard():
                checker = mlp_compliance.make_checker("training", self.ruleset, False, False)
                valid = checker.check_file(file, f"training_{self.ruleset}/common.yaml")
            if not valid:
                said = [*checker.overwritable.values(), *checker.not_overwritable]
                missed = "Failed checks for eval_accuracy" if file == self.tolerated else "-"
                said = [text for text in said if not text.startswith(missed)]
                yield from (f"{_name(file)}: {_short(text)}" for text in said)

    def _seeds(self) -> Iterator[str]:
        from mlperf_logging.package_checker.seed_checker import SeedChecker

        with _heard() as said:
            valid = SeedChecker(self.ruleset).check_seeds(self.files)
        if not valid:
            yield from (_short(text).replace(f"{self.folder}/", "") for text in said)

    def _rcp(self) -> Iterator[str]:
        """Whether the runs converge no faster than the reference implementation does."""
        from mlperf_logging.rcp_checker import rcp_checker

        if self.ruleset in _WITH_RCP:
            with _heard():
                valid, text, _ = rcp_checker.check_directory(
                    *(str(self.folder), "training", self.ruleset, False, False),
                    rcp_pass="pruned_rcps",
                )
            if not valid:
                yield f"reference convergence points: {text}"

    def _system(self) -> Iterator[str]:
        from mlperf_logging.system_desc_checker import system_desc_checker

        with _heard() as said:
            valid, *_ = system_desc_checker.check_system_desc(
                str(self.description), "training", self.ruleset
            )
        if not valid:
            yield from (f"{self.description.name}: {_short(text)}" for text in said)

    def _package(self) -> Iterator[str]:
        from mlperf_logging.package_checker import package_checker

        with _heard(logging.INFO) as said:
            package_checker.check_training_package(
                *(str(self.root), "training", self.ruleset, False, False, False, False, False),
                log_output="",
            )
        if not any("FOUND NO ERRORS" in text for text in said):
            told = [t for t in said if t.startswith(("Incorrect number", " "))]
            counted = [_short(t) for t in told if "number of files" in t or "do not comply" in t]
            yield from (f"package: {text}" for text in counted or ["found errors"])

    def _summary(self) -> Iterator[str]:
        from mlperf_logging.result_summarizer import result_summarizer

        with _heard() as said:
            strong, *_ = result_summarizer.summarize_results(
                str(self.root), "training", self.ruleset
            )
        if strong.empty or strong[self.benchmark].isna().any():
            yield "summary: " + (_short(" ".join(said)) or "no score")


def _content(run: mlperf_logs.Run, benchmark: str) -> Iterator[str]:
    """What no official checker looks at."""
    train, evaluation, period = _FACTS[benchmark]
    if run.is_v05:
        yield "is in the format of v0.5, which no official checker reads"
        return
    for key, wanted in (("train_samples", train), ("eval_samples", evaluation)):
        if run.values.get(key) != wanted:
            yield f"{key} is {run.values.get(key)}, not {wanted:,}"
    epochs = [epoch for epoch, _ in run.evals]
    if epochs and not (
        0 < epochs[0] <= period
        and all(b - a == period for a, b in zip(epochs, epochs[1:], strict=False))
    ):
        shown = ", ".join(f"{epoch:g}" for epoch in epochs)
        yield f"evaluations are to be {period} epochs apart, from {period} or before: {shown}"
    if run.values.get("cache_clear") is not True:
        yield "cache_clear is not true: the hosts' file caches were not dropped before the run"


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


def _name(file: str) -> str:
    return file.rsplit("/", 1)[-1]


def _short(text: str) -> str:
    """The start of a checker's message, in one line."""
    return " ".join(text.split("current context")[0].split())[:300]


def check(folder: str, ruleset: str) -> list[Verdict]:
    """Checks every system and benchmark in `folder`, local or gs://.

    Raises:
      CheckError: there are no results in it.
    """
    source, verdicts = epath.Path(folder), []
    if not (source / "results").exists():
        raise CheckError(f"{folder} has no folder results/: give $MLP_GCS_MODEL_DIR of the runs")
    for system in sorted((source / "results").iterdir()):
        for benchmark in sorted(p.name for p in system.iterdir() if p.name in _FACTS):
            # The checkers know local files only, and leave some of their own.
            with tempfile.TemporaryDirectory() as place:
                root = epath.Path(place)
                _copy(source, root, system.name, benchmark)
                verdicts.append(Results(root, system.name, benchmark, ruleset).check())
    if not verdicts:
        raise CheckError(f"{folder}/results has no folder SYSTEM/{'|'.join(_FACTS)}")
    return verdicts


def _copy(source: Any, root: Any, system: str, benchmark: str) -> None:
    """Copies what belongs to one system and one benchmark."""
    inside = f"results/{system}/{benchmark}"
    for path in sorted((source / inside).glob("result_*.txt")):
        (root / inside).mkdir(parents=True, exist_ok=True)
        (root / inside / path.name).write_text(path.read_text())
    description = source / "systems" / f"{system}.json"
    (root / "systems").mkdir()
    if description.exists():
        (root / "systems" / description.name).write_text(description.read_text())


def main(argv: list[str] | None = None) -> int:
    """Prints the verdict; returns the exit code: 1 if anything is wrong."""
    parser = console.Parser(prog="mlperf_check", allow_abbrev=False)
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--ruleset", choices=RULESETS, default=RULESETS[-1])
    given = parser.parse_args(argv)
    try:
        import mlperf_logging  # noqa: F401
    except ImportError:
        print("ERROR: the checkers are not here: pip install mlperf-logging", file=sys.stderr)
        return 1
    try:
        verdicts = check(given.folder, given.ruleset)
    except (CheckError, OSError) as error:
        print(f"ERROR: {console.one_line(error)}", file=sys.stderr)
        return 1
    print("\n".join(map(str, verdicts)))
    return int(any(verdict.faults for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
