"""The benchmarks, found by the name in `config.benchmark`.

A benchmark is a package with a function `make`: `benchmarks/<name>`, or, beside others that share
code with it, `benchmarks/<family>/<name>`. It may also live outside this repository, in a folder
`benchmarks/<name>` on PYTHONPATH; a name of this repository's means this repository's benchmark.
"""

import importlib
import pathlib
import pkgutil
import re
from typing import Any

from benchmarks.base import Benchmark
from errors import ConfigError

__path__ = pkgutil.extend_path(__path__, __name__)
_MAKE = re.compile(r"^def make\(", re.MULTILINE)


def modules() -> dict[str, str]:
    """The module of every benchmark by its name: {"ssd": "benchmarks.detection.ssd", ...}."""
    paths: dict[str, str] = {}
    for root in __path__:  # this repository's own folder is the first
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
    """The package of a benchmark. Raises ConfigError if there is none of this name."""
    paths = modules()
    if name not in paths:
        raise ConfigError(f"config.benchmark={name!r} is not one of: {', '.join(sorted(paths))}")
    return importlib.import_module(paths[name])
