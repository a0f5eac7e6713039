"""Writes checkpoints and restores them.

This is the only file that imports Orbax. A checkpoint has three items: `model` (params,
model_state, ema), `optimizer` (the rest of the state) and `manifest`, the JSON that
`engine.checkpoint.manifest.Manifest` lists.

Shapes and dtypes are compared before Orbax restores, because Orbax casts dtypes silently and its
messages name no array. Checksums are compared after Orbax has restored, because Orbax does not
notice a changed byte in an array's file.
"""

import contextlib
import dataclasses
import logging
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from orbax.checkpoint import checkpoint_managers
from orbax.checkpoint._src.serialization import tensorstore_utils as inner

from common import locks
from common.errors import RESTART, CheckpointError, one_line
from common.trees import by_name
from engine import devices, environment, sharding
from engine.checkpoint import manifest as manifests
from engine.cluster import processes, watchdog
from engine.report.history import History

_log = logging.getLogger("tpu_suite")
_MAX_LINES = 8  # differing arrays that a message names
_ATTEMPTS = 20  # to read a checkpoint that a run deletes meanwhile
# Orbax lets every replica write a slice of each array, and compiles a program for each shape to cut
# it, which takes seconds at the first save. Only slices of so many bytes are worth it.
_LEAST_SLICE = 1 << 20
_DELETED = "deleted"  # local steps are moved here first: renaming is atomic, deleting is not
T = TypeVar("T")


@dataclasses.dataclass
class _Keep(checkpoint_managers.PreservationPolicy):
    """Keeps the newest `latest` steps and the best one.

    Orbax's `best_fn` with `max_to_keep` would delete the newest step when scores fall.
    """

    latest: int
    best: Callable[[], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        best, first = self.best(), len(checkpoints) - self.latest
        return [i >= first or c.step == best for i, c in enumerate(checkpoints)]


def _options(keep: int, best: Callable[[], int | None] | None) -> ocp.CheckpointManagerOptions:
    if best is None:
        return ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_LEAST_SLICE)
    ocp.type_handlers.register_type_handler(jax.Array, arrays, override=True)
    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        # Orbax's thread calls this in a `finally` after a failed write. It would wait for the
        # other hosts for ever, because they wait for this host to commit.
        error = sys.exception()
        if error is not None and threading.current_thread() is not threading.main_thread():
            raise error
        wait(key=key, timeout_ms=timeout_ms)

    return ocp.CheckpointManagerOptions(
        preservation_policy=_Keep(keep, best),
        cleanup_tmp_directories=True,
        todelete_subdir=_DELETED,
        async_options=ocp.AsyncOptions(
            barrier_sync_fn=barrier,
            # A process would live on for minutes if the folder of a step could not be made.
            create_directories_asynchronously=False,
        ),
    )


class _ManifestHandler(ocp.JsonCheckpointHandler):
    """Computes the checksums of the manifest in Orbax's thread, while the devices train."""

    async def _save_fn(self, x: Any, directory: epath.Path) -> None:
        checksums = {name: manifests.checksums(item) for name, item in x["checksums"].items()}
        await super()._save_fn({**x, "checksums": checksums}, directory)

    @classmethod
    def typestr(cls) -> str:
        return ocp.JsonCheckpointHandler.typestr()  # which any program with Orbax has


class Damaged(CheckpointError):
    """A checkpoint cannot be read as it was written."""


class Deleted(CheckpointError):
    """A run, or somebody else, deleted a checkpoint while this process read it."""


class Checkpointer:
    """The checkpoints in one folder, local or gs://."""

    def __init__(self, directory: str, *, keep: int, best: Callable[[], int | None] | None):
        """Opens the folder that has a folder for each step, and makes it where it is missing.

        The `keep` newest steps stay, and the step that `best` returns: the one with the best score
        so far, or None. Without this function the folder is opened for reading only.
        CheckpointError if the folder cannot be used.
        """
        self._is_local = "://" not in directory
        directory = os.path.abspath(directory) if self._is_local else directory  # for Orbax
        self.directory = directory
        self._writes = best is not None
        self._newest = directory  # folder of the step that was saved last
        # TensorStore 0.1.86 never frees its answers, 40 kB per save; Orbax only logs them.
        tensorstore.experimental_collect_matching_metrics = lambda *_: []
        # The manager begins with jax's first collective, which on CPUs waits 30 s for the others.
        processes.barrier("waiting for the other hosts to open the checkpoints")
        devices.open_platform()
        registry, handler = ocp.DefaultCheckpointHandlerRegistry(), _ManifestHandler()
        for arguments in (ocp.args.JsonSave, ocp.args.JsonRestore):
            registry.add("manifest", arguments, handler)
        try:
            folder = epath.Path(directory)
            with watchdog.during(f"opening {directory}"):
                if folder.exists() and not folder.is_dir():
                    raise NotADirectoryError("it is not a folder")
                if self._writes and self._is_local and not locks.has_locks(f"{folder.parent}"):
                    # TensorStore locks a file by another one beside it; Orbax has no option.
                    contexts: Any = inner._BASE_TS_CONTEXT, inner._DEFAULT_OCDBT_TS_CONTEXT
                    for context in contexts:
                        context["file_io_locking"] = {"mode": "lockfile"}
                self._manager = ocp.CheckpointManager(
                    folder, options=_options(keep, best), handler_registry=registry
                )
        except Exception as error:  # for gs://, TensorFlow raises its own types
            problem = f"cannot use {directory} for checkpoints: {one_line(error)}"
            raise CheckpointError(problem) from error

    def steps(self) -> list[int]:
        """Waits for the last save, and returns the complete steps of the folder, oldest first."""
        self.wait()
        for is_last in (False, False, True):
            try:
                with watchdog.during(f"listing {self.directory}"):
                    self._manager.reload()
                if self._writes or self._manager.all_steps():
                    break  # else a training run may have replaced its only step at this moment
            except Exception as error:  # a training run may delete a step at this moment
                if is_last:
                    problem = f"cannot list {self.directory}: {one_line(error)}"
                    raise CheckpointError(problem) from error
        return sorted(self._manager.all_steps())

    def save(self, step: int, model: Any, optimizer: Any, manifest: Mapping[str, Any]) -> None:
        """Waits for the last save, then starts to save in the background.

        `model` has the arrays that evaluation needs, `optimizer` the arrays that only training
        needs; `manifest` is what the manifest says besides the arrays. CheckpointError if this save
        cannot begin, or the last one failed.
        """
        items = {"model": model, "optimizer": optimizer}
        self.wait()
        self._check_space(sum(x.nbytes for x in jax.tree.leaves(items)))
        is_writer = jax.process_index() == 0  # of the manifest
        manifest = {
            **manifest,
            "step": step,
            "tree": {name: manifests.describe_arrays(item) for name, item in items.items()},
            # `_ManifestHandler` computes them.
            "checksums": {k: manifests.host_copies(x) for k, x in items.items() if is_writer},
            "versions": environment.versions(),
        }
        self._newest = str(epath.Path(self.directory) / str(step))
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    model=ocp.args.StandardSave(model),
                    optimizer=ocp.args.StandardSave(optimizer),
                    manifest=ocp.args.JsonSave(manifest),
                ),
                force=True,
            )
        except Exception as error:  # Orbax raises any type that its threads raise
            raise self._failure(f"checkpoint {step} could not be saved", error) from error

    def wait(self) -> None:
        """Waits until the last save is complete and the steps that it replaced are deleted."""
        try:
            with watchdog.during(f"writing {self._newest}"):
                self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure("the last checkpoint could not be saved", error) from error
        if self._writes and self._is_local and jax.process_index() == 0:
            shutil.rmtree(epath.Path(self.directory) / _DELETED, ignore_errors=True)

    def manifest(self, step: int) -> dict[str, Any]:
        """Reads the manifest of a step, which has the keys of `Manifest`."""
        try:
            item = ocp.args.Composite(manifest=ocp.args.JsonRestore())
            with watchdog.during(f"reading {self.directory}/{step}/manifest"):
                manifest = self._manager.restore(step, args=item)["manifest"]
            manifests.check_manifest(manifest)
            if manifest.get("step") != step:
                raise ValueError(f"its manifest belongs to step {manifest.get('step')}")
        except Exception as error:  # Orbax does not document what it raises on damage
            problem = "was not written by this program or is damaged"
            raise self._unreadable(step, problem, ["manifest"], error) from error
        return manifest

    def _unreadable(
        self, step: int, problem: str, items: Sequence[str], error: Exception
    ) -> CheckpointError:
        """The error of a step that cannot be read; it may be intact if gs:// does not answer."""
        folder = f"{self.directory}/{step}"
        paths = [f"{folder}/{item}" for item in items]
        if reason := watchdog.no_answer(error, paths):
            text = f"cannot read {paths[0]}, which may be intact: {reason}"
            return CheckpointError(text, RESTART)
        if not epath.Path(folder).exists():
            return Deleted(f"{folder} was deleted before it was read")
        return Damaged(f"{folder} {problem}: {one_line(error)}")

    def read(
        self, choose: Callable[[], int], reading: Callable[[int], T], first: int | None = None
    ) -> tuple[int, T]:
        """(step, what `reading` makes of it) for the step `first`, else the one of `choose`.

        A run that trains may delete that step meanwhile: then it reads the one that `choose`
        returns next. All hosts read the same step.
        """
        step, result = sharding.broadcast(choose() if first is None else first), None
        for _ in range(_ATTEMPTS):
            failure = None
            try:
                result = reading(step)
            except (Damaged, Deleted) as error:
                failure = error
            if not sharding.any_process(failure is not None):
                return step, result  # type: ignore[return-value] (it was read)
            before, step = step, sharding.broadcast(choose())
            if step == before:
                raise failure or CheckpointError(f"another host cannot read checkpoint {step}")
        raise CheckpointError(
            f"a run deletes the checkpoints in {self.directory} before they can be read; let it "
            "keep more (--config.keep_checkpoints), or stop it meanwhile"
        )

    def choose(self, wanted: str, best_by: str = "") -> int:
        """The step that --checkpoint names: latest, best in the run's evaluations, or a number.

        The best is by the score `best_by`; "" is the one by which the run chooses it.
        """
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"no checkpoint in {self.directory}; is --workdir right?")
        if wanted == "latest":
            return steps[-1]
        if wanted == "best":
            _, newest = self.read(lambda: self.choose("latest"), self.manifest)
            history = History(os.path.dirname(self.directory), writes=False)
            history.restore(newest.get("evaluations", []))
            best_by, steps = best_by or newest.get("target_metric", ""), self.steps()
            best, chosen = history.best(best_by), history.best(best_by, among=steps)
            if chosen != best and chosen is not None:
                text = "NOTE by %s step %d is better than %d; its checkpoint is deleted"
                _log.info(text, best_by, best, chosen)
            chosen = best if chosen is None else chosen
            wanted, others = f"best, step {chosen},", "latest"
            if chosen is None:
                wanted = "best, of a run without evaluations,"
        else:
            chosen, others = int(wanted) if wanted.isdigit() else None, "latest, best"
        if chosen not in steps:
            raise CheckpointError(
                f"--checkpoint={wanted} is not in {self.directory}; use {others} or one of {steps}"
            )
        return chosen

    def compare(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        """Returns a step's manifest if its arrays have the names, shapes and dtypes of `items`.

        CheckpointError names the arrays that differ, or says that the checkpoint is damaged.
        """
        try:
            manifest = self.manifest(step)
        except Damaged as error:
            raise Damaged(f"{error}; {self._advice(step, items)}") from error
        for name, expected in items.items():
            saved = manifest["tree"].get(name, {})
            lines = list(manifests.array_differences(saved, manifests.describe_arrays(expected)))
            if len(lines) > _MAX_LINES:
                lines[_MAX_LINES:] = [f"... and {len(lines) - _MAX_LINES} more"]
            if lines:
                raise CheckpointError(
                    f"{self.directory}/{step} holds another model than the config describes; use "
                    "another --workdir or the config it was trained with:\n  " + "\n  ".join(lines)
                )
        return manifest

    def restore(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        """Restores items of a complete step, after `compare`.

        `items` is {"model" or "optimizer": tree of arrays or `jax.ShapeDtypeStruct`}; the restored
        arrays get their shardings.
        """
        manifest = self.compare(step, items)
        try:
            return self._restore(step, items, manifest)
        except Damaged as error:
            raise Damaged(f"{error}; {self._advice(step, items)}") from error

    def _advice(self, step: int, items: dict[str, Any]) -> str:
        """How to go on from the newest intact checkpoint before a damaged one."""
        older = [number for number in reversed(self.steps()) if number < step]
        if jax.process_count() > 1:  # the other hosts do not take part in further reading
            intact, state = next(iter(older), None), "comes before it and was not checked"
        else:
            intact = next((number for number in older if self._is_intact(number, items)), None)
            state = "is intact"
        if intact is None:
            which = f"none of the older checkpoints {older}" if older else "no older checkpoint"
            return f"{which} is intact" + (f". {self.way_back_to(-1)}" if self._writes else "")
        if not self._writes:
            return f"checkpoint {intact} {state}"
        return f"checkpoint {intact} {state}. {self.way_back_to(intact)}"

    def way_back_to(self, step: int) -> str:
        """The command that moves all checkpoints after a step, -1 for none, away, in words."""
        parent, _, name = self.directory.rpartition("/")
        newer = [f"{self.directory}/{number}" for number in self.steps() if number > step]
        aside = shlex.quote(f"{parent}/damaged_{name}")
        move = f"mkdir -p {aside} && mv" if self._is_local else "gcloud storage mv"
        aim = "go on from it" if step >= 0 else "begin again"
        return f"To {aim}, type {move} {shlex.join(newer)} {aside}/ and then the same command again"

    def _is_intact(self, step: int, items: dict[str, Any]) -> bool:
        try:
            self._restore(step, items, self.manifest(step))
        except CheckpointError:
            return False
        return True

    def _restore(self, step: int, items: dict[str, Any], manifest: Any) -> dict[str, Any]:
        """Restores items and compares them with the checksums of the manifest."""
        arguments = {name: ocp.args.StandardRestore(tree) for name, tree in items.items()}
        try:
            with watchdog.during(f"reading {self.directory}/{step}"):
                restored = self._manager.restore(step, args=ocp.args.Composite(**arguments))
        except Exception as error:
            problem = "is damaged and cannot be restored"
            raise self._unreadable(step, problem, [*items], error) from error
        for name in items:
            saved = manifest["checksums"].get(name, {})
            for leaf, x in by_name(restored[name]).items():
                if isinstance(x, jax.Array) and x.is_fully_replicated:
                    x = x.addressable_data(0)  # which takes the copy with it
                checksum = manifests.checksums(manifests.host_copies({leaf: x}))[leaf]
                if checksum is not None and saved.get(leaf) not in (checksum, None):
                    raise Damaged(
                        f"{self.directory}/{step} is damaged: {leaf} differs from its checksum"
                    )
        return {name: restored[name] for name in items}

    def verify(self, step: int, items: dict[str, Any]) -> None:
        """Reads a step back; CheckpointError unless it is, bit for bit, the arrays in `items`."""
        self.wait()
        restored = by_name(self.restore(step, items))
        for name, value in by_name(items).items():
            pieces, others = map(manifests.array_pieces, (value, restored[name]))
            if len(pieces) != len(others) or not all(map(np.array_equal, pieces, others)):
                raise CheckpointError(f"{self.directory}/{step} reads back differently at {name}")

    def close(self) -> None:
        """Waits for background work and releases it; a failure is only logged.

        A run that ends well has called `verify` before; a run that fails has its own error to show.
        """
        for end in (self.wait, self._manager.close):
            try:
                end()
            except Exception as error:
                _log.error("%s", one_line(error))

    def _check_space(self, needed: int) -> None:
        """Refuses to save where a local disk has less than `needed` bytes and 1 MiB of names."""
        if not self._is_local:
            return
        needed += 1 << 20
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise self._failure("nothing can be saved", error) from error
        if free < needed:
            raise self._failure(
                "the disk is full, so that nothing more can be saved",
                OSError(f"a checkpoint takes {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} are free"),
            )

    def _failure(self, problem: str, error: Exception) -> CheckpointError:
        with contextlib.suppress(OSError):
            self._manager.reload()  # Orbax has already forgotten the steps that it did not delete
        steps = self._manager.all_steps()
        newest = f"the newest complete one is {max(steps)}" if steps else "there is none before it"
        return CheckpointError(f"{problem} in {self.directory}: {one_line(error)}; {newest}")
