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
import importlib.metadata
import json
import logging
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from engine import activity
from engine.errors import one_line

_LIBRARIES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "tensorflow-cpu")
_log = logging.getLogger("tpu_suite")
_SHOWN = 8  # differing leaves named in a message
_DELETED = "deleted"  # where local steps go first: renaming is atomic, deleting is not


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message says which and why."""


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
        try:
            folder = epath.Path(directory)
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError("it is not a folder")
            self._manager = ocp.CheckpointManager(folder, options=options)
        except Exception as error:  # for gs://, TensorFlow's own kinds
            raise CheckpointError(
                f"cannot use {directory} for checkpoints: {one_line(error)}"
            ) from error

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
            "checksums": {name: _checksums(item) for name, item in items.items()},
            "versions": _versions(),
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
            with activity.doing(f"writing {self._newest or self.directory}"):
                self._manager.wait_until_finished()
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
            differences = list(_differences(saved, describe(wanted)))
            if differences:
                more = len(differences) - _SHOWN
                lines = differences[:_SHOWN] + ([f"... and {more} more"] if more > 0 else [])
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
        args = {name: ocp.args.StandardRestore(tree) for name, tree in items.items()}
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        except Exception as error:
            raise CheckpointError(
                f"{self.directory}/{step} cannot be restored: {one_line(error)}; the steps there "
                f"are {self.steps()}"
            ) from error
        for name in items:
            saved = manifest["checksums"].get(name, {})
            for leaf, checksum in _checksums(restored[name]).items():
                if checksum is not None and saved.get(leaf) not in (checksum, None):
                    raise CheckpointError(
                        f"{self.directory}/{step} is damaged: {leaf} is not what was saved; the "
                        f"steps there are {self.steps()}"
                    )
        return {name: restored[name] for name in items}

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
            if _pieces(value) != _pieces(again):
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


def describe(tree: Any) -> dict[str, str]:
    """{"params/conv_stem/kernel": "float32[7,7,3,64]", ...} of arrays or ShapeDtypeStructs."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"
        )
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _pieces(x: jax.Array) -> list[bytes]:
    """The bytes of an array's distinct pieces on this process's devices."""
    distinct = {str(shard.index): shard.data for shard in x.addressable_shards}
    return [np.asarray(data).tobytes() for data in distinct.values()]


def _checksums(tree: Any) -> dict[str, int | None]:
    """{"params/conv_stem/kernel": CRC-32 of its bytes}; None if no process holds it whole."""

    def checksum(x: jax.Array) -> int | None:
        if x.is_fully_replicated:
            x = x.addressable_data(0)
        return zlib.crc32(np.asarray(x).tobytes()) if x.is_fully_addressable else None

    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): checksum(x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _differences(saved: dict[str, str], wanted: dict[str, str]) -> Iterator[str]:
    for name in sorted(saved.keys() | wanted.keys()):
        have, want = saved.get(name, "nothing"), wanted.get(name, "nothing")
        if have != want:
            yield f"{name}: the checkpoint has {have}, the config wants {want}"


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys that differ between two trees of JSON values, in words."""
    old, new = _flat(then), _flat(json.loads(json.dumps(now)))
    return [
        f"{key} was {old.get(key)!r}, is now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        found |= _flat(value, name + ".") if isinstance(value, dict) else {name: value}
    return found


def _versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
