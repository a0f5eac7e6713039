"""Finds the benchmarks by the name in `config.benchmark`, and what their modules say of a config.

A benchmark is a package with a function `make`: `benchmarks/<name>`, or, beside others that share
code with it, `benchmarks/<family>/<name>`. It may also live outside this repository, in a folder
`benchmarks/<name>` on PYTHONPATH; where both have a benchmark of a name, this repository's counts.
`settle_config` gives the config of a run the keys of another model, whose weights the run uses.
"""

import importlib
import pathlib
import pkgutil
import re
from collections.abc import Collection, Mapping
from typing import Any

from benchmarks.base import Benchmark, Model
from benchmarks.fake import FAKE, without_data
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
    if config.get("dataset") != FAKE:
        return make(config, cache_dir)
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


def settle_config(
    config: Any,
    source: Mapping[str, Any] | str,
    fixed: Collection[str],
    whole: bool,
    has_recipe: bool = True,
) -> list[str]:
    """Gives the config the keys of another model, whose weights the run uses.

    `benchmarks.base.Model` says which keys these are.

    Args:
      config: changed in place.
      source: the manifest of a checkpoint, or a file that `common.foreign.find` returned.
      fixed: keys that the user has given, which stay.
      whole: whether the model is used unchanged.
      has_recipe: whether the user has given a recipe, whose keys may differ.

    Returns:
      One line for each key of the recipe that has changed, and the notes about foreign weights.

    Raises:
      ConfigError: the benchmark is unknown, or it cannot begin with this model.
      DataError: the foreign weights cannot be used.
    """
    own, foreign_notes, values = model(config.benchmark), [], {}
    is_own = True
    if isinstance(source, str):
        values, foreign_notes, is_own = _foreign_values(own, config, source)
    elif source["benchmark"] in (config.benchmark, *own.follows):
        stored = source["config"]
        values = restored_config(source)
        values |= {key: stored[key] for key in own.whole_keys if key in stored}
        is_own = source["benchmark"] == config.benchmark
    body_keys = own.body_keys
    if not is_own:
        followed = own.follow(config, values)
        values, body_keys = {**values, **followed}, tuple(followed)
    keys = (*own.keys, *body_keys, *(own.whole_keys if whole else ()))
    notes = []
    for key in keys:
        if key not in values or key in fixed:
            continue
        value, before = values[key], config.get(key)
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        if value != before:
            instead = f" instead of {before!r}" if key in config else ""
            notes.append(f"config.{key}={value!r}{instead}, as the weights want it")
            with config.unlocked():
                config[key] = value
    notes = notes if has_recipe else []
    return notes + [note for note, key in foreign_notes if key not in fixed]


def _foreign_values(
    own: Model, config: Any, file: str
) -> tuple[Mapping[str, Any], list[tuple[str, str]], bool]:
    """(values, notes, whether the model is the benchmark's) of another library's weights.

    A model that is not the benchmark's is one of those in `own.follows`.
    """
    if found := own.foreign_settings(file):
        return *found, True
    for name in own.follows:
        if found := model(name).foreign_settings(file):
            values, notes = found
            return values, [(line, key) for line, key in notes if not key or key in config], False
    raise ConfigError(
        f"config.init_from={config.init_from}: {foreign.describe(file)}, with which the benchmark "
        f"{config.benchmark} cannot begin; give the workdir of a run of this benchmark"
    )
