"""Loads recipes, the files of --config, and explains mistakes in them and in their use."""

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
    """The config of a recipe; `file` is the value of --config: PATH, or PATH:NAME of several."""
    path, _, name = file.partition(":")
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
        line = [frame.lineno for frame in frames if frame.filename == path][-1]
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {text}") from error
    if not hasattr(config, "items"):
        kind = type(config).__name__
        raise ConfigError(f"{path}: get_config() returns {kind!r}, not a ConfigDict")
    return config


def origin(file: str, config: Any) -> dict[str, Any]:
    """Where a config is from: {"file": `file`, "changes": {key: [the file's value, this one]}}."""
    before, after = keys.flat(load(file)), keys.flat(config)
    changed = [key for key in after if before.get(key) != after[key]]
    return {"file": file, "changes": {key: [before.get(key), after[key]] for key in changed}}


def check_command(argv: Sequence[str]) -> None:
    """Raises ConfigError if --config is given twice, or not before its keys."""
    names = [word.partition("=")[0].lstrip("-") for word in argv if word.startswith("-")]
    if names.count("config") > 1:
        raise ConfigError("--config is given more than once: which recipe? Give it once")
    keys_first = itertools.takewhile(lambda name: name != "config", names)
    if key := next((name for name in keys_first if name.startswith("config.")), ""):
        raise ConfigError(f"--{key}: give the recipe before its keys, --config=FILE --{key}=VALUE")


def _file(argv: Sequence[str]) -> str:
    """The value of --config=FILE or --config FILE; "" without one."""
    for word, after in itertools.zip_longest(argv, argv[1:]):
        flag, sign, value = word.partition("=")
        if flag in ("--config", "-config"):
            return value if sign else after or ""
    return ""


def explain(
    argv: Sequence[str],
    error: Exception,
    hint: Callable[[Sequence[str], str], str] = lambda words, name: "",
) -> str:
    """What is wrong with a command line, the program and its words, in one line.

    `error` is what parsing it raised. `hint(words, name)` says what to do instead of giving the
    refused flag `name`; "" if it does not know that flag.
    """
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
    # With --mode an unknown flag may be this program's own, of another mode.
    is_ours = any(word.startswith("--mode") for word in argv)
    if refused := re.match(_UNKNOWN if is_ours else _REFUSED, text):
        name = next(filter(None, refused.groups()))
        if answer := hint(argv[1:], name):
            return answer
        if name in known:
            return f"--{name} is a key of the recipe: give --config.{name}=VALUE"
    return text
