"""Asks mlperf-logging's checkers, MLPerf's own, about results; for scripts.mlperf.check."""

from __future__ import annotations

import contextlib
import io
import logging.handlers
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from common.errors import one_line, parse_json

V06 = "0.6.0"  # refuses logs that MLPerf accepted in 2019
RULESETS = (V06, "0.7.0", "1.0.0", "1.1.0", "2.0.0", "2.1.0", "3.0.0", "3.1.0", "4.0.0")
# Errors of the package checker that only repeat those of the other checkers.
_REPEATED = r"\d+ files do not comply|Seed checker failed$|System description file checker failed"


def check_log(path: Any, ruleset: str) -> list[str]:
    """The faults of one log, a line each."""
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", ruleset, False, False)
    with _collected():
        try:
            checker.check_file(str(path), f"training_{ruleset}/common.yaml")
        except Exception as error:  # a faulty log makes the checker raise anything
            text = f"the log checker failed: {type(error).__name__}: {one_line(error)}"
            checker.not_overwritable.append(text)
    return [_short(text) for text in (*checker.overwritable.values(), *checker.not_overwritable)]


def check_package(root: Any, results: Any, ruleset: str) -> tuple[list[str], float]:
    """Checks the number of runs, their seeds and convergence, and the description of the system.

    Args:
      root: a local copy with systems/ and results/; the checkers write to it.
      results: the folder in it with the logs.
      ruleset: of `RULESETS`.

    Returns:
      The faults besides those of single logs, a line each; and by what the minutes are multiplied
      because the runs needed fewer epochs than the reference, else 1.
    """
    from mlperf_logging.package_checker import package_checker

    with _collected() as records:
        try:
            package_checker.check_training_package(
                *(str(root), "training", ruleset, True, False, False, False, False), log_output=""
            )
        except Exception as error:  # faulty logs make the checkers raise anything
            logging.error("the package checker failed: %s: %s", type(error).__name__, error)
    faults = []
    for record in records:
        text = record.getMessage().strip()
        if text.startswith("RCP Test Failed"):
            text += _convergence(records)
        is_news = record.levelno >= logging.ERROR or "in files do not match" in text
        if is_news and not re.match(_REPEATED, text):
            faults.append(_short(text.replace(f"{root}/", "")))
    scaling = results / "scaling.json"
    scale = parse_json(scaling.read_text())["scaling_factor"] if scaling.exists() else 1.0
    return faults, scale


def _convergence(records: list[logging.LogRecord]) -> str:
    """The mean of the runs' epochs and the least that the reference allows, if known."""
    log = "\n".join(record.getMessage() for record in records)
    mean = re.search(r"Submission mean epochs: ([\d.]+)", log)
    least = re.search(r"'Min Epochs': (?:np\.float64\()?([\d.]+)", log)
    if not mean or not least:
        return ""
    return f": mean {float(mean[1]):.2f} epochs is less than the {float(least[1]):.2f} allowed"


def _short(text: str) -> str:
    """The start of a checker's message, in one line."""
    return " ".join(text.split("current context")[0].split())[:300]


@contextlib.contextmanager
def _collected() -> Iterator[list[logging.LogRecord]]:
    """Collects what the checkers log, and prints nothing of theirs."""
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
