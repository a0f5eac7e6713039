"""What a report is about: the files that a run left in its workdir, and a checkpoint's scores."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.base import Benchmark, Target
from benchmarks.uses import Exhibit
from common.errors import DataError
from engine import model_source
from engine.checkpoint import Checkpointer
from engine.evaluate import begin_evaluation, examining, exhibits, since_best
from engine.report.history import History
from engine.report.starts import Cost, cost_of, past_starts, training_seconds
from engine.report.writers import is_like
from engine.resuming import OtherData
from engine.run import Settings, make_plan

Row = dict[str, Any]
# What a report says of a start that `engine.report.starts` did not describe so.
_START: Row = {"step": 0, "time": "", "compile_seconds": 0.0, "device": "unknown device"}
_START |= {"chips": 1, "commit": "", "seconds": 0.0, "lost_steps": 0}


@dataclasses.dataclass(frozen=True)
class Record:
    """A run, as its newest checkpoint and metrics.jsonl describe it.

    Attributes:
      settings: those of the run.
      manifest: of the newest checkpoint.
      checkpoints: the steps of its checkpoints.
      history: the rows of metrics.jsonl; scores that it has lost are from the manifest.
      benchmark: with the run's settings.
      total_steps: that the config asks for.
    """

    settings: Settings
    manifest: Mapping[str, Any]
    checkpoints: Sequence[int]
    history: History
    benchmark: Benchmark
    total_steps: int

    @classmethod
    def read(cls, settings: Settings) -> Record:
        """Raises UserError if there is no checkpoint, or the config cannot work."""
        checkpoints = Checkpointer(f"{settings.workdir}/checkpoints", keep=1, best=None)
        steps = checkpoints.steps()
        manifest = checkpoints.manifest(steps[-1])
        history = History(settings.workdir, writes=False)
        history.restore(manifest.get("evaluations", []))
        benchmark = settings.load_benchmark(f"{settings.workdir}/data_index")
        plan = make_plan(settings, benchmark, manifest["num_train_examples"])
        return cls(settings, manifest, steps, history, benchmark, plan.recipe.total_steps)

    @property
    def targets(self) -> Sequence[Target]:
        """What the run trains to."""
        return self.benchmark.targets

    @property
    def name(self) -> str:
        """The last part of the workdir."""
        return self.settings.workdir.rstrip("/").rpartition("/")[2]

    @property
    def starts(self) -> list[Row]:
        """Each start of the run; [] in a run of an older program."""
        rows = past_starts(self.settings.workdir, self.manifest)
        return [
            {name: row[name] if _fits(row.get(name), x) else x for name, x in _START.items()}
            for row in rows
        ]

    @property
    def cost(self) -> Cost | None:
        """What the run took; None in a run of an older program."""
        return cost_of(self.starts, self.history.rows)

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
        percent = [target.metric for target in self.targets if target.percent]
        if not math.isfinite(value):
            return "not defined"  # as mAP without an object to find
        return f"{100 * value:.2f}\u00a0%" if is_like(name, percent) else f"{value:.4f}"

    @property
    def end(self) -> str:
        """How the run ended, in words."""
        if self.imported:
            return f"The model was imported from {self.imported}. It has not trained here."
        scores = self.history.scores().get(self.step, {})
        targets = [t for t in self.targets if t.value > 0]
        met = targets and all(scores.get(t.metric, -math.inf) >= t.value for t in targets)
        if self.settings.stop_at_target and met and self.step < self.total_steps:
            return f"It stopped at step {self.step:,} because it had reached its target."
        patience = self.settings.patience or self.benchmark.own_patience
        metric = self.targets[0].metric
        if patience and scores and since_best(self.history, metric, self.step) >= patience:
            return (
                f"It stopped at step {self.step:,} because {patience} evaluations brought no "
                f"better {metric.replace('_', ' ')}."
            )
        if self.step >= self.total_steps:
            return f"It trained for all of its {self.total_steps:,} steps."
        return (
            f"It is at step {self.step:,} of {self.total_steps:,}: it was stopped, or it still "
            "trains. The command that started it continues it."
        )


def _fits(value: Any, default: Any) -> bool:
    """Whether a value of the manifest is text, or a number, as its default is."""
    if isinstance(default, str):
        return isinstance(value, str)
    whole = isinstance(default, int)
    return isinstance(value, int if whole else int | float) and 0 <= value < 1e15


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a run was; nan where its files do not say so. Times are in seconds.

    Steps that were lost in a kill and done again are in none of the figures, nor are saving and
    opening the data.
    """

    unit: str  # of the rate: "images" or, where examples differ in size, such as "tokens"
    rate: float  # the median over the log intervals, of all chips
    chips: int
    input_wait: float  # share of the training time
    training: float
    evaluating: float
    compiling: float

    @classmethod
    def of(cls, record: Record) -> Speed:
        """Adds up the rows of metrics.jsonl."""
        rows = [
            row for row in record.rows("train") if math.isfinite(row.get("step_seconds", math.nan))
        ]
        suffix = "_per_second_per_chip"
        names = [key.removesuffix(suffix) for row in rows for key in row if key.endswith(suffix)]
        unit = names[0] if names else record.benchmark.unit
        seconds = training_seconds(rows, [start["step"] for start in record.starts])
        waited = [
            took * row.get("input_wait", math.nan) for took, row in zip(seconds, rows, strict=True)
        ]
        pairs = [(row.get(f"{unit}_per_second", 0.0), row.get(unit + suffix, 0.0)) for row in rows]
        pairs = [(rate, chip) for rate, chip in pairs if rate > 0 and chip > 0]  # not those of nan
        rates, per_chip = [rate for rate, _ in pairs], [chip for _, chip in pairs]
        training = sum(seconds)
        taken = [row.get("seconds", 0.0) for row in record.rows("eval")]
        compiled = [start["compile_seconds"] for start in record.starts]
        return cls(
            unit=unit.replace("_", " "),
            rate=statistics.median(rates) if rates else math.nan,
            chips=round(rates[-1] / per_chip[-1]) if rates else 0,
            input_wait=sum(waited) / training if training else math.nan,
            training=training,
            evaluating=sum(seconds for seconds in taken if seconds > 0),
            compiling=sum(compiled) if compiled else math.nan,
        )

    @property
    def chip_hours(self) -> float:
        """Training, evaluation and compilation, times the chips."""
        known = [self.training, self.evaluating, self.compiling]
        return self.chips * sum(x for x in known if not math.isnan(x)) / 3600


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
        with examining(settings, checkpoint) as examination:
            run, step = examination.run, examination.step
            state = examination.restore(step)
            assert state is not None  # only a watcher gets None
            evaluation = begin_evaluation(run, examination.predict, state, step)
            scores = evaluation.scores()
            shown = exhibits(run, evaluation, state)
            return Examined(step, run.benchmark.num_examples("eval"), scores, shown)
    except OtherData:
        raise
    except DataError as error:
        fault = str(error)
    _, step = model_source.open_checkpoint(settings.workdir, "--workdir", checkpoint)
    return Examined(step, fault=fault)
