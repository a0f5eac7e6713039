"""Writes the program's log to the terminal, and keeps other libraries' errors off it."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

from absl import logging as absl_logging

from errors import visible


def start(stream: TextIO, level: int = logging.INFO) -> None:
    """Sends the log's records from `level` on to a stream of the terminal.

    Orbax logs an error for every file and every task of a failed save, and TensorStore prints a
    traceback for each. The failure itself arrives as an exception, and `engine.cluster.hostlog`
    writes these errors to a file.
    """
    absl_logging.set_verbosity(absl_logging.ERROR)
    absl_logging.get_absl_handler().addFilter(lambda record: record.name != "absl")
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _print_unraisable
    log, handler = logging.getLogger("tpu_suite"), logging.StreamHandler(stream)
    handler.setFormatter(_Visible())
    log.setLevel(logging.INFO)
    log.propagate = False
    handler.setLevel(level)
    log.addHandler(handler)


class _Visible(logging.Formatter):
    """Escapes control characters, which names in the data may have."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _print_unraisable(unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
