"""Loads recipes, the files of --config, and explains mistakes in them and in their use."""

import dataclasses
import difflib
import inspect
import itertools
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from common import keys
from common.errors import ConfigError, one_line

_UNKNOWN = r"Unknown command line flag '(\w+)'"
_REFUSED = rf"{_UNKNOWN}|--(\w+) goes with"
_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The recipe of --config, with the values of the command line."""

    file: str  # the value of --config
    config: ConfigDict  # locked
    own: Mapping[str, Any]  # the values of the file alone, by flat key
    given: Collection[str]  # the keys to which the command line gives values


class Flag:
    """The flag --config=FILE, whose file runs once, with the flags --config.KEY=VALUE."""

    own: Mapping[str, Any] = {}  # as in `Recipe`, from the loading of the file on

    def __init__(self, flag: Any):
        self._flag = flag  # of ml_collections
        self._flag.parser.parse = self._load  # instead of ml_collections' loader

    def _load(self, file: str) -> ConfigDict:
        config = load(file)
        self.own = keys.flat(config)
        check_keys(sys.argv, file, self.own)
        return config.lock()

    @property
    def recipe(self) -> Recipe | None:
        """The recipe, after the command line is parsed; None without --config."""
        if (flag := self._flag).value is None:
            return None
        return Recipe(flag.config_filename, flag.value, self.own, flag.override_values)


def load(file: str) -> Any:
    """The config of a recipe; `file` is the value of --config: PATH, or PATH:NAME of several."""
    path, _, name = file.partition(":")
    if not os.path.isfile(path):
        recipes = sorted(p for p in os.listdir(_FOLDER) if p.endswith(".py") and p[0] != "_")
        names = ", ".join(recipes)
        raise ConfigError(f"--config={file}: there is no such file; configs/ has {names}")
    try:
        get_config = runpy.run_path(path).get("get_config")
        if get_config is None:
            raise ConfigError(f"{path} has no function get_config(); configs/ has examples")
        if name and not inspect.signature(get_config).parameters:
            raise ConfigError(f"--config={file}: this recipe takes no name; use --config={path}")
        config = get_config(name) if name else get_config()
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except ConfigError:
        raise
    except Exception as error:  # whatever the file's code raises
        if (text := one_line(error)).startswith("--config="):  # the recipe's own refusal
            raise ConfigError(text) from error
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f", line {frame.lineno}" for frame in frames if frame.filename == path]
        where = "".join([path, *lines[-1:]])  # without a line where get_config() needs a name
        raise ConfigError(f"{where}: {type(error).__name__}: {text}") from error
    if not isinstance(config, ConfigDict):
        name = type(config).__name__
        raise ConfigError(f"{path}: get_config() returns {name!r}, not a ConfigDict")
    return config


def check_command(argv: Sequence[str]) -> None:
    """Raises ConfigError if --config is given twice, or not before its keys."""
    names = [word.partition("=")[0].lstrip("-") for word in argv if word.startswith("-")]
    if names.count("config") > 1:
        raise ConfigError("--config is given more than once: which recipe? Give it once")
    keys_first = itertools.takewhile(lambda name: name != "config", names)
    if key := next((name for name in keys_first if name.startswith("config.")), ""):
        raise ConfigError(f"--{key}: give the recipe before its keys, --config=FILE --{key}=VALUE")


def check_keys(argv: Sequence[str], file: str, own: Collection[str]) -> None:
    """Raises ConfigError if a command line has --config.KEY=VALUE for a key not in `own`."""
    for word in argv:
        key = word.split("=")[0].removeprefix("--config.")
        if word.startswith("--config.") and key not in own:
            near = difflib.get_close_matches(key, own, 1)
            others = f"did you mean {near[0]}?" if near else f"it has: {', '.join(own)}"
            name = file.partition(":")[0]
            raise ConfigError(f"{name} has no key {key!r}; {others} (all: docs/config.md)")


def explain(
    argv: Sequence[str], error: Exception, own: Collection[str], hint: Callable[..., str]
) -> str:
    """What is wrong with a command line, the program and its words, in one line.

    `error` is what parsing it raised, and `own` the recipe's keys. `hint(words, name)` says what to
    do instead of giving the refused flag `name`; "" if it does not know that flag.
    """
    text = " ".join(str(error).split())
    # With --mode an unknown flag may be this program's own, of another mode.
    is_ours = any(word.startswith("--mode") for word in argv)
    if refused := re.match(_UNKNOWN if is_ours else _REFUSED, text):
        name = next(filter(None, refused.groups()))
        if answer := hint(argv[1:], name):
            return answer
        if name in own:
            return f"--{name} is a key of the recipe: give --config.{name}=VALUE"
    return text
