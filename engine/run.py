"""Run: the opened devices, workdir, log and data of a run; its first or restored state."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
from etils import epath
from jax.sharding import Mesh

from benchmarks.base import Benchmark, Identity
from common import console
from common.errors import RESTART, CheckpointError
from engine import compiler, devices, environment, sharding, step
from engine.checkpoint import resuming
from engine.checkpoint.manager import Checkpointer
from engine.checkpoint.weights import Weights
from engine.cluster import guard, hostlog, preemption, processes, watchdog
from engine.locations import check_folder
from engine.plan import Plan, Programs, Settings
from engine.step import TrainState

_log = logging.getLogger("tpu_suite")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run on this process's devices, with its workdir and its log."""

    settings: Settings
    programs: Programs
    log: hostlog.HostLog

    @classmethod
    def open(cls, settings: Settings, trains: bool = True) -> Self:
        """Checks devices, workdir and batch sizes; opens no data."""
        console.set_progress_listener(_note_progress)
        devices.check_platform()
        if jax.default_backend() == "cpu":
            environment.keep_freed_memory()
        compiler.use_cache(settings.compilation_cache)
        check_folder(settings.workdir)
        cache_dir = str(epath.Path(settings.workdir) / "data_index")
        programs = Programs.make(settings, cache_dir, trains=trains)
        return cls(settings, programs, hostlog.attach(settings.workdir, jax.process_index()))

    @property
    def benchmark(self) -> Benchmark:
        return self.programs.benchmark

    @property
    def mesh(self) -> Mesh:
        return self.programs.mesh

    @property
    def title(self) -> str:
        """What is trained on which devices, for headings."""
        chips, device = sharding.num_chips(self.mesh), self.mesh.devices.flat[0].device_kind
        return f"{self.settings.benchmark} on {chips} x {device}"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the targets; the first one chooses the best checkpoint."""
        return tuple(target.metric for target in self.benchmark.targets)

    @property
    def shown_metrics(self) -> dict[str, Any]:
        """How a `Reporter` shows the targets' metrics."""
        percent = tuple(t.metric for t in self.benchmark.targets if t.percent)
        proportions = self.benchmark.proportions
        return {"metrics": self.metrics, "percent": percent, "proportions": proportions}

    @property
    def checkpoints_dir(self) -> str:
        return str(epath.Path(self.settings.workdir) / "checkpoints")

    def say(self, text: str) -> None:
        """Writes one line to each host's log and to process 0's terminal."""
        _log.info("%s", text)

    def count_examples(self, evaluating: bool) -> int:
        """Opens the data and returns the number of training examples."""
        settings, benchmark = self.settings, self.benchmark
        with watchdog.during("opening the data"):
            count = processes.first_process_first(lambda: benchmark.num_examples("train"))
            if evaluating:
                processes.first_process_first(lambda: benchmark.num_examples("eval"))
        splits = ("train", "eval") if evaluating else ("train",)
        guard.afford(self.host_bytes(*splits), settings.config)
        return count

    def host_bytes(self, *splits: str) -> dict[tuple[str, ...], int]:
        """Bytes that the input of splits needs on this host, by the config keys that decide."""
        sizes = {"train": self.settings.train_batch_size, "eval": self.settings.eval_batch_size}
        needed: dict[tuple[str, ...], int] = {}
        for split in splits:
            needed |= self.benchmark.host_bytes(split, sizes[split], jax.process_count())
        return needed

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Has the watchdog watch the block."""

        def leave(reason: str) -> None:
            processes.fail(reason, preemption.answer().code if preemption.requested() else RESTART)

        dog = watchdog.Watchdog(
            self.settings.watchdog_seconds,
            self.log.note,
            leave=leave,
            others=processes.others,
            hurry=preemption.requested,
        )
        with contextlib.closing(dog):
            yield

    def facts(
        self,
        num_examples: int,
        metadata: Mapping[str, Any] | None = None,
        data: Sequence[Identity] = (),
    ) -> dict[str, Any]:
        """What the manifest of a checkpoint says about the run.

        Without `metadata` the benchmark gives them, which opens the data. `data` has the identities
        of the splits.
        """
        metadata = self.benchmark.metadata if metadata is None else metadata
        return {
            "data": {name: text for split in data for name, text in split.content.items()},
            "benchmark": self.settings.benchmark,
            "config": dict(self.settings.config),
            "recipe": dict(self.settings.origin),
            "num_train_examples": num_examples,
            "norm_examples": self.programs.norm_examples,
            "target_metric": self.metrics[0],
            "target_metrics": list(self.metrics),
            **metadata,
        }


def check_start(run: Run, abstract: TrainState) -> Weights | None:
    """The weights of `config.init_from`, which fit a state with the shapes of `abstract`."""
    if not run.settings.init_from:
        run.programs.check_random_start()
        return None
    weights, adoption = resuming.read_weights(run.programs, abstract)
    if not run.settings.mlperf.format:  # its clock runs before the data are touched
        resuming.check_origin(run.programs, run.say, weights, adoption)
    return weights


def first_state(run: Run, plan: Plan, weights: Weights | None = None) -> tuple[TrainState, str]:
    """(the state before the first step, the checkpoint that its weights are from or "").

    With `config.init_from` it has the `weights` that `check_start` returned; without them, it reads
    them.
    """
    state = run.programs.initial_state(plan)
    if run.settings.init_from:
        weights = weights or resuming.read_weights(run.programs, state)[0]
        state = resuming.adopt_weights(run.programs, run.say, plan.step_settings, state, weights)
        return state, weights.source
    if note := run.settings.lacks_weights:
        run.say(f"NOTE {note}")
    return state, ""


def restore_state(
    checkpoints: Checkpointer, number: int, state: TrainState, totals: Any
) -> tuple[TrainState, Any]:
    """(state, totals) of the checkpoint of a step, for ShapeDtypeStructs of both."""
    items = checkpoints.restore(number, step.checkpoint_items(state, totals))
    totals = items["optimizer"].pop("totals")
    restored = TrainState(**items["optimizer"], **items["model"])
    if (inside := int(restored.step)) != number:
        folder = f"{checkpoints.directory}/{number}"
        raise CheckpointError(f"{folder} holds step {inside}; delete it to go on before it")
    return restored, totals


def _note_progress(text: str) -> None:
    """Notes what the input does before its first batch; a signal may end the run there."""
    watchdog.doing(text)
    preemption.raise_if_requested()
