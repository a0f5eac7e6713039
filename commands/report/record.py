"""What a report is about: the files that a run left in its workdir, and a checkpoint's scores."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from benchmarks.base import Benchmark, Target
from benchmarks.uses import Exhibit
from common.errors import DataError
from engine.checkpoint import model_source
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.manifest import OtherData
from engine.evaluate import begin_evaluation, examining, exhibits
from engine.plan import Settings, make_plan, read_settings, targets_of
from engine.report.history import History
from engine.report.starts import past_starts
from engine.report.writers import is_like
from engine.stopping import reaches, since_best

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Record:
    """A run, as its newest checkpoint and metrics.jsonl describe it.

    `history` has the rows of metrics.jsonl; scores that it has lost are from the manifest. `starts`
    is empty for an imported model; `total_steps` is what the config asks for.
    """

    settings: Settings
    manifest: Mapping[str, Any]
    history: History
    starts: Sequence[Row]
    benchmark: Benchmark
    total_steps: int

    @classmethod
    def read(cls, settings: Settings) -> Self:
        """Reads the files of a run; UserError if its config cannot work."""
        workdir = settings.workdir
        checkpoints = Checkpointer(f"{workdir}/checkpoints", keep=1, best=None)
        newest = functools.partial(checkpoints.choose, "latest")
        _, manifest = checkpoints.read(newest, checkpoints.manifest)
        history = History(workdir, writes=False)
        history.restore(manifest.get("evaluations", []))
        starts = past_starts(manifest)
        # The data may have decided values that the user's recipe leaves open.
        config = model_source.config_of({**manifest, "config": settings.config})
        settings = read_settings(config.lock(), workdir, settings.origin)
        benchmark = settings.load_benchmark(f"{workdir}/data_index")
        plan = make_plan(settings, benchmark, manifest["num_train_examples"])
        return cls(settings, manifest, history, starts, benchmark, plan.total_steps)

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets; the first one chooses the best checkpoint."""
        return targets_of(self.settings, self.benchmark)

    @property
    def percent(self) -> list[str]:
        """The targets' metrics that are written in per cent."""
        return [target.metric for target in self.targets if target.percent]

    @property
    def name(self) -> str:
        """The last part of the workdir."""
        return self.settings.workdir.rstrip("/").rpartition("/")[2]

    @property
    def imported(self) -> str:
        """Where the model is from, in words; "" if it has trained here."""
        source = self.manifest.get("imported")
        if not source or self.step:
            return ""
        path, form, digest = (source.get(key, "unknown") for key in ("path", "format", "sha256"))
        return f"{path} ({form}, SHA-256 {digest})"

    @property
    def step(self) -> int:
        """The last step that the run is known to have done."""
        return max([self.manifest["step"], *(row["step"] for row in self.history.rows)])

    def epoch(self, step: int) -> float:
        """The number of epochs at the end of a step."""
        return step * self.settings.train_batch_size / max(self.manifest["num_train_examples"], 1)

    def rows(self, split: str) -> list[Row]:
        """The rows of the training intervals ("train") or of the evaluations ("eval")."""
        return [row for row in self.history.rows if row["split"] == split]

    def number(self, name: str, value: float) -> str:
        """A value in words, in per cent if its metric is written so."""
        if not math.isfinite(value):
            return "not defined"  # as mAP without an object to find
        return f"{100 * value:.2f}\u00a0%" if is_like(name, self.percent) else f"{value:.4f}"

    @property
    def end(self) -> str:
        """How the run ended, in words."""
        if self.imported:
            return f"The model was imported from {self.imported}. It has not trained here."
        scores, step = self.history.scores().get(self.step, {}), f"step {self.step:,}"
        met = self.settings.stop_at_target and reaches(self.benchmark.targets, scores)
        if met and self.step < self.total_steps:
            return f"It stopped at {step} because it had reached its target."
        patience, metric = self.settings.patience, self.targets[0].metric
        if patience and scores and since_best(self.history, metric, self.step) >= patience:
            return (
                f"It stopped at {step} because {patience} evaluations brought no better "
                f"{metric.replace('_', ' ')}."
            )
        if self.step >= self.total_steps:
            return f"It trained for all of its {self.total_steps:,} steps."
        return (
            f"It is at {step} of {self.total_steps:,}: it was stopped, or it still trains. The "
            "command that started it continues it."
        )


@dataclasses.dataclass(frozen=True)
class Examined:
    """A checkpoint that was evaluated for the report.

    `scores` are {} and `error` says why where the data cannot be read. `exhibits` show the
    predictions, on process 0 only.
    """

    step: int
    examples: int = 0
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    exhibits: Sequence[Exhibit] = ()
    error: str = ""


def examine(settings: Settings, checkpoint: str) -> Examined:
    """Evaluates a checkpoint, "latest", "best" or a step; without its data, says why it could not.

    OtherData if the data are not the run's.
    """
    try:
        with examining(settings, checkpoint) as examination:
            run, restored = examination.run, examination.restore()
            assert restored is not None  # nobody waits for it
            step, state = restored
            evaluation = begin_evaluation(run, examination.predict, state, step, True)
            scores = evaluation.scores()
            shown = exhibits(run, evaluation, state)
            return Examined(step, run.benchmark.num_examples("eval"), scores, shown)
    except OtherData:
        raise
    except DataError as error:
        _, choose = model_source.open_checkpoint(settings.workdir, "--workdir", checkpoint)
        return Examined(choose(), error=str(error))
