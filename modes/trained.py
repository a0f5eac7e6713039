"""Loads a trained model for the programs that use it: predict, export, report, translate.

A checkpoint's manifest holds the config of its run, so that a workdir alone describes its model.
Weights of another library describe theirs as well; the recipe has the keys that do not matter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import ml_collections

import benchmarks
import evaluate
from benchmarks.base import Benchmark
from configs import resnet50
from engine import paths, weights
from errors import CheckpointError
from ops import foreign


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model in a checkpoint, or of another library.

    The manifest is read at once. The benchmark is made and the arrays are read when they are first
    used, so that a caller can refuse another kind of model before that.

    Attributes:
      source: the folder of the checkpoint, or the file of another library.
      step: the training step after which it was written; 0 of a file.
      config: the run's config, locked; `config.benchmark` says what the model is for.
      manifest: what `run.Run.facts` wrote, and "tree", "checksums" and "versions"; of a file, what
        describes its model.
    """

    source: str
    step: int
    config: Any
    manifest: dict[str, Any]
    _read: Callable[[], weights.Weights]

    @functools.cached_property
    def benchmark(self) -> Benchmark:
        """The benchmark with the run's settings; ConfigError if they cannot work here."""
        return benchmarks.load(self.config, "")

    @property
    def params(self) -> Any:
        """The parameters as NumPy arrays: their average where the run kept one.

        Raises:
          CheckpointError: the checkpoint is damaged.
        """
        return self._weights.params

    @property
    def model_state(self) -> Any:
        """The rest of the model, such as BatchNorm's statistics; as `params`."""
        return self._weights.model_state

    @functools.cached_property
    def _weights(self) -> weights.Weights:
        return self._read()


def load(path: str, checkpoint: str = "latest", flag: str = "--workdir", **changes: Any) -> Trained:
    """Opens a trained model.

    Args:
      path: a workdir, WORKDIR/checkpoints/STEP, or a file or folder of another library's weights;
        local or gs://.
      checkpoint: of a workdir: "latest", "best" (in the run's own evaluations) or a step.
      flag: the flag that `path` is from, for messages.
      **changes: values of the config that differ from the run's, such as data_dir.

    Raises:
      UserError: there is no such checkpoint, its manifest is damaged, or its benchmark is unknown.
    """
    path = paths.check(path, flag).rstrip("/")
    if foreign.find(path):
        if checkpoint != "latest":
            raise CheckpointError(f"--checkpoint={checkpoint}: {flag}={path} has no checkpoints")
        return _load_foreign(path, changes)
    checkpoints, step = weights.find(path, flag)
    manifest = checkpoints.manifest(step)
    if checkpoint != "latest":
        workdir = path.removesuffix(f"/checkpoints/{step}")
        if workdir != path:
            raise CheckpointError(f"--checkpoint={checkpoint}: {flag}={path} already names a step")
        step = evaluate.choose(checkpoints, workdir, manifest["target_metric"], checkpoint)
        manifest = checkpoints.manifest(step)
    config = ml_collections.ConfigDict(benchmarks.restored(manifest))
    config.update(changes)
    read = functools.partial(weights.read, checkpoints, step)
    return Trained(f"{checkpoints.directory}/{step}", step, config.lock(), manifest, read)


def _load_foreign(path: str, changes: dict[str, Any]) -> Trained:
    """Opens a ResNet of another library; the file is read at once."""
    config: Any = resnet50.get_config()
    benchmarks.settle(config, path, changes, whole=True)
    config.update(changes)
    benchmark = benchmarks.load(config.lock(), "")
    imported = benchmark.read_foreign(path)
    assert imported is not None  # `foreign.find` has found it
    manifest = {"benchmark": config.benchmark, "config": config.to_dict(), "step": 0}
    manifest |= {"target_metric": benchmark.targets[0].metric, **imported.metadata}
    if "head" not in imported.params:
        raise CheckpointError(f"{imported.source} has no classifier: --config.init_from takes it")
    read = functools.partial(weights.Weights, *imported[:3])
    return Trained(imported.source, 0, config, manifest, read)
