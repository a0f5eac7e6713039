"""The interface between the training loop and the log of an MLPerf run.

`Log` writes nothing: most runs have no such log. `engine.mlperf_formats` writes it where the config
asks for it. See docs/mlperf.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jax.sharding import Mesh

from engine.step import Recipe

LOG = "mlperf.log"  # in the workdir
# Maps a step to the step of the next evaluation; None if that depends on the time.
NextEval = Callable[[int], int | None]


@dataclasses.dataclass(frozen=True)
class LogKeys:
    """The keys of `config.mlperf`; configs/_loop.py says what they mean."""

    format: Literal["", "mllog", "v0.5"]
    org: str
    clear_caches: bool
    platform: str
    division: Literal["closed", "open"]
    status: Literal["cloud", "onprem", "preview", "research"]


class Log:
    """The log of a run without MLPerf: its methods write nothing."""

    def describe(self, recipe: Recipe, params: Any, mesh: Mesh, next_eval: NextEval) -> None:
        """Logs the run's settings before anything is compiled.

        Args:
          recipe: the run's recipe.
          params: tree of arrays or ShapeDtypeStructs.
          mesh: the run's devices; devices along its second axis share BatchNorm statistics.
          next_eval: returns the step of the next evaluation.
        """

    def run_starts(self) -> None:
        """Starts the clock after the compilation, before data are read; all processes call it."""

    def eval_starts(self, step: int) -> None:
        """Logs that the evaluation of `step` begins."""

    def eval_ends(self, step: int, scores: Mapping[str, float]) -> None:
        """Logs the scores of `step`; stops the clock if all targets are reached."""

    def close(self) -> None:
        """Logs the end of the run, however it ended."""
