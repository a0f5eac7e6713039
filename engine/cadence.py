"""Durations in the unit a person thinks in, and the one predicate "is it time?".

A duration in a config is an int (steps) or a string:

    500, '500', '500 steps'     updates of the parameters
    '90 epochs', '2.5 epochs'   passes over the training set
    '1e6 examples'              training examples
    '60 seconds', '5 min', '1h' wall-clock time; only for `Every`
    0, '0', ''                  never, where the caller allows it

The space may be left out, and each unit may be singular. Durations are converted once, when the
run is set up; the training loop knows steps only.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from fractions import Fraction

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
# The digits are bounded so that a slip such as '1e999999' is refused, not computed.
_DURATION = re.compile(
    r"(-?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:e[+-]?[0-9]{1,2})?)\s*([a-z]*)"
)
_IN_STEPS = "a number of steps, or a string such as '500 steps', '2.5 epochs', '1e6 examples'"
_IN_STEPS_OR_TIME = f"{_IN_STEPS}, '60 seconds'; 0 for never"


def to_steps(
    duration: int | str,
    *,
    batch_size: int,
    num_examples: int,
    name: str,
    allow_off: bool = False,
) -> int:
    """Converts a duration to steps, rounded to the nearest.

    An epoch is num_examples / batch_size steps, as a real number: 90 epochs of 1,281,167 examples
    at 1024 are 112,603 steps, not 90 times 1251.

    Args:
      duration: steps, epochs or examples, as described at the top of this file.
      batch_size: examples per step over all devices.
      num_examples: examples in one epoch.
      name: the config key, for the error message.
      allow_off: whether a duration of zero may pass, as 0 steps.

    Returns:
      Steps; at least 1 for a positive duration.

    Raises:
      ConfigError: not a duration, negative, zero without `allow_off`, or a time.
    """
    accepted = f"{_IN_STEPS}; 0 for never" if allow_off else f"{_IN_STEPS}; more than 0"
    amount, unit = _parse(duration, name, accepted)
    if unit == "seconds":
        raise _error(name, duration, "is a time, not steps", accepted)
    if not amount:
        if allow_off:
            return 0
        raise _error(name, duration, "must be positive", accepted)
    return max(1, round(_real_steps(amount, unit, batch_size, num_examples)))


class Every:
    """Says at which steps something recurring is due.

    In steps, epochs and examples the answer is a pure function of the step, so a resumed run
    decides as an uninterrupted one would: due at round(k * period) for k = 1, 2, ..., with the
    period exact in steps. (Multiples of a rounded period would be 140 steps early after 1000
    epochs of ImageNet at 1024.) A period shorter than one step is due at every step.

    In seconds it is due when that long has passed since it was last due, or since it was made.
    Hosts' clocks differ, so for `by_clock` all hosts must follow the answer of one of them.

    Attributes:
      by_clock: whether the answer depends on the time; False if it is never due.
    """

    def __init__(
        self,
        period: Fraction | int,
        *,
        begin: Fraction | int | None = None,
        by_clock: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prefer `Every.parse` and `since`.

        Args:
          period: in steps, or in seconds if `by_clock`; 0 for never.
          begin: when it is due for the first time, in steps; None is after one period.
          by_clock: whether the period is a time.
          clock: seconds since any fixed moment, never running backwards.
        """
        self.by_clock = by_clock and period > 0
        self._period = Fraction(period)
        self._begin = self._period if begin is None else Fraction(begin)
        self._clock = clock
        self._last = clock() if self.by_clock else 0.0

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
        """Makes an `Every` from a duration; zero and '' mean never.

        Args:
          duration: any of those described at the top of this file.
          batch_size: examples per step over all devices.
          num_examples: examples in one epoch.
          name: the config key, for the error message.
          clock: as for `Every`.

        Raises:
          ConfigError: not a duration, or negative.
        """
        amount, unit = _parse(duration, name, _IN_STEPS_OR_TIME)
        if unit == "seconds":
            return cls(amount, by_clock=True, clock=clock)
        return cls(_real_steps(amount, unit, batch_size, num_examples))

    def since(self, offset: int | str, *, batch_size: int, num_examples: int, name: str) -> Every:
        """The same period, due for the first time at `offset`: round(offset + k * period).

        With an offset k is 0, 1, ...; without one ('' or 0) nothing changes. '4 epochs' since
        '3 epochs' are the ends of the 3rd, 7th, 11th ... epoch.

        Args:
          offset: steps, epochs or examples.
          batch_size: examples per step over all devices.
          num_examples: examples in one epoch.
          name: the config key of the offset, for the error message.

        Raises:
          ConfigError: not such a duration, or there is no period in steps to go with it.
        """
        amount, unit = _parse(offset, name, f"{_IN_STEPS}; '' for none")
        if unit == "seconds":
            raise _error(name, offset, "is a time, not steps", f"{_IN_STEPS}; '' for none")
        if not amount:
            return self
        if self.by_clock or not self._period:
            raise _error(name, offset, "has no period in steps to begin", "'' for none")
        begin = _real_steps(amount, unit, batch_size, num_examples)
        return Every(self._period, begin=max(Fraction(1), begin))

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
        if self.by_clock or not self._period:
            return None
        # The first k whose time is not nearer to `step` than to step + 1. On an exact tie
        # round() goes to the even one, which may still be `step`: then it is the next k.
        begin, period = self._begin, self._period
        k = max(0, math.ceil((step + Fraction(1, 2) - begin) / period))
        due = round(begin + k * period)
        return due if due > step else round(begin + (k + 1) * period)


def _parse(duration: object, name: str, accepted: str) -> tuple[Fraction, str]:
    """Reads a duration: an exact amount >= 0, and 'steps', 'epochs', 'examples' or 'seconds'."""
    # bool is an int to Python, but True is a slip here, not one step.
    if isinstance(duration, bool) or not isinstance(duration, int | str):
        raise _error(name, duration, f"is of type {type(duration).__name__}", accepted)
    if isinstance(duration, int):
        amount, unit = Fraction(duration), "steps"
    else:
        match = _DURATION.fullmatch(duration.strip().lower() or "0")
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


def _real_steps(amount: Fraction, unit: str, batch_size: int, num_examples: int) -> Fraction:
    """Converts to steps without rounding; `unit` is not 'seconds'."""
    if batch_size < 1 or num_examples < 1:
        raise ConfigError(
            f"batch_size={batch_size}, num_examples={num_examples}: both must be at least 1"
        )
    examples = {"steps": batch_size, "epochs": num_examples, "examples": 1}[unit]
    return amount * examples / batch_size


def _error(name: str, value: object, problem: str, accepted: str) -> ConfigError:
    shown = " ".join(repr(value).split())  # some reprs have several lines
    return ConfigError(f"{name}={shown} {problem}; accepted: {accepted}")
