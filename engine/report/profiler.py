"""Traces steps of the training loop, for config.profile_steps."""

from __future__ import annotations

import re
from typing import Any

import jax

from errors import OutputError


class Profiler:
    """Writes a TensorBoard (XProf) trace of the steps in "begin:end", end excluded."""

    def __init__(self, steps: str, workdir: str):
        """Raises OutputError if `steps` is not "begin:end" with begin < end."""
        match = re.fullmatch(r"(\d+):(\d+)", steps)
        self._begin, self._end = map(int, match.groups()) if match else (0, 0)
        if self._begin >= self._end:
            raise OutputError(f"config.profile_steps={steps!r} is not begin:end, such as 100:110")
        self._folder, self._running = workdir, False

    def check(self, total_steps: int) -> None:
        """Raises OutputError if a run of so many steps has none to trace."""
        if self._begin >= total_steps:
            steps = f"{self._begin}:{self._end}"
            raise OutputError(
                f"config.profile_steps={steps!r}: the run has only {total_steps:,} steps"
            )

    def before(self, step: int) -> None:
        """Starts the trace if `step`, counted from 0 and about to run, is in the range."""
        if self._begin <= step < self._end and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, result: Any) -> str:
        """Ends the trace after `step` steps, of which the last one makes `result`.

        Returns the command that shows the trace; "" while there is none.
        """
        if not self._running or step < self._end:
            return ""
        jax.block_until_ready(result)
        self.close()
        return f"profile of steps {self._begin}:{self._end}: tensorboard --logdir {self._folder}"

    def close(self) -> None:
        """Ends a trace that is still running."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
