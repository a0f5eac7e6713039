"""Where a run's results, data and initial weights are: flags, config keys, or the environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from engine import paths
from errors import ConfigError
from ops import foreign

_WORKDIR_VARIABLES = ("TPU_MODEL_DIR", "PS_MODEL_PATH", "MLP_GCS_MODEL_DIR")


@dataclasses.dataclass(frozen=True)
class Keys:
    """The config's keys that name folders, or the variables that name them."""

    data_dir: str
    data_env: str
    init_from: str
    init_env: str


def workdir(flag: str | None, say: Callable[[str], None]) -> str:
    """The folder for results: --workdir, else the environment.

    Args:
      flag: the value of --workdir.
      say: prints a line for people; the same in the other functions.

    Raises:
      ConfigError: neither names a folder, or the folder cannot hold results.
    """
    variables = {f"${name}": os.environ.get(name) for name in _WORKDIR_VARIABLES}
    for name, value in {"--workdir": flag, **variables}.items():
        if value:
            say(f"workdir: {value} (from {name})")
            return paths.check_writable(value, name)
    raise ConfigError("where should results go? Give --workdir=DIR or set TPU_MODEL_DIR")


def data_dir(config: Any, say: Callable[[str], None]) -> str:
    """The folder of the data: the config, else the environment, else the recipe's fallback.

    Raises:
      ConfigError: none of them names a folder, or the folder cannot be one.
    """
    from etils import epath

    if config.data_dir:
        say(f"data: {config.data_dir} (from --config.data_dir or the recipe)")
        return paths.check(config.data_dir, "--config.data_dir")
    if folder := os.environ.get(config.data_env):
        say(f"data: {folder} (from ${config.data_env})")
        return paths.check(folder, f"${config.data_env}")
    staged = os.environ.get("TPU_MODEL_DIR", "").rstrip("/") + "/input_data"
    if staged != "/input_data" and epath.Path(staged).exists():
        say(f"data: {staged} (from $TPU_MODEL_DIR)")
        return staged
    fallback = config.get("data_fallback")
    if not fallback:
        raise ConfigError(
            f"where are the data? Give --config.data_dir=DIR or set {config.data_env}"
        )
    say(
        f"data: {fallback}: WARNING: these are random images, accuracy will mean nothing. Set "
        f"--config.data_dir or ${config.data_env} to train on your own"
    )
    return fallback


def init_from(config: Any, say: Callable[[str], None]) -> str:
    """The model whose weights the run begins with: the config, else the environment, else ""."""
    path, source = config.init_from, "--config.init_from"
    if not path and (path := os.environ.get(config.init_env, "")):
        source = f"${config.init_env}"
        say(f"initial weights: {path} (from {source})")
    if foreign.is_name(path):
        return foreign.downloads.fetch(path, source)[0]
    return paths.check(path, source)
