"""Loads recipes, the files of --config, and explains mistakes in them and in their use."""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
import re
import runpy
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from common import keys
from common.errors import ConfigError, one_line

_UNKNOWN = r"Unknown command line flag '(\w+)'"
_REFUSED = rf"{_UNKNOWN}|--(\w+) goes with"
_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs")


def load(file: str) -> Any:
    """The config of a recipe.

    Args:
      file: the value of --config: a path, or PATH:NAME for a file that has several recipes.

    Raises:
      ConfigError: the file is no recipe, or its code fails.
    """
    path, _, name = file.partition(":")
    try:
        get_config = runpy.run_path(path).get("get_config")
        if get_config is None:
            raise ConfigError(f"{path} has no function get_config(); configs/ has examples")
        if name and not inspect.signature(get_config).parameters:
            raise ConfigError(f"--config={file}: this recipe takes no name; use --config={path}")
        config = get_config(name) if name else get_config()
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}" if error.lineno else path
        raise ConfigError(f"{place}: {error.msg}") from error
    except SystemExit as error:
        raise ConfigError(
            f"{path}: the recipe ends the program (exit {error.code!r:.200}), but must return its "
            "config"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # whatever the file's code raises
        if (text := one_line(error)).startswith("--config="):  # the recipe's own refusal
            raise ConfigError(text) from error
        frames = traceback.extract_tb(error.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == path][-1]
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {text}") from error
    if not hasattr(config, "items"):
        kind = type(config).__name__
        raise ConfigError(f"{path}: get_config() returns {kind!r}, not a ConfigDict")
    return config


def origin(file: str, config: Any) -> dict[str, Any]:
    """Where a config is from: its file, and the values that differ; see `engine.run.Settings`."""
    before, after = keys.flat(load(file)), keys.flat(config)
    changed = [key for key in after if before.get(key) != after[key]]
    return {"file": file, "changes": {key: [before.get(key), after[key]] for key in changed}}


def check_command(argv: Sequence[str]) -> None:
    """Refuses what would hang, or be read as something else, when flags are parsed.

    Raises:
      ConfigError: --config is given twice, or not before its keys; the recipe is a folder, a pipe
        or a device; or a key takes the next flag as its value, as in `--config.train_steps
        --workdir=runs/a`.
    """
    if mistake := _two_recipes(argv):
        raise ConfigError(mistake)
    names = [word.partition("=")[0].lstrip("-") for word in argv if word.startswith("-")]
    keys_first = itertools.takewhile(lambda name: name != "config", names)
    if key := next((name for name in keys_first if name.startswith("config.")), ""):
        raise ConfigError(f"--{key}: give the recipe before its keys, --config=FILE --{key}=VALUE")
    file = _file(argv)
    path = file.partition(":")[0]
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"--config={file} is a folder, a pipe or a device; give a file")
    for word, value in itertools.pairwise(argv):
        if word.startswith("--config.") and "=" not in word and value.startswith("--"):
            known = keys.flat(load(file))
            if not isinstance(known.get(word.removeprefix("--config."), True), bool):
                raise ConfigError(f"{word} has no value and would take {value}: write {word}=VALUE")


def _files(argv: Sequence[str]) -> list[str]:
    """The values of all --config=FILE and --config FILE, of which a command needs one."""
    pairs = [(*word.partition("="), after) for word, after in itertools.zip_longest(argv, argv[1:])]
    flags = ("--config", "-config")
    return [value if sign else after or "" for word, sign, value, after in pairs if word in flags]


def _file(argv: Sequence[str]) -> str:
    return next(iter(_files(argv)), "")


def _two_recipes(argv: Sequence[str]) -> str:
    """What is wrong with a command that gives --config more than once; else an empty text."""
    files = _files(argv)
    if len(files) < 2:
        return ""
    return f"--config is given {len(files)} times, as {' and '.join(files)}; give it once"


def explain(
    argv: Sequence[str],
    error: Exception,
    hint: Callable[[Sequence[str], str], str] = lambda words, name: "",
) -> str:
    """What is wrong with a command line, in one line.

    Args:
      argv: the program and its words.
      error: what parsing it raised.
      hint: returns what to do instead of a flag that was refused, from the words and the flag's
        name; "" if it does not know that flag.
    """
    if mistake := _two_recipes(argv):
        return mistake
    file = _file(argv)
    path = file.partition(":")[0]
    known: list[str] = []
    if file and not os.path.exists(path):
        recipes = sorted(p for p in os.listdir(_FOLDER) if p.endswith(".py") and p[0] != "_")
        return f"--config={file}: there is no such file; configs/ has {', '.join(recipes)}"
    if os.path.isfile(path):
        try:
            known = list(keys.flat(load(file)))
        except ConfigError as mistake:
            return str(mistake)
        for word in argv:
            key = word.split("=")[0].removeprefix("--config.")
            if word.startswith("--config.") and key not in known:
                near = difflib.get_close_matches(key, known, 1)
                others = f"did you mean {near[0]}?" if near else f"it has: {', '.join(known)}"
                return f"{path} has no key {key!r}; {others}"
    text = " ".join(str(error).split())
    # A flag with --mode is one of ours that another mode has.
    is_ours = any(word.startswith("--mode") for word in argv)
    if refused := re.match(_UNKNOWN if is_ours else _REFUSED, text):
        name = next(filter(None, refused.groups()))
        if answer := hint(argv[1:], name):
            return answer
        if name in known:
            return f"--{name} is a key of the recipe: give --config.{name}=VALUE"
    return text
