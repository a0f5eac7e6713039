"""Checkpoints of a run: the only file that imports Orbax.

Each step is saved as three items: `model` (params, model_state, ema), `optimizer` (the rest of
the state) and `manifest` (JSON: the tree's shapes, dtypes and checksums, the config, versions).
The manifest is compared before Orbax restores, because Orbax casts dtypes without a word and its
own messages on a mismatch name no leaf; the checksums after, because Orbax does not notice a
changed byte in an array's file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from engine.cluster import processes, watchdog
from engine.manifest import checksums, describe, differences, pieces, versions
from errors import CheckpointError, one_line

_log = logging.getLogger("tpu_suite")
_SHOWN = 8  # differing leaves named in a message
_DELETED = "deleted"  # where local steps go first: renaming is atomic, deleting is not


@dataclasses.dataclass
class _Keep(checkpoint_managers.PreservationPolicy):
    """Keeps the newest `latest` steps and the best one.

    Not Orbax's `best_fn` with `max_to_keep`: that deletes the newest step when scores fall.
    """

    latest: int
    best: Callable[[], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        best, first = self.best(), len(checkpoints) - self.latest
        return [i >= first or c.step == best for i, c in enumerate(checkpoints)]


def check_folder(path: str) -> None:
    """Makes a folder and writes a file in it, to fail now rather than after hours.

    Raises:
      CheckpointError: it cannot be made or written to.
    """
    try:
        folder = epath.Path(path)
        if "://" in path and not epath.Path("/".join(path.split("/")[:3])).exists():
            raise FileNotFoundError("there is no such bucket")  # TensorFlow would wait for ever
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test.{uuid.uuid4().hex}"  # all hosts do this at once
        probe.write_text("")
        next(folder.iterdir(), None)  # the right to list
        probe.unlink()
    except Exception as error:  # each file system has errors of its own
        raise CheckpointError(f"cannot write to --workdir={path}: {one_line(error)}") from error


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, on the host: the averaged ones where the run kept an average."""

    source: str  # the checkpoint's folder
    params: Any
    model_state: Any


def load_weights(path: str) -> Weights:
    """Loads another model's weights, for `config.init_from`.

    Args:
      path: a workdir (its newest checkpoint is taken) or WORKDIR/checkpoints/STEP, local or gs://.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    parent, _, name = path.rstrip("/").rpartition("/")
    inside, step = (parent, int(name)) if name.isdigit() else (f"{path.rstrip('/')}/checkpoints", 0)
    if not epath.Path(inside).exists():
        raise CheckpointError(
            f"config.init_from={path}: there is no {inside}; give a workdir that has checkpoints, "
            "or WORKDIR/checkpoints/STEP"
        )
    checkpoints = Checkpointer(inside, keep=1, best=None)
    steps = checkpoints.steps()
    if not steps or step not in (0, *steps):
        raise CheckpointError(f"config.init_from={path}: {inside} has the checkpoints {steps}")
    step = step or steps[-1]
    model = checkpoints.load_model(step)
    weights = model.get("ema") or model
    checkpoints.close()
    return Weights(f"{inside}/{step}", weights["params"], weights.get("model_state", {}))


class Checkpointer:
    """The checkpoints under `directory` (local or gs://)."""

    def __init__(self, directory: str, *, keep: int, best: Callable[[], int | None] | None):
        """Opens or makes the folder.

        Args:
          directory: parent of the step folders.
          keep: how many of the newest steps stay.
          best: the step with the best score so far, which stays as well; None if not known. A
            `best` of None opens the folder for reading only.

        Raises:
          CheckpointError: the folder cannot be used, or `keep` is less than 1.
        """
        if keep < 1:
            raise CheckpointError(f"config.keep_checkpoints={keep} must be at least 1")
        self.directory = directory
        self._local = "://" not in directory
        self._writes = best is not None
        self._newest = ""  # the folder of the step last saved
        options = (
            ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
            if best is None
            else ocp.CheckpointManagerOptions(
                preservation_policy=_Keep(keep, best),
                cleanup_tmp_directories=True,
                todelete_subdir=_DELETED,
                # Else the process would live on for minutes where no folder can be made.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            )
        )
        # The manager begins with jax's first collective, which on CPUs waits 30 s for the others.
        processes.barrier("waiting for the other hosts to open the checkpoints")
        try:
            folder = epath.Path(directory)
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError("it is not a folder")
            self._manager = ocp.CheckpointManager(folder, options=options)
        except Exception as error:  # for gs://, TensorFlow's own kinds
            raise CheckpointError(
                f"cannot use {directory} for checkpoints: {one_line(error)}"
            ) from error
        self._fault: Exception | None = None  # of the save under way, on this host
        if jax.process_count() > 1:
            self._note_faults()

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first; ends a save under way and reads the folder anew.

        Raises:
          CheckpointError: the folder cannot be read, or the last save failed.
        """
        self.wait()
        for tries_left in (2, 1, 0):
            try:
                self._manager.reload()
                break
            except Exception as error:  # a training run may delete a step while this reads it
                if not tries_left:
                    raise CheckpointError(
                        f"cannot list {self.directory}: {one_line(error)}"
                    ) from error
        return sorted(self._manager.all_steps())

    def save(self, step: int, model: Any, optimizer: Any, facts: dict[str, Any]) -> None:
        """Begins to save in the background; errors of the save before this one surface here.

        Args:
          step: optimizer steps done.
          model: tree of arrays that evaluation needs.
          optimizer: tree of arrays that only training needs.
          facts: JSON facts that go into the manifest (config, class names, ...).

        Raises:
          CheckpointError: this save cannot begin, or the one before it failed.
        """
        items = {"model": model, "optimizer": optimizer}
        manifest = {
            **facts,
            "step": step,
            "tree": {name: describe(item) for name, item in items.items()},
            "checksums": {name: checksums(item) for name, item in items.items()},
            "versions": versions(),
        }
        self.wait()
        self._check_space(sum(x.nbytes for x in jax.tree.leaves(items)))
        try:
            self._newest = str(epath.Path(self.directory) / str(step))
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    model=ocp.args.StandardSave(model),
                    optimizer=ocp.args.StandardSave(optimizer),
                    manifest=ocp.args.JsonSave(manifest),
                ),
                force=True,
            )
        except Exception as error:  # Orbax raises whatever its threads and file systems raise
            raise self._failure(f"checkpoint {step} could not be saved", error) from error

    def wait(self) -> None:
        """Waits until the last save is complete and the steps it replaced are gone.

        Raises:
          CheckpointError: it failed.
        """
        try:
            with watchdog.during(f"writing {self._newest or self.directory}"):
                self._wait()
        except Exception as error:
            raise self._failure("the last checkpoint could not be saved", error) from error
        if self._writes and self._local and jax.process_index() == 0:
            shutil.rmtree(epath.Path(self.directory) / _DELETED, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Deletes a complete step; cut short, it leaves none that only looks complete.

        Raises:
          CheckpointError: it cannot be deleted.
        """
        try:
            if not self._local:  # objects go one by one: first the one that says "complete"
                (epath.Path(self.directory) / str(step) / "commit_success.txt").unlink()
            self._manager.delete(step)
        except Exception as error:  # each file system has errors of its own
            raise self._failure(f"checkpoint {step} could not be deleted", error) from error
        self.wait()

    def manifest(self, step: int) -> dict[str, Any]:
        """What was saved about a step.

        Raises:
          CheckpointError: there is nothing, or not what `save` writes.
        """
        path = epath.Path(self.directory) / str(step)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(manifest=ocp.args.JsonRestore())
            )
            found = restored["manifest"]
            if not isinstance(found, dict) or not {"tree", "checksums"} <= found.keys():
                raise ValueError("its manifest describes no arrays")
            if found.get("step") != step:
                raise ValueError(f"its manifest is that of step {found.get('step')}")
        except Exception as error:  # what Orbax and JSON raise on damage is not documented
            raise CheckpointError(
                f"{path} was not written by this program or is damaged: {one_line(error)}"
            ) from error
        return found

    def compare(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        """Returns a step's manifest if it holds what `items` (as for `restore`) says.

        Raises:
          CheckpointError: it holds something else; the differing leaves are named.
        """
        manifest = self.manifest(step)
        for name, wanted in items.items():
            saved = manifest["tree"].get(name, {})
            wrong = list(differences(saved, describe(wanted)))
            if wrong:
                more = len(wrong) - _SHOWN
                lines = wrong[:_SHOWN] + ([f"... and {more} more"] if more > 0 else [])
                raise CheckpointError(
                    f"{self.directory}/{step} holds another model than the config describes; use "
                    "another --workdir or the config it was trained with:\n  " + "\n  ".join(lines)
                )
        return manifest

    def restore(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        """Restores items ("model", "optimizer") into what `items` says.

        Args:
          step: a complete checkpoint.
          items: trees of `jax.ShapeDtypeStruct` with shardings, by item.

        Raises:
          CheckpointError: the checkpoint holds something else or is damaged; the differing leaves
            are named.
        """
        manifest = self.compare(step, items)
        arguments = {name: ocp.args.StandardRestore(tree) for name, tree in items.items()}
        restored = self._restore(step, arguments)
        self._check_damage(step, manifest, restored)
        return restored

    def _restore(self, step: int, arguments: dict[str, Any]) -> dict[str, Any]:
        """The items that Orbax restores for its arguments."""
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**arguments))
        except Exception as error:
            raise CheckpointError(
                f"{self.directory}/{step} cannot be restored: {one_line(error)}; the steps there "
                f"are {self.steps()}"
            ) from error
        return {name: restored[name] for name in arguments}

    def _check_damage(self, step: int, manifest: dict[str, Any], items: dict[str, Any]) -> None:
        """Refuses arrays that differ from the checksums of the manifest."""
        for name, item in items.items():
            saved = manifest["checksums"].get(name, {})
            for leaf, checksum in checksums(item).items():
                if checksum is not None and saved.get(leaf) not in (checksum, None):
                    raise CheckpointError(
                        f"{self.directory}/{step} is damaged: {leaf} is not what was saved; the "
                        f"steps there are {self.steps()}"
                    )

    def load_model(self, step: int) -> dict[str, Any]:
        """The item "model" of a step as it was saved, with its arrays in this host's memory.

        Raises:
          CheckpointError: the checkpoint is damaged or was not written by this program.
        """
        manifest = self.manifest(step)
        tree: dict[str, Any] = {"params": {}, "model_state": {}, "ema": {}}  # some may be empty
        for name, text in manifest["tree"]["model"].items():
            dtype, _, shape = text.removesuffix("]").partition("[")
            sizes = tuple(map(int, filter(None, shape.split(","))))
            branch, *parents = tree, *name.split("/")[:-1]
            for parent in parents:
                branch = branch.setdefault(parent, {})
            # A view of one zero: it only says the shape and that the array belongs on the host.
            zero = np.zeros((), jax.numpy.dtype(dtype))
            branch[name.rpartition("/")[2]] = np.broadcast_to(zero, sizes)
        items = self._restore(step, {"model": ocp.args.StandardRestore(tree)})
        self._check_damage(step, manifest, items)
        return items["model"]

    def verify(self, step: int, items: dict[str, Any]) -> None:
        """Reads a step back and compares it, bit for bit, with the arrays in `items`.

        Raises:
          CheckpointError: it cannot be read or is not the same.
        """
        self.wait()
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), items
        )
        restored = jax.tree.leaves(self.restore(step, wanted))
        for (path, value), again in zip(
            jax.tree_util.tree_leaves_with_path(items), restored, strict=True
        ):
            if pieces(value) != pieces(again):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise CheckpointError(f"{self.directory}/{step} reads back differently at {name}")

    def newer(self, than: int, timeout: float, stop: Callable[[], None]) -> int | None:
        """The next step after `than`, waiting up to `timeout` seconds; None if none came.

        `stop` is called while waiting and may raise.
        """
        begun = time.monotonic()
        while True:
            steps = [s for s in self.steps() if s > than]
            if steps:
                return steps[0]
            if time.monotonic() - begun > timeout:
                return None
            for _ in range(10):
                stop()
                time.sleep(0.2)

    def close(self) -> None:
        """Waits for background work and releases it; a failure there is only told.

        A run that ends well has called `verify` before; one that fails has its own error to show.
        """
        for end in (self.wait, self._manager.close):
            try:
                end()
            except Exception as error:
                known = isinstance(error, CheckpointError)
                _log.error("%s", error if known else one_line(error))

    def _note_faults(self) -> None:
        """Learns of a failed write at once, where Orbax would first wait for all other hosts.

        They wait for this one to commit, and so nobody would ever end.
        """
        write = self._manager._wait_for_checkpointers

        def noted() -> None:
            try:
                write()
            except Exception as error:  # whatever Orbax's threads raise
                self._fault = error
                raise

        self._manager._wait_for_checkpointers = noted

    def _wait(self) -> None:
        """`wait_until_finished`, but for a fault that `_note_faults` found."""
        if jax.process_count() == 1:
            self._manager.wait_until_finished()
            return
        ended: list[Exception | None] = []

        def wait() -> None:
            try:
                self._manager.wait_until_finished()
                ended.append(None)
            except Exception as error:  # whatever it is, the thread that waits raises it
                ended.append(error)

        thread = threading.Thread(target=wait, daemon=True, name="waiting for a checkpoint")
        thread.start()
        while not ended:
            if self._fault:
                raise self._fault
            thread.join(0.1)
        if ended[0]:
            raise ended[0]

    def _check_space(self, needed: int) -> None:
        """Says that a local disk is full before Orbax's threads say it a hundred times."""
        if not self._local:
            return
        needed += 1 << 20  # names, indices
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise self._failure("nothing can be saved", error) from error
        if free < needed:
            raise self._failure(
                "the disk is full, so that nothing more can be saved",
                OSError(f"a checkpoint takes {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} are free"),
            )

    def _failure(self, what: str, error: Exception) -> CheckpointError:
        with contextlib.suppress(OSError):
            self._manager.reload()  # Orbax has already forgotten what it did not delete
        have = self._manager.all_steps()
        kept = f"the newest complete one is {max(have)}" if have else "there is none before it"
        return CheckpointError(f"{what} in {self.directory}: {one_line(error)}; {kept}")
