"""Run: the opened devices, workdir, log and data of a run."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import jax
from etils import epath
from jax.sharding import Mesh

from benchmarks.base import Benchmark, Target
from common.errors import RESTART, ConfigError, DataError
from common.progress import set_progress_listener
from engine import compiler, devices, sharding
from engine.cluster import guard, preemption, processes, watchdog
from engine.locations import check_folder
from engine.plan import Programs, Settings, targets_of


@dataclasses.dataclass(frozen=True)
class Run:
    """A run on this process's devices, with its workdir and its log."""

    settings: Settings
    programs: Programs
    log: processes.HostLog

    @classmethod
    def open(cls, settings: Settings, trains: bool = True) -> Self:
        """Checks devices, workdir and batch sizes; opens no data."""
        set_progress_listener(_note_progress)
        devices.check_platform()
        compiler.use_cache(settings.compilation_cache)
        check_folder(settings.workdir)
        cache_dir = str(epath.Path(settings.workdir) / "data_index")
        programs = Programs.make(settings, cache_dir, trains=trains)
        return cls(settings, programs, processes.attach_log(settings.workdir, jax.process_index()))

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
    def targets(self) -> tuple[Target, ...]:
        """See `targets_of`; opened data may have set other values."""
        return targets_of(self.settings, self.benchmark)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the targets; the first one chooses the best checkpoint."""
        return tuple(target.metric for target in self.targets)

    @property
    def shown_metrics(self) -> dict[str, Any]:
        """How a `Reporter` shows the targets' metrics."""
        proportions = self.benchmark.proportions  # their intervals are in per cent, too
        percent = (*(t.metric for t in self.targets if t.percent), *proportions)
        return {"metrics": self.metrics, "percent": percent, "proportions": proportions}

    def open_data(self, *splits: str) -> None:
        """Opens splits, on host 0 first, and checks that their input fits into memory."""
        benchmark = self.benchmark
        with watchdog.during("opening the data"):
            processes.first_process_first(lambda: [*map(benchmark.open, splits)])
        if "train" in splits:
            check_count(benchmark)
        guard.afford(host_bytes(benchmark, self.settings, *splits), self.settings.config)

    @classmethod
    @contextlib.contextmanager
    def at_work(cls, settings: Settings) -> Iterator[tuple[Self, guard.Guard]]:
        """A run that has the lock of its workdir, with the watchdog looking on."""
        run = cls.open(settings)
        holder = guard.Guard(settings.workdir, run.mesh, settings.host_memory_limit)
        with contextlib.closing(holder), run.watched():
            yield run, holder

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


def host_bytes(
    benchmark: Benchmark, settings: Settings, *splits: str
) -> dict[tuple[str, ...], int]:
    """Bytes that the input of opened splits needs on this host, by the config keys that decide."""
    needed: dict[tuple[str, ...], int] = {}
    for split in splits:
        size = getattr(settings, f"{split}_batch_size")
        needed |= benchmark.host_bytes(split, size, jax.process_count())
    return needed


def check_count(benchmark: Benchmark) -> None:
    """Raises DataError if the data hold another number of training examples than is declared.

    ConfigError if a part of them is asked for, and the benchmark took all.
    """
    if benchmark.part and not benchmark.part.complete:
        raise ConfigError(
            f"config.train_fraction={benchmark.part.fraction:g}: this benchmark takes no part of "
            "its data; its `open` must call `self.part.choose`"
        )
    declared, count = benchmark.declared_examples("train"), benchmark.num_examples("train")
    if declared not in (0, count) and not benchmark.part:
        held = f"{count:,} {benchmark.unit} to train"
        raise DataError(f"the data hold {held}, declared are {declared:,}")


def _note_progress(text: str) -> None:
    """Notes what the input does before its first batch; a signal may end the run there."""
    watchdog.doing(text)
    preemption.raise_if_requested()
