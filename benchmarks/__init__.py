"""The benchmarks, found by name: `benchmarks.<config.benchmark>`."""

import importlib
import pkgutil
from typing import Any

from benchmarks.base import Benchmark
from errors import ConfigError


def names() -> list[str]:
    """Every benchmark in this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg)


def load(config: Any, cache_dir: str) -> Benchmark:
    """Makes the benchmark that `config.benchmark` names.

    Args:
      config: the run's configuration.
      cache_dir: folder, local or gs://, for facts about the data that are dear to find twice.

    Raises:
      ConfigError: there is no such benchmark, or its config cannot work.
    """
    if config.benchmark not in names():
        known = ", ".join(names())
        raise ConfigError(f"config.benchmark={config.benchmark!r} is not one of: {known}")
    return importlib.import_module(f"benchmarks.{config.benchmark}").make(config, cache_dir)
