"""Reads weights of other libraries: a detector's own checkpoint, or a ResNet for its backbone.

A room's module `weights` knows the names and layouts of its detector: `MODEL`, `matches(source)`,
`SHAPES`, `read_settings(source)` and `translate(source, shapes)`.
"""

from __future__ import annotations

import dataclasses
import importlib
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax.traverse_util import unflatten_dict

import benchmarks
from benchmarks.detection import images
from benchmarks.uses import Imported
from errors import ConfigError, DataError
from ops import foreign
from ops.foreign import files
from ops.trees import by_name

if TYPE_CHECKING:
    from benchmarks.detection.detector import Detector
    from ops.foreign.files import Foreign


def settings(room: str, path: str) -> tuple[dict[str, Any], list[tuple[str, str]]] | None:
    """The keys of a detector's own checkpoint and remarks on it; None if `path` is none.

    Args:
      room: the module of the detector, such as "benchmarks.detection.ssd".
      path: a file or folder, local or gs://.

    Raises:
      DataError: the file cannot be used.
    """
    if not (file := foreign.find(path)):
        return None
    own = _module(room, source := files.peek(file))
    return own.read_settings(source) if own.matches(source) else None


def read(benchmark: Detector, path: str) -> Imported | None:
    """Reads weights with which a detector can begin; None if `path` is no file of weights.

    Raises:
      DataError: the file holds neither such a detector nor a ResNet, or cannot be used.
      ConfigError: the detector in the file has other sizes than the config's.
    """
    if not (file := foreign.find(path)):
        return None
    own = _module(type(benchmark).__module__, source := files.read(file))
    if not own.matches(source):
        resnet = benchmarks.module("resnet")
        folded = getattr(benchmark.settings.backbone, "space_to_depth", False)
        try:
            return resnet.foreign_weights(source, folded)
        except DataError as error:
            raise DataError(f"{error}; nor is it {own.MODEL}") from error
    values, _ = own.read_settings(source)
    _check_sizes(f"{file} is {own.MODEL}", benchmark, {key: values[key] for key in own.SHAPES})
    shapes = _shapes(benchmark, values["num_classes"])
    tree = unflatten_dict(own.translate(source, shapes), sep="/")
    imported = {"path": file, "format": source.format, "sha256": source.sha256}
    # The files do not say it: torchvision and the reference train on these pixels.
    imported |= {"mean": images.MEAN, "std": images.STD, "channels": "RGB"}
    count = sum(array.size for array in jax.tree.leaves(tree["params"]))
    summary = (
        f"{file} ({source.format}): {own.MODEL}, {count:,} parameters, {values['num_classes']} "
        f"classes, max-pool padded as {values['max_pool']!r}, RGB pixels with the mean "
        f"{images.MEAN} and deviation {images.STD}, SHA-256 {source.sha256[:12]}"
    )
    return Imported(file, tree["params"], tree["model_state"], {"imported": imported}, summary)


def _module(room: str, source: Foreign) -> Any:
    """The room's module `weights`; refuses other rooms' detectors."""
    own = importlib.import_module(f"{room}.weights")
    if own.matches(source):
        return own
    for name, other in benchmarks.modules().items():
        if other.startswith(f"{__package__}.") and other != room:
            theirs = importlib.import_module(f"{other}.weights")
            if theirs.matches(source):
                raise DataError(
                    f"{source.path} is {theirs.MODEL}, which --config=configs/{name}.py takes"
                )
    return own


def _check_sizes(subject: str, benchmark: Detector, values: Mapping[str, Any]) -> None:
    """Refuses a detector whose arrays have other shapes than the config's, apart from classes."""
    groups = vars(benchmark.settings).values()
    mine = {key: value for group in groups for key, value in vars(group).items()}
    flags = [
        shlex.quote(f"--config.{key}={value!r}")
        for key, value in values.items()
        if key in mine and value != (tuple(mine[key]) if isinstance(value, tuple) else mine[key])
    ]
    if flags:
        raise ConfigError(f"{subject} of other sizes than the config's: give {' '.join(flags)}")


def _shapes(benchmark: Detector, classes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a detector's arrays by path, with another number of classes."""
    keys = benchmark.settings
    keys = dataclasses.replace(keys, data=dataclasses.replace(keys.data, num_classes=classes))
    params, state = jax.eval_shape(type(benchmark)(keys, "").init, jax.random.key(0))
    named = by_name({"params": params, "model_state": state})
    return {path: tuple(leaf.shape) for path, leaf in named.items()}
