"""Reads config keys into frozen dataclasses, and checks the kind and the range of each value.

A dataclass lists keys as fields. The type of a field says what its value must be:

    optimizer: Literal["adam", "lars", "sgd"]     one of these
    momentum: Annotated[float, "[0, 1)"]          a number from 0 to less than 1
    learning_rate_decay_epochs: Sequence[NotNegative]     a tuple of such numbers
    eval_lengths: Annotated[Sequence[int], "[1, 100] rising"]     1 to 100 of them, which rise
    steps_per_eval: int | str                     a duration, which `engine.cadence` reads
    gradient_accumulation_steps: int | Literal["auto"]    a number or one of these texts

A number without a range must still be finite, and a tuple has at most 1,000 entries.
"""

import dataclasses
import math
import re
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from common.errors import ConfigError, visible

T = TypeVar("T")

Positive = Annotated[float, "(0, 1e6]"]  # far below the largest number of float32
NotNegative = Annotated[float, "[0, 1e6]"]
Share = Annotated[float, "[0, 1]"]
Decay = Annotated[float, "[0, 1)"]
Count = Annotated[int, "[0, 1e12]"]  # of examples
BatchSize = Annotated[int, "[1, 1e8]"]
Seed = Annotated[int, "[0, 4294967295]"]

_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}


def read_config(settings: type[T], config: Any, prefix: str = "config.") -> T:
    """Makes a frozen dataclass from the config's keys of the same names.

    A field whose type is itself such a dataclass is read the same way, from the nested config of
    its name or else from the same keys. A key whose field has a default may be missing.
    ConfigError if another key is missing, or a value is not of its kind or range.
    """
    hints = get_type_hints(settings, include_extras=True)
    values = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type] (T is a dataclass)
        hint, name = hints[field.name], field.name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            nested = name in config and hasattr(config[name], "items")
            inside = (config[name], f"{prefix}{name}.") if nested else (config, prefix)
            values[name] = read_config(hint, *inside)
        elif name in config:
            values[name] = check(f"{prefix}{name}", config[name], hint)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(
                f"the recipe (or the checkpoint of another version) has no {prefix}{name}; "
                "configs/_loop.py shows the keys of the loop, configs/resnet50.py a benchmark's"
            )
    return settings(**values)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"mlperf.format": value, ...} of nested dictionaries or a `ConfigDict`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        values |= flat(value, f"{name}.") if hasattr(value, "items") else {name: value}
    return values


def check(name: str, value: Any, hint: Any) -> Any:
    """Returns a value if it fits a type hint, `int` or `Annotated[float, "[0, 1)"]`.

    Otherwise ConfigError names the key, the value and what is accepted.
    """
    hint, interval = get_args(hint) if get_origin(hint) is Annotated else (hint, "")
    if get_origin(hint) in (Sequence, tuple):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _refusal(name, value, "a list such as (30, 60)")
        low, high = re.findall("[0-9]+", interval or "[0, 1000]")
        if not int(low) <= len(value) <= int(high):
            raise _refusal(name, value, f"a list of {low} to {high} entries")
        entries = tuple(_check_entry(name, value, entry, get_args(hint)[0]) for entry in value)
        if "rising" in interval and list(entries) != sorted(set(entries)):
            raise _refusal(name, value, "a list that rises, such as (30, 60)")
        return entries
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise _refusal(name, value, f"one of {_one_of(hint)}")
        return value
    if get_origin(hint) in (Union, types.UnionType):
        alternatives = {_plain(each): each for each in get_args(hint)}
        for plain, each in alternatives.items():
            if _is_of(value, plain):
                return check(name, value, each)
        raise _refusal(name, value, " or ".join(_NAMES.get(p, _one_of(p)) for p in alternatives))
    if not _is_of(value, hint):
        raise _refusal(name, value, _NAMES[hint])
    if isinstance(value, str) and value != visible(value):
        raise _refusal(name, value, "text in UTF-8 without control characters")
    if not isinstance(value, bool | str):
        _check_range(name, value, interval or "(-inf, inf)")
    return value


def _check_entry(name: str, entries: Any, entry: Any, hint: Any) -> Any:
    try:
        return check(name, entry, hint)
    except ConfigError as error:
        accepted = str(error).rpartition(": must be ")[2]
        raise _refusal(name, entries, f"a list in which each entry is {accepted}") from error


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _one_of(hint: Any) -> str:
    return ", ".join(map(repr, get_args(hint)))


def _is_of(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(value, bool):  # to Python, True is 1
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _check_range(name: str, value: float, interval: str) -> None:
    low, high = interval[1:-1].split(", ")
    if value != value or (abs(value) == math.inf and "inf" in interval):
        raise _refusal(name, value, "a finite number")
    if 0 < abs(value) < 1e-30:  # 0 in float32, or nearly
        raise _refusal(name, value, "at least 1e-30")
    if value < float(low) or (value == float(low) and interval[0] == "("):
        raise _refusal(name, value, f"{'at least' if interval[0] == '[' else 'more than'} {low}")
    if value > float(high) or (value == float(high) and interval[-1] == ")"):
        raise _refusal(name, value, f"{'at most' if interval[-1] == ']' else 'less than'} {high}")


def _refusal(name: str, value: Any, accepted: str) -> ConfigError:
    shown = " ".join(repr(value).split())  # some reprs have several lines
    return ConfigError(f"{name}={shown[:100]}: must be {accepted}")
