"""Evaluates the checkpoint that a report is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.uses import Exhibit
from engine.checkpoint import Checkpointer
from errors import DataError
from evaluate import begin
from modes import evaluating
from resuming import OtherData
from run import Settings


@dataclasses.dataclass(frozen=True)
class Examined:
    """A checkpoint that was evaluated for the report.

    Attributes:
      step: of the checkpoint.
      examples: how many were evaluated.
      scores: of the evaluation; {} where the data cannot be read.
      exhibits: what the benchmark shows of its predictions; [] on processes other than 0.
      fault: why the data cannot be read, or "".
    """

    step: int
    examples: int = 0
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    exhibits: Sequence[Exhibit] = ()
    fault: str = ""


def examine(settings: Settings, checkpoint: str) -> Examined:
    """Evaluates a checkpoint; without its data, only says why it could not.

    Args:
      settings: those of the run.
      checkpoint: "latest", "best" (in the run's own evaluations) or a step.

    Raises:
      UserError: another mistake than missing data, such as other data; Preempted: a signal arrived.
    """
    try:
        with evaluating.examining(settings, checkpoint) as examination:
            run, step = examination.run, examination.step
            state = examination.restore(step)
            assert state is not None  # only a watcher gets None
            evaluation = begin(run, examination.predict, state, step)
            scores = evaluation.scores()
            shown = evaluating.exhibits(run, evaluation, state)
            return Examined(step, run.benchmark.num_examples("eval"), scores, shown)
    except OtherData:
        raise
    except DataError as error:
        fault = str(error)
    checkpoints = Checkpointer(f"{settings.workdir}/checkpoints", keep=1, best=None)
    metric = checkpoints.manifest(checkpoints.steps()[-1])["target_metric"]
    step = evaluating.choose(checkpoints, settings.workdir, metric, checkpoint)
    return Examined(step, fault=fault)
