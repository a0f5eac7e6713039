"""Opens models: says what a path or a name means, and returns what can be built from it.

A path is local or gs://. It means, in this order:

* a file of another library's weights: such a file, a prefix of TensorFlow's, a folder with one, or
  a name, `hf-hub:OWNER/NAME` or `https://...`, which is downloaded; see `common.foreign`;
* a checkpoint of this program: WORKDIR/checkpoints/STEP, or WORKDIR, whose newest one it is unless
  --checkpoint names another. Its manifest holds the config of its run, so that a workdir alone
  describes its model.
"""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import ml_collections
import numpy as np
from etils import epath

import benchmarks
from benchmarks.base import Benchmark
from common import foreign
from common.errors import CheckpointError, ConfigError, DataError, parse_json
from configs import _loop
from engine import locations
from engine.checkpoint import manifest as manifests
from engine.checkpoint.checkpointer import Checkpointer
from engine.plan import Settings, read_settings

_log = logging.getLogger("tpu_suite")


class Weights(NamedTuple):
    """The weights of a checkpoint as NumPy arrays: their average where the run kept one."""

    source: str  # the folder of the checkpoint
    params: Any
    model_state: Any
    manifest: Mapping[str, Any] = {}  # of the checkpoint; another library's weights have none


def read_step(checkpoints: Checkpointer, step: int) -> Weights:
    """Reads the weights of one step."""
    manifest = checkpoints.manifest(step)
    description = manifests.placeholders(manifest["tree"]["model"])
    model = {"params": {}, "model_state": {}, "ema": {}} | description
    if model["ema"]:
        model["ema"] = {"model_state": {}} | model["ema"]
    model = checkpoints.restore(step, {"model": model})["model"]
    weights, source = model["ema"] or model, f"{checkpoints.directory}/{step}"
    return Weights(source, weights["params"], weights["model_state"], manifest)


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model.

    The manifest is read at once. The benchmark is made and the arrays are read when they are first
    used, so that a caller can refuse another kind of model before that.
    """

    # The folder of the checkpoint, or the file of another library's weights. Where a run deletes
    # that checkpoint before its arrays are read, they are of the one that replaced it.
    source: str
    step: int  # the training step after which it was written; 0 for a file
    config: Any  # the run's config, locked; `config.benchmark` says what the model is for
    manifest: dict[str, Any]  # with the keys of `Manifest`; a file has no arrays' descriptions
    _read: Callable[[], tuple[int, Weights]]  # the step, and its arrays

    @functools.cached_property
    def benchmark(self) -> Benchmark:
        """The benchmark with the run's settings; ConfigError if they cannot work here."""
        return benchmarks.load(self.config, "")

    @property
    def workdir(self) -> str:
        """The workdir of the run whose checkpoint it is."""
        return os.path.dirname(os.path.dirname(self.source))

    def check_finite(self) -> None:
        """Raises CheckpointError if a weight is not finite, which suppression would not show."""
        for x in jax.tree.leaves((self.params, self.model_state)):
            if not np.isfinite(x.astype(np.float32)).all():
                raise CheckpointError(f"{self.source}: weights are not finite; the run diverged")

    def check_data(self, accepted: bool) -> None:
        """Raises OtherData if the model and its data have different classes, unless `accepted`.

        It reads one small file; if that is on gs:// and the model is not, it reads nothing. An
        imported model has other names than its data.
        """
        folder = self.config.get("data_dir", "")
        if "imported" in self.manifest or ("://" in folder and "://" not in self.source):
            return
        try:
            lines = manifests.other_meaning(self.manifest, self.benchmark.uses.data_meaning())
        except DataError as error:
            _log.info("NOTE the data cannot be compared with the model's: %s", error)
            return
        flag = "" if accepted else "--accept_other_data"
        for note in manifests.refuse_other_data(lines, self.source, flag):
            _log.info("NOTE %s", note)

    def changed(self, **values: Any) -> Self:
        """The same model with other values of its config, such as data_dir."""
        config = ml_collections.ConfigDict(self.config.to_dict())
        config.update(values)
        return dataclasses.replace(self, config=config.lock())

    def in_float32(self) -> Self:
        """The same model, which computes in float32, whatever it was trained in."""
        return self.changed(precision="float32") if "precision" in self.config else self

    @property
    def params(self) -> Any:
        """The parameters as NumPy arrays, averaged if the run averages them."""
        return self._weights.params

    @property
    def model_state(self) -> Any:
        """The rest of the model, such as BatchNorm's statistics, averaged like `params`."""
        return self._weights.model_state

    @functools.cached_property
    def _weights(self) -> Weights:
        step, weights = self._read()
        vars(self).update(step=step, source=weights.source)
        return weights


def load(
    path: str,
    checkpoint: str = "latest",
    flag: str = "--workdir",
    recipe: Callable[[str], Any] | None = None,
    keys: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Model:
    """Opens a trained model; UserError if there is none, or it cannot be used.

    Args:
      path: of the flag `flag`, checked by `locations.check_path`; without a `recipe` it can only
        mean a checkpoint.
      checkpoint: which one of a workdir: "latest", "best" (in the run's evaluations) or a step.
      recipe: another library's file -> a config for the keys that its weights do not decide.
      keys: values that the user has given to some of its keys.
      quiet: whether the log has no note of what such weights do not say, and what is assumed.
    """
    file = foreign.find(path, flag) if recipe else ""
    if not (recipe and file):
        checkpoints, choose = open_checkpoint(path.rstrip("/"), flag, checkpoint)
        step, manifest = checkpoints.read(choose, checkpoints.manifest)
        if keys:
            given = ", ".join(f"--config.{key}" for key in keys)
            raise ConfigError(
                f"{given}: {flag}={path} is a model of this program and has its own values"
            )

        def read() -> tuple[int, Weights]:
            return checkpoints.read(choose, functools.partial(read_step, checkpoints), step)

        source, config = f"{checkpoints.directory}/{step}", config_of(manifest)
        if "imported" in manifest and "vocabulary" in manifest and not config.data_dir:
            config.data_dir = os.path.dirname(checkpoints.directory)  # --mode=import put it there
        return Model(source, step, config.lock(), manifest, read)
    config, keys = ml_collections.ConfigDict(recipe(file)), keys or {}
    config.update(keys)
    values, remarks = benchmarks.adopted_values(config, file, keys, whole=True)
    with config.unlocked():
        config.update(values)
        config.data_dir = config.data_dir or foreign.vocabulary_folder(file)
    for note in () if quiet else remarks:
        _log.info("NOTE %s", note)
    imported = benchmarks.load(config.lock(), "").uses.read_foreign(file)
    assert imported is not None  # `adopted_values` refuses what the benchmark cannot read
    if config.benchmark == "resnet" and "head" not in imported.params:
        raise CheckpointError(f"{flag}={path} has no classifier; --config.init_from takes it")
    if checkpoint != "latest":
        raise ConfigError(
            f"--checkpoint={checkpoint}: {flag}={path} is a single model, not the workdir of a "
            "run; leave --checkpoint out"
        )
    manifest = {"benchmark": config.benchmark, "config": config.to_dict(), **imported.metadata}
    return Model(imported.source, 0, config, manifest, lambda: (0, Weights(*imported[:3])))


def init_from(config: Any) -> str:
    """The model whose weights the run begins with: the config, else the environment, else ""."""
    path, source = config.init_from, "--config.init_from"
    if not path and (path := os.environ.get(config.init_env, "")):
        source = f"${config.init_env}"
        _log.info("initial weights: %s (from %s)", path, source)
    if path.startswith(foreign.NAMES):
        return foreign.fetch(path, source)[0]
    return locations.check_path(path, source)


def initial_weights(path: str, read_foreign: Callable[[str], Any]) -> Weights:
    """Reads the weights that `config.init_from` names, of a checkpoint or of another library.

    `read_foreign` is the method of the benchmark's `Uses`.
    """
    file = foreign.find(path, "config.init_from")
    if file and (imported := read_foreign(file)):
        return Weights(*imported[:3])
    checkpoints, choose = open_checkpoint(path, "config.init_from")
    _, weights = checkpoints.read(choose, functools.partial(read_step, checkpoints))
    checkpoints.close()
    return weights


def open_checkpoint(
    path: str, flag: str, checkpoint: str = "latest"
) -> tuple[Checkpointer, Callable[[], int]]:
    """Opens the folder of checkpoints that a path means; returns it and what chooses the step.

    The path, the value of the flag or key `flag`, is a workdir or WORKDIR/checkpoints/STEP. For a
    workdir, `checkpoint` is "latest", "best" (in the run's evaluations) or a step.
    """
    folder, step = _split(path)
    if not epath.Path(folder).exists():
        missing = folder if epath.Path(path).exists() else path
        raise CheckpointError(
            f"{flag}={path}: there is no {missing}; give a workdir that has checkpoints, "
            "WORKDIR/checkpoints/STEP, or weights of another library"
        )
    if step is not None and checkpoint != "latest":
        raise CheckpointError(f"--checkpoint={checkpoint}: {flag}={path} already names a step")
    checkpoints = Checkpointer(folder, keep=1, best=None)

    def choose() -> int:
        steps = checkpoints.steps()
        if not steps:
            raise CheckpointError(
                f"{flag}={path}: {folder} has no complete checkpoint; give a workdir whose run has "
                "saved one"
            )
        if step is not None and step not in steps:
            raise CheckpointError(f"{flag}={path}: {folder} has the checkpoints {steps}")
        return checkpoints.choose(checkpoint) if step is None else step

    return checkpoints, choose


def peek(path: str) -> dict[str, Any] | None:
    """The manifest of the checkpoint that `open_checkpoint` would open; None if there is none.

    This needs no other host and no Orbax. It returns None for a manifest that cannot be read, too:
    the error comes when the checkpoint is restored.
    """
    parent, step = _split(path)
    folder, tried = epath.Path(parent), None
    while True:  # a run may replace its newest checkpoint at this moment
        try:
            numbers = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
        except Exception:  # each file system raises its own types
            return None
        number = max(numbers, default=-1) if step is None else step
        if number == tried:
            return None
        tried = number
        with contextlib.suppress(Exception):
            manifest = parse_json((folder / str(number) / "manifest/metadata").read_bytes())
            manifests.check_manifest(manifest)
            return manifest if {"benchmark", "config"} <= manifest.keys() else None


def _split(path: str) -> tuple[str, int | None]:
    """The folder of checkpoints that a path means, and the step if it is WORKDIR/checkpoints/STEP.

    A workdir may itself be named as a number.
    """
    path = path.rstrip("/")
    parent, _, last = path.rpartition("/")
    if last.isdigit() and parent.rpartition("/")[2] == "checkpoints":
        return parent, int(last)
    return f"{path}/checkpoints", None


def settings(workdir: str, flag: str = "--workdir") -> Settings:
    """The settings of a run, with the config in its newest checkpoint."""
    if manifest := peek(workdir):
        return read_settings(config_of(manifest).lock(), workdir)
    return read_settings(load(workdir, flag=flag).config, workdir)  # this raises the reason


def config_of(manifest: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The config of the run that wrote a checkpoint; ConfigError if its benchmark is unknown."""
    config = ml_collections.ConfigDict(benchmarks.restored_config(manifest))
    # Never the checkpoint's folder of compiled programs: this machine would run what is in it.
    config.compilation_cache = _loop.get_config().compilation_cache
    return config


def class_names(manifest: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """The names of the `count` classes of a model; numbers for empty ones, () if it has none.

    Of 1,001 classes the first may be TensorFlow's "background".
    """
    names = tuple(manifest.get("class_names", ()))
    if len(names) == count - 1 == 1000:
        names = ("background", *names)
    if len(names) != count or not any(names):
        return ()
    return tuple(name or str(i) for i, name in enumerate(names))
