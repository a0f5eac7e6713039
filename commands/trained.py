"""Loads a trained model for the commands that use it: predict, demo, export and report.

A checkpoint's manifest holds the config of its run, so that a workdir alone describes its model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

import benchmarks
from benchmarks.base import Benchmark
from commands import evaluating
from common import foreign
from common.errors import CheckpointError, DataError
from configs import _loop
from engine import locations, resuming, weights
from engine.run import Settings, read_settings
from engine.weights import Weights


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model in a checkpoint.

    The manifest is read at once. The benchmark is made and the arrays are read when they are first
    used, so that a caller can refuse another kind of model before that.

    Attributes:
      source: the folder of the checkpoint.
      step: the training step after which it was written.
      config: the run's config, locked; `config.benchmark` says what the model is for.
      manifest: what `engine.start.Run.facts` wrote, and "tree", "checksums" and "versions".
    """

    source: str
    step: int
    config: Any
    manifest: dict[str, Any]
    _read: Callable[[], Weights]

    @functools.cached_property
    def benchmark(self) -> Benchmark:
        """The benchmark with the run's settings; ConfigError if they cannot work here."""
        return benchmarks.load(self.config, "")

    def check_data(self, accepted: bool, say: Callable[[str], None]) -> None:
        """Compares the model's classes with those that the folder of its data names now.

        It reads one small file, and none on gs:// for a model that lies elsewhere. An imported
        model has names of its own.

        Raises:
          OtherData: they differ, and `accepted` is False.
        """
        folder = self.config.get("data_dir", "")
        if "imported" in self.manifest or ("://" in folder and "://" not in self.source):
            return
        try:
            lines = resuming.other_meaning(self.manifest, self.benchmark.uses.data_meaning())
        except DataError as error:
            say(f"NOTE the data cannot be compared with the model's: {error}")
        else:
            resuming.refuse_other_data(
                lines, self.source, say, "" if accepted else "--accept_other_data"
            )

    def check_finite(self) -> None:
        """Raises CheckpointError if a weight is not finite, which suppression would not show."""
        for x in jax.tree.leaves((self.params, self.model_state)):
            if not np.isfinite(x.astype(np.float32)).all():
                raise CheckpointError(f"{self.source}: weights are not finite; the run diverged")

    def changed(self, **values: Any) -> Trained:
        """The same model with other values of its config, such as data_dir."""
        config = ml_collections.ConfigDict(self.config.to_dict())
        config.update(values)
        return dataclasses.replace(self, config=config.lock())

    def in_float32(self) -> Trained:
        """The same model, which computes in float32, whatever it was trained in."""
        return self.changed(precision="float32") if "precision" in self.config else self

    @property
    def params(self) -> Any:
        """The parameters as NumPy arrays, averaged if the run averages them.

        Raises:
          CheckpointError: the checkpoint is damaged.
        """
        return self._weights.params

    @property
    def model_state(self) -> Any:
        """The rest of the model, such as BatchNorm's statistics; as `params`."""
        return self._weights.model_state

    @functools.cached_property
    def _weights(self) -> Weights:
        return self._read()


def load(path: str, checkpoint: str = "latest", flag: str = "--workdir", **changes: Any) -> Trained:
    """Opens a trained model.

    Args:
      path: a workdir or WORKDIR/checkpoints/STEP; local or gs://.
      checkpoint: of a workdir: "latest", "best" (in the run's own evaluations) or a step.
      flag: the flag that `path` is from, for messages.
      **changes: values of the config that differ from the run's, such as data_dir.

    Raises:
      UserError: there is no such checkpoint, its manifest is damaged, or its benchmark is unknown.
    """
    path = locations.check_path(path, flag).rstrip("/")
    checkpoints, step = weights.find_checkpoint(path, flag)
    manifest = checkpoints.manifest(step)
    if checkpoint != "latest":
        if weights.split_path(path)[1] is not None:
            raise CheckpointError(f"--checkpoint={checkpoint}: {flag}={path} already names a step")
        step = evaluating.choose(checkpoints, path, manifest["target_metric"], checkpoint)
        manifest = checkpoints.manifest(step)
    config = config_of(manifest)
    config.update(changes)
    read = functools.partial(weights.read_step, checkpoints, step)
    return Trained(f"{checkpoints.directory}/{step}", step, config.lock(), manifest, read)


def settings(workdir: str, flag: str = "--workdir") -> Settings:
    """The settings of a run whose config is that of its newest checkpoint.

    Raises:
      UserError: there is no checkpoint, or its config cannot work here.
    """
    manifest = weights.peek_manifest(workdir)  # it needs neither Orbax nor the other hosts
    if manifest is None:
        return read_settings(load(workdir, flag=flag).config, workdir)  # this raises the reason
    return read_settings(config_of(manifest).lock(), workdir)


def load_foreign(
    path: str,
    recipe: Any,
    flag: str,
    keys: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> Trained | None:
    """Opens a file or folder of another library's weights; None if `path` is none.

    The model has no step and a manifest without "tree", "checksums" and "versions".

    Args:
      path: local or gs://; from the flag `flag`.
      recipe: a config for the keys that the weights do not decide.
      keys: values that the user has given to some of its keys.
      say: prints a line for the user: what the weights do not say, and what is assumed.

    Raises:
      UserError: the weights cannot be used.
    """
    is_name = foreign.is_name(path)
    path = foreign.fetch(path, flag)[0] if is_name else locations.check_path(path, flag)
    config, keys = ml_collections.ConfigDict(recipe), keys or {}
    config.update(keys)
    for note in benchmarks.settle_config(config, path, keys, whole=True, has_recipe=False):
        say(f"NOTE {note}")
    imported = benchmarks.load(config.lock(), "").uses.read_foreign(path)
    if imported is None:
        return None
    if "head" not in imported.params:
        raise CheckpointError(f"{flag}={path} has no classifier; --config.init_from takes it")
    manifest = {"benchmark": config.benchmark, "config": config.to_dict(), **imported.metadata}
    read = Weights(imported.source, imported.params, imported.model_state)
    return Trained(imported.source, 0, config, manifest, lambda: read)


def class_names(manifest: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """The names of a model's classes, numbers where single ones are empty; () if it has none.

    Args:
      manifest: of the model.
      count: how many classes it has; of 1,001 the first may be TensorFlow's "background".
    """
    names = tuple(manifest.get("class_names", ()))
    if len(names) == count - 1 == 1000:
        names = ("background", *names)
    if len(names) != count or not any(names):
        return ()
    return tuple(name or str(i) for i, name in enumerate(names))


def config_of(manifest: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The config of the run that wrote a checkpoint; ConfigError if its benchmark is unknown."""
    config = ml_collections.ConfigDict(_complete(benchmarks.restored_config(manifest)))
    # Whoever can write to that folder could have this machine run programs: it is our own, always.
    config.compilation_cache = _loop.get_config().compilation_cache
    config.tracker = ""  # only training has one, and older runs knew others
    return config


def _complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the keys of the loop that were unknown when it was written."""
    loop = _loop.get_config().to_dict()
    nested = {key: {**x, **values.get(key, {})} for key, x in loop.items() if isinstance(x, dict)}
    return {**loop, **values, **nested}
