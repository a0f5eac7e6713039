"""Ends a run whose scores no longer rise: `config.patience`, or `Hints.own_patience`."""

from __future__ import annotations

from engine.report.history import History
from engine.report.writers import Reporter
from errors import ConfigError
from evaluate import Judge
from run import Plan
from start import Run


def since_best(history: History, metric: str, step: int) -> int:
    """How many of the evaluations up to a step came after the one with the best `metric`."""
    steps = [known for known in history.scores() if known <= step]
    best = history.best(metric, among=steps)
    return sum(best is None or known > best for known in steps)


class PatientJudge(Judge):
    """A `Judge` that ends the run after `patience` evaluations without a better score."""

    def __init__(self, run: Run, plan: Plan, reporter: Reporter, evaluating: bool, patience: int):
        """Raises ConfigError if `config.patience` would wait for evaluations that never come."""
        super().__init__(run, plan, reporter, evaluating)
        self._patience, first = patience, plan.eval_every.next_after(0)
        if not run.settings.patience:
            return
        if not evaluating:
            raise ConfigError(
                f"config.patience={patience} needs evaluations, which --mode=train leaves to "
                "another process: use --mode=train_and_eval or --config.patience=0"
            )
        if first is None or first >= plan.recipe.total_steps:
            raise ConfigError(
                f"config.patience={patience} needs evaluations before the last step, but "
                f"config.steps_per_eval={run.settings.steps_per_eval!r} has none: set it to "
                "'1 epoch', or --config.patience=0"
            )

    def is_stuck(self, step: int) -> bool:
        """Whether as many evaluations up to a step had no better score than before."""
        if not self.scores(step):
            return False
        since = since_best(self._reporter.history, self._run.metrics[0], step)
        return since >= self._patience

    def is_over(self, step: int) -> bool:
        return super().is_over(step) or self.is_stuck(step)

    def result(self, step: int) -> str:
        text = super().result(step)
        if self.is_stuck(step):
            name = self._run.metrics[0].replace("_", " ")
            text += f"; stopped because {self._patience} evaluations brought no better {name}"
        return text
