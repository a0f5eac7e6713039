"""Converts durations to steps, and says at which steps something recurring is due.

A duration in a config is an int (steps) or a string:

    500, '500', '500 steps'     updates of the parameters
    '90 epochs', '2.5 epochs'   passes over the training set
    '1e6 examples'              training examples
    '60 seconds', '5 min', '1h' wall-clock time; only for `Every`
    0, '0', ''                  never, where the caller allows it
    '32, 42.7, 48 epochs'       a list, for `Every` and `list_to_steps`; an entry without a unit
                                has the unit of the last entry

The space before a unit is optional, and each unit may be singular. Durations are converted once,
when the run is set up; the training loop knows steps only.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from errors import ConfigError

# Every accepted spelling -> (unit, how many of that unit one is).
_UNITS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("", "step", "steps"), ("steps", 1)),
    **dict.fromkeys(("epoch", "epochs"), ("epochs", 1)),
    **dict.fromkeys(("example", "examples"), ("examples", 1)),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), ("seconds", 1)),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), ("seconds", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600)),
}
# The number of digits is bounded, so that a mistake such as '1e999999' is refused, not computed.
_DURATION = re.compile(
    r"(-?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:e[+-]?[0-9]{1,2})?)\s*([a-z]*)"
)
_IN_STEPS = "a number of steps, or a string such as '500 steps', '2.5 epochs', '1e6 examples'"
_FOR_EVERY = f"{_IN_STEPS}, '60 seconds', '32, 48 epochs'; 0 for never"


def to_steps(
    duration: int | str, *, batch_size: int, num_examples: int, name: str, allow_off: bool = False
) -> int:
    """Converts a duration to steps, rounded to the nearest.

    An epoch is num_examples / batch_size steps, as a real number: 90 epochs of 1,281,167 examples
    at 1024 are 112,603 steps, not 90 times 1251. A positive duration is at least 1 step.

    Args:
      duration: steps, epochs or examples, as the top of this file describes them.
      batch_size: examples per step over all devices.
      num_examples: examples in one epoch.
      name: the config key, for the error message.
      allow_off: whether the duration may be zero, which is 0 steps.

    Raises:
      ConfigError: not a duration, negative, zero without `allow_off`, or a time.
    """
    accepted = f"{_IN_STEPS}; 0 for never" if allow_off else f"{_IN_STEPS}; more than 0"
    exact = _exact_steps(duration, name, accepted, batch_size, num_examples)
    if not (exact or allow_off):
        raise _error(name, duration, "must be positive", accepted)
    return max(1, round(exact)) if exact else 0


def list_to_steps(durations: str, *, batch_size: int, num_examples: int, name: str) -> list[int]:
    """Converts a list such as '32, 42.7, 48 epochs' to steps, in the order of the list.

    A comma without a space after it does not separate: '1,500' may mean one number or two, and is
    refused. The arguments and errors are those of `to_steps`.
    """
    entries = durations.strip().split(", ")
    unit = re.sub(r".*[^A-Za-z]", "", entries[-1])
    entries = [entry if entry[-1:].isalpha() else f"{entry} {unit}".rstrip() for entry in entries]
    sizes: Any = {"batch_size": batch_size, "num_examples": num_examples}
    return [to_steps(entry, **sizes, name=name) for entry in entries]


class Every:
    """Says at which steps something recurring is due.

    In steps, epochs and examples the answer is a pure function of the step, so a resumed run
    decides as an uninterrupted one would: due at round(k * period) for k = 1, 2, ..., with the
    period exact in steps. (Multiples of a rounded period would be 140 steps early after 1000
    epochs of ImageNet at 1024.) A period shorter than one step is due at every step; a list is due
    at its entries, each rounded to a step.

    In seconds it is due when that long has passed since it was last due, or since it was made.
    Hosts' clocks differ, so for `by_clock` all hosts must follow the answer of one of them.

    Attributes:
      by_clock: whether the answer depends on the time; False if it is never due.
    """

    def __init__(
        self, period: Fraction, steps: Sequence[int] = (), clock: Callable[[], float] | None = None
    ):
        """Use `parse`. With a clock `period` is in seconds; `steps` replace it."""
        self.by_clock = clock is not None and period > 0
        self._period = self._begin = period
        self._steps, self._clock = sorted(steps), clock or time.monotonic
        self._last = self._clock()

    @classmethod
    def parse(
        cls,
        duration: int | str,
        *,
        batch_size: int,
        num_examples: int,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> Every:
        """Makes an `Every` from a duration or a list of durations; zero and '' mean never.

        The arguments are those of `to_steps`; `clock` returns the seconds since any fixed moment
        and never runs backwards.

        Raises:
          ConfigError: not a duration, negative, or a list with a time or a zero.
        """
        sizes = {"batch_size": batch_size, "num_examples": num_examples}
        if isinstance(duration, str) and ", " in duration:
            return cls(Fraction(0), steps=list_to_steps(duration, **sizes, name=name))
        amount, unit = _parse(duration, name, _FOR_EVERY)
        if unit == "seconds":
            return cls(amount, clock=clock)
        return cls(_exact_steps(duration, name, _FOR_EVERY, **sizes))

    def since(self, offset: int | str, *, batch_size: int, num_examples: int, name: str) -> Every:
        """The same period, due for the first time at `offset`: round(offset + k * period).

        With an offset k is 0, 1, ...; without one ('' or 0) nothing changes. '4 epochs' since
        '3 epochs' are the ends of the 3rd, 7th, 11th ... epoch. The arguments are those of `parse`.

        Raises:
          ConfigError: not such a duration, or there is no period in steps that it could begin.
        """
        begin = _exact_steps(offset, name, f"{_IN_STEPS}; '' for none", batch_size, num_examples)
        if not begin:
            return self
        if self.by_clock or not self._period:
            raise _error(name, offset, "has no period in steps to begin", "'' for none")
        later = copy.copy(self)
        later._begin = max(Fraction(1), begin)
        return later

    def due(self, step: int) -> bool:
        """Whether it is time, after `step` steps of training have been done.

        A period in seconds starts anew whenever the answer is True, so ask once per step.
        """
        if not self.by_clock:
            return step > 0 and self.next_after(step - 1) == step
        now = self._clock()
        if now - self._last < self._period:
            return False
        self._last = now
        return True

    def next_after(self, step: int) -> int | None:
        """The first due step after `step` (>= 0); None if never, or if only the clock knows."""
        if self._steps:
            return next((due for due in self._steps if due > step), None)
        if self.by_clock or not self._period:
            return None
        # The first k whose time is not nearer to `step` than to step + 1. On an exact tie
        # round() goes to the even number, which may still be `step`: then it is the next k.
        begin, period = self._begin, self._period
        k = max(0, math.ceil((step + Fraction(1, 2) - begin) / period))
        due = round(begin + k * period)
        return due if due > step else round(begin + (k + 1) * period)


def _parse(duration: object, name: str, accepted: str) -> tuple[Fraction, str]:
    """Reads a duration: an exact amount >= 0, and 'steps', 'epochs', 'examples' or 'seconds'."""
    # bool is an int to Python, but True is a mistake here, not one step.
    if isinstance(duration, bool) or not isinstance(duration, int | str):
        raise _error(name, duration, f"is of type {type(duration).__name__}", accepted)
    match = _DURATION.fullmatch(str(duration).strip().lower() or "0")
    if match is None:
        raise _error(name, duration, "is not a duration", accepted)
    if match[2] not in _UNITS:
        raise _error(name, duration, f"has the unknown unit '{match[2]}'", accepted)
    unit, scale = _UNITS[match[2]]
    amount = Fraction(match[1]) * scale  # exact: '0.1 epochs' is a tenth
    if amount < 0:
        raise _error(name, duration, "is negative", accepted)
    if unit == "steps" and amount.denominator != 1:
        raise _error(name, duration, "is not a whole number of steps", accepted)
    return amount, unit


def _exact_steps(
    duration: object, name: str, accepted: str, batch_size: int, num_examples: int
) -> Fraction:
    """Converts a duration to steps without rounding; a time is refused."""
    amount, unit = _parse(duration, name, accepted)
    if unit == "seconds":
        raise _error(name, duration, "is a time, not steps", accepted)
    if batch_size < 1 or num_examples < 1:
        raise ConfigError(
            f"batch_size={batch_size}, num_examples={num_examples}: both must be at least 1"
        )
    examples = {"steps": batch_size, "epochs": num_examples, "examples": 1}[unit]
    return amount * examples / batch_size


def _error(name: str, value: object, problem: str, accepted: str) -> ConfigError:
    shown = " ".join(repr(value).split())  # some reprs have several lines
    return ConfigError(f"{name}={shown} {problem}; accepted: {accepted}")
