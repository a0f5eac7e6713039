"""--mode=doctor: checks everything that could stop a run at its start, and says what to do."""

import dataclasses
import functools
import glob
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
from etils import epath

from benchmarks.base import Benchmark
from common import entry
from common.errors import CheckpointError, DataError, HostError, UserError, one_line, visible
from engine import devices, mlperf, sharding
from engine.checkpoint import saver
from engine.checkpoint.manifest import OtherData
from engine.checkpoint.model_source import open_checkpoint
from engine.checks import check_plan, notes_of
from engine.cluster import guard, processes
from engine.locations import check_folder
from engine.plan import Plan, Programs, Settings, make_plan
from engine.run import check_count, host_bytes
from engine.step import TrainState, checkpoint_items

_LOCK = "/tmp/libtpu_lockfile"
_HOSTS_WAIT = 60.0  # seconds to wait for the doctors of the other hosts
_LABELS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


class Finding(NamedTuple):
    """What a check says; `fix` is empty where nothing is wrong."""

    status: Literal["ok", "warn", "fail"]
    text: str
    fix: str = ""


@dataclasses.dataclass
class Case:
    """The run that the checks are about."""

    settings: Settings
    scratch: str  # an empty folder that is deleted afterwards
    full: bool = False  # on the first host alone
    hosts: Any = None

    @functools.cached_property
    def cache(self) -> str:
        """The folder of the data's index: the workdir's if that can be written.

        A full check begins without the index of an earlier one: records may be damaged since then.
        """
        try:
            check_folder(self.settings.workdir)
        except CheckpointError:
            return self.scratch
        cache = epath.Path(self.settings.workdir) / "data_index"
        if self.full and cache.exists():
            cache.rmtree()
        return str(cache)

    @functools.cached_property
    def benchmark(self) -> Benchmark:
        return self.settings.load_benchmark(self.cache)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that the run reads."""
        return ("train",) if self.benchmark.no_evaluation else ("train", "eval")

    def open_data(self) -> Benchmark:
        """The benchmark with opened data; raises what is wrong with them."""
        for split in self.splits:
            self.benchmark.open(split)
        return self.benchmark

    @functools.cached_property
    def programs(self) -> Programs:
        """The run's; they read the data of `benchmark`, which are opened once."""
        made = Programs.make(self.settings, self.cache)
        return dataclasses.replace(made, benchmark=self.benchmark)

    @functools.cached_property
    def plan(self) -> Plan:
        """The run's plan; for the published number of examples if the data cannot be counted."""
        if self.settings.mlperf.format:
            mlperf.check_run(self.programs, True)
            declared = mlperf.declared(self.settings, self.open_data())
            self.programs = Programs.make(declared, self.cache)
        benchmark = self.programs.benchmark
        try:
            count = benchmark.open("train")
        except Exception:  # the check of the data says why
            count = benchmark.nominal_examples("train") or benchmark.open("train")
        return make_plan(self.programs.settings, benchmark, count)

    @functools.cached_property
    def state(self) -> TrainState:
        """The shapes of the initial state."""
        return self.programs.abstract_state(self.plan)

    @property
    def resumes(self) -> bool:
        """Whether the workdir has a checkpoint of the run."""
        steps = epath.Path(self.settings.workdir) / "checkpoints"
        return steps.exists() and any(
            step.name.isdigit() and int(step.name) for step in steps.iterdir()
        )


def run(settings: Settings, as_json: bool, full: bool = False, hosts: Any = None) -> int:
    """Checks this host for a run, prints the findings, and returns the exit code.

    With `as_json` it prints one JSON list instead of lines; with `full` it reads and checks all
    records, too. `hosts` are (group, facts) for `engine.cluster.processes.join`; None if this host
    is alone.
    """
    rows: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        is_first = not hosts or hosts[0].index == 0  # one host's index serves all of them
        case = Case(settings, scratch, full and is_first, hosts)
        for name, check in _CHECKS.items():
            try:
                findings = list(check(case))
            except Exception as error:  # of users, and of each file system
                failed = {row["check"] for row in rows if row["status"] == "fail"}
                if "workdir" in failed and name in _IN_WORKDIR and not isinstance(error, UserError):
                    continue  # it cannot be read, which that check has said
                fix = _FIXES.get(name, "see the message")
                findings = [Finding("fail", one_line(error), fix)]
            for status, text, fix in findings:
                failures = [row["text"] for row in rows if row["status"] == "fail"]
                if status == "fail" and text in failures:  # an earlier check has said it
                    continue
                rows.append({"status": status, "check": name, "text": text, "fix": fix})
                if not as_json:
                    hint = f"\n       -> {fix}" if fix else ""
                    print(visible(f"{_LABELS[status]}  {name}: {text}{hint}"), flush=True)
    failed, warned = (sum(row["status"] == status for row in rows) for status in ("fail", "warn"))
    if as_json:
        entry.result(json.dumps(rows, indent=2) + "\n")
    else:
        print(f"doctor: {failed} of {len(rows)} checks failed, {warned} warned")
    return 1 if failed else 0


def _versions(case: Case) -> Iterator[Finding]:
    version = devices.installed_version
    names = ("jax", "jaxlib", "libtpu", "flax", "orbax-checkpoint", "tensorflow-cpu")
    versions = ", ".join(f"{name} {version(name) or 'absent'}" for name in names)
    yield Finding("ok", f"Python {platform.python_version()}, {versions}")
    if devices.tpu_chips() and not version("libtpu"):
        yield Finding(
            "fail",
            "this machine has a TPU but libtpu is not installed",
            "bash scripts/setup.sh tpu && . .venv/bin/activate",
        )
    if version("tensorflow") and platform.machine() == "x86_64":  # the lock has it for ARM
        yield Finding(
            "fail" if devices.tpu_chips() else "warn",
            "the full tensorflow is installed and takes the TPU at import",
            "pip uninstall tensorflow; pip install --require-hashes -r requirements.txt",
        )


def _tpu_in_use(case: Case) -> Iterator[Finding]:
    """Finds other processes that have the TPU or its lock file open."""
    if not devices.tpu_chips():  # the lock file of a compiler for absent TPUs does not matter
        return
    holders = set()
    for descriptor in glob.glob("/proc/[0-9]*/fd/*"):
        pid = descriptor.split("/")[2]
        try:
            opened = os.readlink(descriptor)
            if pid != str(os.getpid()) and opened.startswith(("/dev/accel", "/dev/vfio/", _LOCK)):
                with open(f"/proc/{pid}/cmdline") as command:
                    holders.add(f"pid {pid} ({command.read().replace(chr(0), ' ').strip()[:80]})")
        except OSError:  # the process has ended, or another user owns it
            continue
    if holders:
        fix = "stop that process (kill PID), or wait until it has ended"
        yield Finding("fail", f"by {'; '.join(sorted(holders))}", fix)
    elif os.path.exists(_LOCK):
        text = f"{_LOCK} is left over: no process holds it"
        yield Finding("warn", text, f"if jax cannot start: sudo rm {_LOCK}")
    else:
        yield Finding("ok", "by no other process")


def _gpus(case: Case) -> Iterator[Finding]:
    if number := devices.count_gpus():
        text, fix = devices.gpu_obstacle()
        yield Finding("warn", text, fix) if text else Finding("ok", f"{number} of NVIDIA")


def _devices(case: Case) -> Iterator[Finding]:
    devices.check_platform()
    mesh = case.programs.mesh
    kind, chips = mesh.devices.flat[0].device_kind, sharding.num_chips(mesh)
    share = case.settings.train_batch_size // mesh.size
    text = f"{mesh.size} x {kind} ({chips} chips, {jax.process_count()} hosts), {share} per device"
    if case.settings.gradient_accumulation_steps == "auto":
        text += " in as many micro-batches as its memory needs"
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    yield Finding("ok", text + (f", {memory / 2**30:.1f} GiB each" if memory else ""))


def _workdir(case: Case) -> Iterator[Finding]:
    check_folder(case.settings.workdir)
    yield Finding("ok", f"{case.settings.workdir}: files can be written, listed and deleted")


def _data(case: Case) -> Iterator[Finding]:
    settings, benchmark = case.settings, case.open_data()
    train, *held_out = map(benchmark.num_examples, case.splits)
    check_count(benchmark)
    part = f" ({text})" if (text := benchmark.part.describe()) else ""
    yield Finding("ok", f"{train:,} {benchmark.unit} to train{part}, {sum(held_out):,} to evaluate")
    if train < settings.train_batch_size:
        text = f"a batch of {settings.train_batch_size} is more than one epoch"
        yield Finding("warn", text, "set a smaller --config.train_batch_size")


def _plan(case: Case) -> Iterator[Finding]:
    """Makes the plan, which the start of a run makes and checks with the same functions."""
    plan, programs = case.plan, case.programs
    check_plan(programs, plan, case.state, True)
    total, size = plan.total_steps, case.settings.train_batch_size
    unit, epochs = programs.benchmark.unit, total * size / plan.num_examples
    yield Finding("ok", f"{total:,} steps of {size:,} {unit} = {epochs:.2f} epochs")
    yield from (Finding("warn", note) for note in notes_of(plan))


def _checkpoint(case: Case) -> Iterator[Finding]:
    """Compares the run with the checkpoint from which it would resume."""
    if not case.resumes:
        return
    programs = case.programs
    data = [case.open_data().identity(split) for split in case.splits]
    items = checkpoint_items(case.state, programs.abstract_totals(case.plan, case.state))

    def compare(step: int) -> Any:
        return saver.compare(programs, checkpoints, step, items, case.plan.num_examples, data)

    checkpoints, choose = open_checkpoint(case.settings.workdir, "--workdir")
    step, (_, _, notes) = checkpoints.read(choose, compare)
    yield Finding("ok", f"the run would go on from step {step:,}")
    yield from (Finding("warn", note) for note in notes)


def _records(case: Case) -> Iterator[Finding]:
    """Reads every record as the run would, and leaves the index that the run then reads."""
    benchmark = case.benchmark
    for split in case.splits if case.full else ():
        try:
            errors = benchmark.check(split)
        except UserError as error:
            errors = [str(error)]
        for error in errors:
            yield Finding("fail", error, "repair that, or prepare the data again")
        if not errors:
            count = benchmark.num_examples(split)
            yield Finding("ok", f"the {split} split is fit: read all {count:,} {benchmark.unit}")
            for status, text, fix in benchmark.data_warnings(split):
                yield Finding("warn" if status == "warn" else "ok", text, fix)


def _memory(case: Case) -> Iterator[Finding]:
    needed = host_bytes(case.open_data(), case.settings, *case.splits)
    total, free = sum(needed.values()), guard.memory_free()
    text = f"input needs about {total / 1e9:.1f} GB of this host, {free / 1e9:.1f} GB are free"
    if total > 0.8 * free:
        yield Finding("fail", text, guard.less_memory(needed, case.settings.config))
    else:
        yield Finding("ok", text)


def _initial_weights(case: Case) -> Iterator[Finding]:
    if case.resumes:
        return
    if case.settings.init_from:
        weights, adoption = saver.read_weights(case.programs, case.state)
        try:
            notes = saver.compare_origin(case.programs, weights, adoption)
        except OtherData:
            raise
        except DataError:  # the check of the data has said it
            notes = []
        yield Finding("ok", f"{weights.source}: {adoption.summary}")
        yield from (Finding("warn", note) for note in notes)
        return
    case.programs.check_random_start()
    if note := case.settings.lacks_weights:
        yield Finding("warn", note, _WEIGHTS)


def _hosts(case: Case) -> Iterator[Finding]:
    """The doctors of all hosts join, as the run's processes would."""
    if case.hosts:
        group, facts = case.hosts
        try:
            processes.join(group, facts, _HOSTS_WAIT, case.settings.host_silence_seconds)
        except HostError as error:
            port = group.address.rpartition(":")[2]
            fix = f"start the doctor on all hosts at once, and open tcp:{port} between them"
            yield Finding("fail", str(error), fix)
        else:
            yield Finding("ok", f"{group.count} arrived at {group.address} and agree")


_WEIGHTS = "set --config.init_from to a workdir, one of its checkpoints, or a file of weights"
_CHECKS = {
    "versions": _versions,
    "TPU in use": _tpu_in_use,
    "hosts": _hosts,
    "GPUs": _gpus,
    "devices": _devices,
    "workdir": _workdir,
    "data": _data,
    "records": _records,
    "plan": _plan,
    "memory": _memory,
    "checkpoint": _checkpoint,
    "initial weights": _initial_weights,
}
_IN_WORKDIR = ("checkpoint", "initial weights")  # these look there first
_FIXES = {  # what to do where a check raises an error whose message does not say it
    "workdir": "choose another --workdir; in a bucket the VM's service account needs "
    "roles/storage.objectAdmin and roles/storage.legacyBucketReader, or roles/storage.admin",
    "data": "see the message; or set --config.data_dir, repair that, or prepare the data again; in "
    "a bucket the VM's service account needs roles/storage.objectViewer",
    "initial weights": _WEIGHTS,
}
