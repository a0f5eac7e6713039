"""Reads config keys into frozen dataclasses, with the kind and the range of each value checked.

A dataclass lists keys as fields. The field's type is the kind of the value; `Annotated` with an
interval is its range:

    momentum: Annotated[float, "[0, 1)"]

A number without a range must still be finite.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from errors import ConfigError

T = TypeVar("T")

# Ranges that several keys have.
Positive = Annotated[float, "(0, inf)"]
NotNegative = Annotated[float, "[0, inf)"]
Share = Annotated[float, "[0, 1)"]
Size = Annotated[int, "[1, 1e9]"]  # larger ones only fill the memory
Count = Annotated[int, "[0, 1e12]"]

_INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([\])])")
_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}


def read(settings: type[T], config: Any) -> T:
    """Makes a frozen dataclass from the config's keys of the same names.

    A field whose type is itself such a dataclass is read the same way, from the nested config of
    its name or else from the same keys.

    Raises:
      ConfigError: the recipe lacks a key, or a value is not of its kind or range.
    """
    hints = get_type_hints(settings, include_extras=True)
    values = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type] (T is a dataclass)
        kind, name = hints[field.name], field.name
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            nested = hasattr(config.get(name), "items")
            values[name] = read(kind, config[name] if nested else config)
        elif name in config:
            values[name] = check(name, config[name], kind)
        else:
            raise ConfigError(f"the recipe has no config.{name}; configs/_loop.py shows the keys")
    return settings(**values)


def check(name: str, value: Any, kind: Any) -> Any:
    """Returns `value` if it is of a kind such as `int` or `Annotated[float, "[0, 1)"]`.

    Raises:
      ConfigError: it is not; the message says what is accepted.
    """
    interval = ""
    if get_origin(kind) is Annotated:
        kind, interval = get_args(kind)
    is_union = get_origin(kind) in (Union, types.UnionType)
    kinds = get_args(kind) if is_union else (kind,)
    if get_origin(kind) is Sequence:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _refusal(name, value, "a list of numbers, such as (30, 60)")
        (inner,) = get_args(kind)
        return tuple(
            check(name, entry, Annotated[inner, interval] if interval else inner) for entry in value
        )
    if not any(_is_of(value, known) for known in kinds):
        raise _refusal(name, value, " or ".join(_NAMES.get(known, str(known)) for known in kinds))
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_range(name, value, interval)
    return value


def _is_of(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:  # to Python, True is 1
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def _check_range(name: str, value: float, interval: str) -> None:
    if not math.isfinite(value):
        raise _refusal(name, value, "a finite number")
    if not (match := _INTERVAL.fullmatch(interval)):
        return
    opening, closing = match[1], match[4]
    least, most = float(match[2]), float(match[3])
    is_above = value >= least if opening == "[" else value > least
    is_below = value <= most if closing == "]" else value < most
    if is_above and is_below:
        return
    if math.isinf(most):
        accepted = f"at least {match[2]}" if opening == "[" else f"more than {match[2]}"
    else:
        accepted = f"in {interval}"
    raise _refusal(name, value, accepted)


def _refusal(name: str, value: Any, accepted: str) -> ConfigError:
    shown = " ".join(repr(value).split())  # some reprs have several lines
    return ConfigError(f"config.{name}={shown[:200]}: must be {accepted}")
