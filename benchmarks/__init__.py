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

from benchmarks.base import Benchmark
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
    return module(config.benchmark).make(config, cache_dir)


def needs_data_dir(config: Any) -> bool:
    """Whether the benchmark reads a folder of data; it does unless its module says otherwise."""
    ask = getattr(module(config.benchmark), "needs_data_dir", None)
    return ask is None or ask(config)


def module(name: str) -> Any:
    """The package of a benchmark; ConfigError if there is none of this name."""
    paths = modules()
    if name not in paths:
        raise ConfigError(f"config.benchmark={name!r} is not one of: {', '.join(sorted(paths))}")
    return importlib.import_module(paths[name])


def restored_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the config in a checkpoint's manifest, so that `load` needs no data for it.

    A benchmark's module may have `restored(values, manifest)`, which returns the values with what
    the run has learnt from its data, such as the number of classes.

    Raises:
      CheckpointError: the manifest is damaged.
      ConfigError: the benchmark is unknown here.
    """
    if absent := {"benchmark", "config", "num_train_examples"} - manifest.keys():
        raise CheckpointError(f"the checkpoint's manifest is damaged: no {min(absent)}")
    complete = getattr(module(manifest["benchmark"]), "restored", None)
    values = dict(manifest["config"])
    try:
        return complete(values, manifest) if complete else values
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's manifest is damaged: {error!r}") from error


def settle_config(
    config: Any,
    model: Mapping[str, Any] | str,
    fixed: Collection[str],
    whole: bool,
    has_recipe: bool = True,
) -> list[str]:
    """Gives the config the keys of another model, whose weights the run uses.

    A benchmark's module lists these keys in `MODEL_KEYS`, and in `WHOLE_KEYS` the keys that
    only apply to a model that is used unchanged, such as the number of its classes. `FOLLOWS` names
    other benchmarks whose models it begins with; `follow(config, values)` refuses models that do
    not fit, and returns the values of keys that the config takes beside `MODEL_KEYS`. `BODY_KEYS`
    are taken from models of the same benchmark only: in the others they may mean something else.

    Args:
      config: changed in place.
      model: the manifest of a checkpoint, or a file that `common.foreign.find` returned. For such
        a file the module's `foreign_settings(file)` returns (values of keys, notes), or None where
        it is no model of this benchmark.
      fixed: keys that the user has given, which stay.
      whole: whether the model is used unchanged.
      has_recipe: whether the user has given a recipe, whose keys may differ.

    Returns:
      One line for each key of the recipe that has changed, and the notes about foreign weights.

    Raises:
      ConfigError: the benchmark is unknown, or it cannot begin with this model.
      DataError: the foreign weights cannot be used.
    """
    package, foreign_notes, values = module(config.benchmark), [], {}
    whole_keys, is_own = getattr(package, "WHOLE_KEYS", ()), True
    if isinstance(model, str):
        values, foreign_notes, is_own = _foreign_values(package, config, model)
    elif model["benchmark"] in (config.benchmark, *getattr(package, "FOLLOWS", ())):
        stored = model["config"]
        values = restored_config(model)
        values |= {key: stored[key] for key in whole_keys if key in stored}
        is_own = model["benchmark"] == config.benchmark
    body_keys = getattr(package, "BODY_KEYS", ())
    if not is_own:
        body_keys = package.follow(config, values)
        values = {**values, **body_keys}
    keys = (*getattr(package, "MODEL_KEYS", ()), *body_keys, *(whole_keys if whole else ()))
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
    package: Any, config: Any, file: str
) -> tuple[Mapping[str, Any], list[tuple[str, str]], bool]:
    """(values, notes, whether the model is the benchmark's) of another library's weights.

    A model that is not the benchmark's is one of those in its `FOLLOWS`.
    """
    settings = getattr(package, "foreign_settings", None)
    if settings and (found := settings(file)):
        return *found, True
    for name in getattr(package, "FOLLOWS", ()):
        if found := module(name).foreign_settings(file):
            values, notes = found
            return values, [(line, key) for line, key in notes if not key or key in config], False
    raise ConfigError(
        f"config.init_from={config.init_from}: {foreign.describe(file)}, with which the benchmark "
        f"{config.benchmark} cannot begin; give the workdir of a run of this benchmark"
    )
