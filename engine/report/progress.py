"""Measures how fast a run trains, and estimates the time that remains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence


class Progress:
    """Measures a run over windows of steps, without the pauses for evaluation and saving."""

    def __init__(self, step: int, total_steps: int):
        self._total = total_steps
        self._window_step, self._window_start = step, time.monotonic()
        self._paused = 0.0
        self._step_seconds = math.nan
        self.eval_seconds = 0.0
        self.evals_left = 0

    def pause(self, seconds: float) -> None:
        """Leaves time out of the open window."""
        self._paused += seconds

    def so_far(self, step: int) -> tuple[float, float]:
        """(seconds of the open window, seconds of a step in it), which stays open."""
        elapsed = time.monotonic() - self._window_start - self._paused
        return elapsed, elapsed / max(step - self._window_step, 1)

    def window(self, step: int) -> tuple[float, int]:
        """Closes the window at `step` and returns its (seconds without pauses, steps)."""
        now = time.monotonic()
        elapsed = max(now - self._window_start - self._paused, 1e-9)
        steps = max(step - self._window_step, 1)
        self._step_seconds = elapsed / steps
        self._window_step, self._window_start, self._paused = step, now, 0.0
        return elapsed, steps

    def foresee(self, step: int, next_eval: Callable[[int], int | None] | None) -> None:
        """Estimates how many evaluations are left after `step`.

        `next_eval(step)` is the step of the first evaluation after `step`, or None if the clock
        decides. `next_eval` itself is None if the run does not evaluate.
        """
        following = next_eval and next_eval(step)
        after = next_eval(following) if next_eval and following else None
        if following is None or after is None:
            self.evals_left = int(next_eval is not None)
        else:
            self.evals_left = max(1, math.ceil((self._total - step) / (after - following)))

    def remaining(self, step: int) -> float:
        """Estimates the seconds to the end, with evaluations; nan before the first window."""
        return (self._total - step) * self._step_seconds + self.evals_left * self.eval_seconds


def fitted(cells: Sequence[tuple[int, str]], width: int) -> str:
    """Joins cells to a line of at most `width` characters.

    A cell is (rank, text). While the line is too long, the cell of the highest rank goes, of equals
    the last one; cells of rank 0 always stay.
    """
    shown = list(cells)
    while len(line := "  ".join(text for _, text in shown)) > width:
        worst = max(range(len(shown)), key=lambda i: (shown[i][0], i))
        if shown[worst][0] == 0:
            break
        del shown[worst]
    return line


def bar(done: int, total: int, width: int = 20) -> str:
    """[#####     ] of `width` characters between the brackets."""
    return f"[{'#' * (width * min(done, total) // total):{width}}]"


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 4:05; "?" if they are not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
