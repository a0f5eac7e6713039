"""The benchmarks, found by the name in `config.benchmark`.

A benchmark is a package with a function `make`: `benchmarks/<name>`, or, beside others that share
code with it, `benchmarks/<family>/<name>`. It may also live outside this repository, in a folder
`benchmarks/<name>` on PYTHONPATH.
"""

import importlib
import pathlib
import pkgutil
import re
from collections.abc import Collection, Mapping
from typing import Any

from benchmarks.base import Benchmark
from errors import ConfigError

__path__ = pkgutil.extend_path(__path__, __name__)
_MAKE = re.compile(r"^def make\(", re.MULTILINE)


def modules() -> dict[str, str]:
    """The module of every benchmark by its name: {"ssd": "benchmarks.detection.ssd", ...}."""
    found: dict[str, str] = {}
    families = [(package, f"{__name__}.") for package in __path__]
    for folder, prefix in families:
        for child in sorted(pathlib.Path(folder).glob("*/__init__.py")):
            name = child.parent.name
            if _MAKE.search(child.read_text()):
                found.setdefault(name, prefix + name)
            elif prefix == f"{__name__}.":
                families.append((str(child.parent), f"{prefix}{name}."))
    return found


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
    return _module(config.benchmark).make(config, cache_dir)


def needs_data_dir(config: Any) -> bool:
    """Whether the benchmark reads a folder of data; it does unless its module says otherwise."""
    ask = getattr(_module(config.benchmark), "needs_data_dir", None)
    return ask is None or ask(config)


def restored(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the config in a checkpoint's manifest, so that `load` needs no data for it.

    A benchmark's module may have `restored(values, manifest)`, which returns the values with those
    keys added that were unknown when the checkpoint was written.

    Raises:
      ConfigError: the benchmark is unknown here.
    """
    complete = getattr(_module(manifest["benchmark"]), "restored", None)
    values = dict(manifest["config"])
    return complete(values, manifest) if complete else values


def settle(
    config: Any, model: Mapping[str, Any] | str, fixed: Collection[str], whole: bool
) -> list[str]:
    """Gives the config the keys of another model, whose weights the run uses.

    A benchmark's module lists these keys in `MODEL_KEYS`, and in `WHOLE_KEYS` those that only
    belong to a model that is used as it is, such as the number of its classes. `FOLLOWS` names
    other benchmarks whose models it begins with; `check_followed(config, values)` refuses those
    that do not fit, and returns remarks on the others.

    Args:
      config: changed in place.
      model: the manifest of a checkpoint, or a path whose weights may be another library's. Then
        the module's `foreign_settings(path)` returns (values of keys, remarks), or None.
      fixed: keys that the person has given, which stay.
      whole: whether the model is used as it is.

    Returns:
      One line for each key that has changed, and the remarks.

    Raises:
      ConfigError: the benchmark is unknown, or it cannot begin with this model.
      DataError: the foreign weights cannot be used.
    """
    module, remarks, values = _module(config.benchmark), [], {}
    whole_keys = getattr(module, "WHOLE_KEYS", ())
    if isinstance(model, str):
        read = getattr(module, "foreign_settings", lambda path: None)
        values, remarks = read(model) or ({}, [])
    elif model["benchmark"] in (config.benchmark, *getattr(module, "FOLLOWS", ())):
        own = model["config"]
        values = restored(model) | {key: own[key] for key in whole_keys if key in own}
        if model["benchmark"] != config.benchmark:
            remarks = [(line, "") for line in module.check_followed(config, values)]
    keys = (*getattr(module, "MODEL_KEYS", ()), *(whole_keys if whole else ()))
    notes = []
    for key in keys:
        if key in values and key not in fixed and values[key] != config.get(key):
            before = f" instead of {config[key]!r}" if key in config else ""
            notes.append(f"config.{key}={values[key]!r}{before}, as the weights want it")
            with config.unlocked():
                config[key] = values[key]
    return notes + [remark for remark, key in remarks if key not in fixed]


def _module(name: str) -> Any:
    known = modules()
    if name not in known:
        raise ConfigError(f"config.benchmark={name!r} is not one of: {', '.join(sorted(known))}")
    return importlib.import_module(known[name])
