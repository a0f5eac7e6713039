"""Decides which steps of a training run are evaluated, and which one is the last."""

import math
from collections.abc import Mapping, Sequence

from benchmarks.base import Target
from engine.plan import Plan
from engine.report.history import History
from engine.report.writers import Reporter
from engine.run import Run


class StoppingRule:
    """Decides which steps are evaluated, whether the targets are reached, how the run ended."""

    def __init__(self, run: Run, plan: Plan, reporter: Reporter, evaluating: bool):
        self._run, self._plan, self._reporter = run, plan, reporter
        self._evaluating, settings = evaluating, run.settings
        # So many evaluations without a better score end the run; 0: none do.
        own = run.benchmark.default_patience if evaluating and settings.stop_at_target else 0
        self._patience = settings.patience or own

    def scores(self, step: int) -> dict[str, float]:
        """The scores of a step; {} if it was not evaluated."""
        return self._reporter.history.scores().get(step, {})

    def evaluates(self, step: int) -> bool:
        """Whether a step is evaluated; the last one always is."""
        return self._evaluating and self._plan.evaluates(step)

    def lacks_evaluation(self, step: int, saved: int) -> bool:
        """Whether a restored step should have been evaluated and was not."""
        return 0 < step == saved and self.evaluates(step) and not self.scores(step)

    def is_over(self, step: int) -> bool:
        """Whether a step ends the run early: all targets are reached, or it is stuck."""
        if self._is_stuck(step):
            return True
        stops = self._run.settings.stop_at_target
        return stops and reaches(self._run.benchmark.targets, self.scores(step))

    def _is_stuck(self, step: int) -> bool:
        """Whether `config.patience` evaluations up to a step had no better score than before."""
        if not self._patience or not self.scores(step):
            return False
        since = since_best(self._reporter.history, self._run.metrics[0], step)
        return since >= self._patience

    def is_finished(self, step: int) -> bool:
        """Whether nothing is left to do for a run that is at `step`."""
        if self.is_over(step):
            return True
        done = step >= self._plan.total_steps
        return done and (not self._evaluating or bool(self.scores(step)))

    def result(self, step: int) -> str:
        """How the run ended, in words."""
        total, scores = self._plan.total_steps, self.scores(step)
        number = self._reporter.number
        text = f"step {step:,} of {total:,}"
        if step > total:
            text = f"step {step:,}, beyond the {total:,} that config.train_steps asks for"
        for target in self._run.targets:
            if (metric := target.metric) not in scores:
                continue  # it was not evaluated, or before `config.best_by` was set
            score = scores[metric]
            best = self._reporter.history.best(metric)
            best = step if best is None else best  # every score may be nan
            met = "reached" if score >= target.value else "NOT reached"
            goal = f"; target {number(metric, target.value)} {met}" if target.value > 0 else ""
            highest = number(metric, self.scores(best)[metric])
            count = self._run.benchmark.open("eval")  # an earlier run may have evaluated
            shown = self._reporter.quantity(metric, score, count)
            text += f", {shown} (best {highest} at step {best:,}){goal}"
        if self._is_stuck(step):
            name = self._run.metrics[0].replace("_", " ")
            text += f"; stopped because {self._patience} evaluations brought no better {name}"
        return text

    def notes(self) -> list[str]:
        """What the benchmark says about the scores of the best evaluation, in sentences."""
        best = self._reporter.history.best(self._run.metrics[0])
        return [] if best is None else self._run.benchmark.score_notes(self.scores(best))


def reaches(targets: Sequence[Target], scores: Mapping[str, float]) -> bool:
    """Whether scores reach all targets with a value above 0; False without such a target."""
    counted = [target for target in targets if target.value > 0]
    return bool(counted) and all(scores.get(t.metric, -math.inf) >= t.value for t in counted)


def since_best(history: History, metric: str, step: int) -> int:
    """How many of the evaluations up to a step came after the one with the best `metric`."""
    steps = [known for known in history.scores() if known <= step]
    best = history.best(metric, among=steps)
    return sum(best is None or known > best for known in steps)
