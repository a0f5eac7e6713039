"""Charts as JSON lines on stdout, in the form that Paperspace Gradient read from a job's log.

A line {"chart": NAME, "axis": "Iteration"} announces a chart, {"chart": NAME, "x": STEP,
"y": VALUE} is a point of it.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

# Of a training interval; of an evaluation every score is charted, under eval_NAME.
_TRAINING = ("loss", "learning_rate")
_RATE = "_per_second"


class Charts:
    """Prints the charted numbers of rows, each line at once."""

    def __init__(self):
        self._announced: set[str] = set()

    def train(self, row: dict[str, Any]) -> None:
        """Prints loss, learning rate and examples per second of a training row."""
        chosen = {k: v for k, v in row.items() if k in _TRAINING or k.endswith(_RATE)}
        self._print(row["step"], chosen)

    def eval(self, step: int, scores: dict[str, float]) -> None:
        """Prints the scores of an evaluation."""
        self._print(step, {f"eval_{name}": value for name, value in scores.items()})

    def _print(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if not math.isfinite(value):  # JSON has no word for it
                continue
            if name not in self._announced:
                self._announced.add(name)
                _line({"chart": name, "axis": "Iteration"})
            _line({"chart": name, "x": step, "y": value})


def _line(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()
