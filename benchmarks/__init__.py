"""Finds the benchmarks by the name in `config.benchmark`, and what their modules say of a config.

A benchmark is a package with a function `make`: `benchmarks/<name>`, or, beside others that share
code with it, `benchmarks/<family>/<name>`. It may also live outside this repository, in a folder
`benchmarks/<name>` on PYTHONPATH; where both have a benchmark of a name, this repository's counts.
`adopted_values` are what the config of a run takes from the model whose weights the run uses.
"""

import importlib
import pathlib
import pkgutil
import re
from collections.abc import Collection, Mapping
from typing import Any

from benchmarks.base import Benchmark, Model
from benchmarks.fake import FAKE, without_data
from benchmarks.part import Part
from common import foreign
from common.errors import CheckpointError, ConfigError

__path__ = pkgutil.extend_path(__path__, __name__)
_MAKE = re.compile(r"^def make\(", re.MULTILINE)


def modules() -> dict[str, str]:
    """The module of every benchmark by its name: {"ssd": "benchmarks.detection.ssd", ...}."""
    paths: dict[str, str] = {}
    for root in __path__:  # this repository's folder is the first
        families = [(root, f"{__name__}.")]
        for folder, prefix in families:
            for child in sorted(pathlib.Path(folder).glob("*/__init__.py")):
                name = child.parent.name
                if _MAKE.search(child.read_text()):
                    paths.setdefault(name, prefix + name)
                elif folder == root:
                    families.append((str(child.parent), f"{prefix}{name}."))
    return paths


def names() -> list[str]:
    """Every benchmark that can be loaded."""
    return sorted(modules())


def load(config: Any, cache_dir: str) -> Benchmark:
    """Makes the benchmark that `config.benchmark` names.

    Args:
      config: the run's configuration.
      cache_dir: folder, local or gs://, for facts about the data that take long to find out.

    Raises:
      ConfigError: there is no such benchmark, or its config cannot work.
    """
    make = module(config.benchmark).make
    part = Part(config.get("train_fraction", 1.0), config.get("train_fraction_seed", 0))
    if config.get("dataset") != FAKE:
        benchmark = make(config, cache_dir)
        benchmark.part = part
        return benchmark
    if part:
        raise ConfigError(
            f"config.train_fraction={part.fraction:g}: config.dataset={FAKE!r} has no data of "
            "which to take a part; leave one of the two out"
        )
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.data_dir = ""  # sizes are the config's, else the published ones
    return without_data(make(config, cache_dir), config.seed)


def needs_data_dir(config: Any) -> bool:
    """Whether the benchmark reads a folder of data, and not another data set that it knows."""
    return config.get("dataset", "") in ("", "records")


def module(name: str) -> Any:
    """The package of a benchmark; ConfigError if there is none of this name."""
    paths = modules()
    if name not in paths:
        raise ConfigError(f"config.benchmark={name!r} is not one of: {', '.join(sorted(paths))}")
    return importlib.import_module(paths[name])


def model(name: str) -> Model:
    """What the runs of a benchmark take from other models: its `MODEL`, or nothing."""
    return getattr(module(name), "MODEL", Model())


def restored_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the config in a checkpoint's manifest, so that `load` needs no data for it.

    `Model.restored` adds what the run has learnt from its data, such as the number of classes.

    Raises:
      CheckpointError: the manifest is damaged.
      ConfigError: the benchmark is unknown here.
    """
    if absent := {"benchmark", "config", "num_train_examples"} - manifest.keys():
        raise CheckpointError(f"the checkpoint's manifest is damaged: no {min(absent)}")
    complete = model(manifest["benchmark"]).restored
    try:
        return complete(dict(manifest["config"]), manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's manifest is damaged: {error!r}") from error


def adopted_values(
    config: Any, source: Mapping[str, Any] | str, given: Collection[str], whole: bool
) -> tuple[dict[str, Any], list[str]]:
    """The values of the config that a run takes from the model whose weights it uses.

    `benchmarks.base.Model` says which keys such a model decides.

    Args:
      config: the run's configuration, which stays as it is.
      source: the manifest of a checkpoint, or a file that `common.foreign.find` returned.
      given: keys that the user has given, whose values stay.
      whole: whether the model is used unchanged.

    Returns:
      (the values that differ from the config's, remarks about weights of another library).

    Raises:
      ConfigError: the benchmark is unknown, or it cannot begin with this model.
      DataError: the foreign weights cannot be used.
    """
    own = model(config.benchmark)
    read = _read_file if isinstance(source, str) else _read_manifest
    name, values, remarks = read(config, own, source)
    decided = own.keys + own.body_keys
    if name != config.benchmark:  # such as a ResNet, with which a detector begins
        body = own.follow(config, values)
        values, decided = {**values, **body}, own.keys + tuple(body)
    if whole:
        decided += own.whole_keys
    adopted = {key: values[key] for key in decided if key in values and key not in given}
    # JSON has no tuples.
    adopted = {k: tuple(v) if isinstance(v, list) else v for k, v in adopted.items()}
    changed = {key: value for key, value in adopted.items() if value != config.get(key)}
    return changed, [line for line, key in remarks if key not in given]


# (the benchmark whose model it is, values of its config, [(remark, the key it is about or "")]).
_Described = tuple[str, Mapping[str, Any], list[tuple[str, str]]]


def _read_manifest(config: Any, own: Model, manifest: Any) -> _Described:
    """What a checkpoint's manifest says; nothing if `own` cannot begin with its model."""
    name, stored = manifest["benchmark"], manifest["config"]
    if name not in (config.benchmark, *own.follows):
        return config.benchmark, {}, []
    # A run that uses the model unchanged lets its data decide again what they have decided.
    undecided = {key: stored[key] for key in own.whole_keys if key in stored}
    return name, {**restored_config(manifest), **undecided}, []


def _read_file(config: Any, own: Model, file: Any) -> _Described:
    """What another library's weights say, of the benchmark or of one that it follows."""
    if described := own.foreign_settings(file):
        return config.benchmark, *described
    for name in own.follows:
        if described := model(name).foreign_settings(file):
            values, remarks = described
            return name, values, [(line, key) for line, key in remarks if not key or key in config]
    raise ConfigError(
        f"config.init_from={config.init_from}: {foreign.describe(file)}, with which the benchmark "
        f"{config.benchmark} cannot begin; give the workdir of a run of this benchmark"
    )
