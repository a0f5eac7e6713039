"""Converts durations to steps, and decides at which steps a recurring action is due.

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

import dataclasses
import math
import re
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Self

from common.errors import ConfigError

# Every accepted spelling -> (unit, how many of this unit).
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
MAX_STEPS = 2**31 - 1  # the state counts steps in int32
_IN_STEPS = "a number of steps, or a string such as '500 steps', '2.5 epochs', '1e6 examples'"
_FOR_EVERY = f"{_IN_STEPS}, '60 seconds', '32, 48 epochs'; 0 for never"


def to_steps(
    duration: int | str, *, batch_size: int, num_examples: int, name: str, allow_off: bool = False
) -> int:
    """Converts a duration to steps, rounded to the nearest.

    An epoch is num_examples / batch_size steps, as a real number: 90 epochs of 1,281,167 examples
    at 1024 are 112,603 steps, not 90 times 1251. A positive duration is at least 1 step.

    `batch_size` examples are in a step over all devices, `num_examples` in an epoch;
    `name` is the config key, for the error message. With `allow_off` the duration may be zero.
    """
    accepted = f"{_IN_STEPS}; 0 for never" if allow_off else f"{_IN_STEPS}; more than 0"
    steps, _ = _parse(duration, name, accepted, batch_size, num_examples)
    if not (steps or allow_off):
        raise _error(name, duration, "must be positive", accepted)
    return max(1, round(steps)) if steps else 0


def list_to_steps(durations: str, *, batch_size: int, num_examples: int, name: str) -> list[int]:
    """Converts a list such as '32, 42.7, 48 epochs' to steps, in the order of the list.

    A comma without a space after it does not separate: '1,500' may mean one number or two, and is
    refused. `to_steps` converts the entries.
    """
    entries = durations.strip().split(", ")
    unit = re.sub(r".*[^A-Za-z]", "", entries[-1][-20:])
    entries = [entry if entry[-1:].isalpha() else f"{entry} {unit}".rstrip() for entry in entries]
    sizes: Any = {"batch_size": batch_size, "num_examples": num_examples}
    return [to_steps(entry, **sizes, name=name) for entry in entries]


def stretched(duration: int | str, times: float) -> int | str:
    """A duration, or a list of them, with so many times the epochs; other units stay."""
    if not isinstance(duration, str):
        return duration
    *entries, last = [_DURATION.fullmatch(x.strip().lower()) for x in duration.split(", ")]
    if not (
        last and _UNITS.get(last[2]) == ("epochs", 1)
    ):  # the reader of the key explains mistakes
        return duration
    numbers = [float(match[1]) * times for match in (*entries, last) if match]
    return f"{', '.join(f'{number:.9g}' for number in numbers)} epochs"


@dataclasses.dataclass
class Every:
    """Decides at which steps a recurring action is due; `parse` makes it.

    In steps, epochs and examples the answer is a pure function of the step, so a resumed run
    decides as an uninterrupted run does. The action is due at round(begin + k * period) for k = 0,
    1, ..., with the period exact in steps: multiples of a rounded period would be 140 steps early
    after 1000 epochs of ImageNet at 1024. With a period shorter than one step it is due at every
    step; with a list it is due at the entries, each rounded to a step.

    In seconds it is due when that much time has passed since it was last due, or since the start.
    The clocks of hosts differ, so with `by_clock` all hosts must follow one host's answer.
    """

    period: Fraction = Fraction(0)  # in steps, or in seconds with `by_clock`; 0 for never
    begin: Fraction = Fraction(0)  # the first due step, not rounded
    steps: tuple[int, ...] = ()  # the sorted due steps of a list, instead of a period
    by_clock: bool = False  # whether the answer depends on the time
    clock: Callable[[], float] = time.monotonic  # returns seconds since a fixed moment

    def __post_init__(self) -> None:
        self._last = self.clock()
        self._known: tuple[int, float] = (0, 0)  # of two steps, none between is due

    @classmethod
    def parse(
        cls,
        duration: int | str,
        *,
        batch_size: int,
        num_examples: int,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Converts a duration, or a list of them, of the config key `name`; 0 and '' mean never.

        `clock` returns the seconds since a fixed moment.
        """
        if isinstance(duration, str) and ", " in duration:
            sizes: Any = {"batch_size": batch_size, "num_examples": num_examples}
            return cls(steps=tuple(sorted(list_to_steps(duration, **sizes, name=name))))
        period, is_time = _parse(duration, name, _FOR_EVERY, batch_size, num_examples, True)
        return cls(period, begin=period, by_clock=is_time and period > 0, clock=clock)

    def since(self, offset: int | str, *, batch_size: int, num_examples: int, name: str) -> Self:
        """Returns the same period with its first due step at `offset`.

        '4 epochs' since '3 epochs' are the ends of the 3rd, 7th, 11th ... epoch. Without an offset
        ('' or 0) nothing changes. `name` is the offset's config key.
        """
        begin, _ = _parse(offset, name, f"{_IN_STEPS}; '' for none", batch_size, num_examples)
        if not begin:
            return self
        if self.by_clock or not self.period:
            problem = "goes with one period of steps_per_eval, such as '4 epochs'"
            raise _error(name, offset, problem, "'' for none")
        return dataclasses.replace(self, begin=max(Fraction(1), begin))

    def due(self, step: int) -> bool:
        """Returns whether the action is due, after `step` steps of training have been done.

        A period in seconds starts again whenever the answer is True, so ask once per step.
        """
        if not self.by_clock:
            if step > 0 and not self._known[0] < step <= self._known[1]:
                self._known = step - 1, self.next_after(step - 1) or math.inf
            return step == self._known[1] > 0
        now = self.clock()
        is_due = now - self._last >= self.period
        if is_due:
            self._last = now
        return is_due

    def next_after(self, step: int) -> int | None:
        """Returns the first due step after `step` (>= 0); None if there is none, or `by_clock`."""
        if self.steps:
            return next((due for due in self.steps if due > step), None)
        if self.by_clock or not self.period:
            return None
        # The first k whose time is not nearer to `step` than to step + 1. On an exact tie
        # round() goes to the even number, which may still be `step`: then it is the next k.
        k = max(0, math.ceil((step + Fraction(1, 2) - self.begin) / self.period))
        due = round(self.begin + k * self.period)
        return due if due > step else round(self.begin + (k + 1) * self.period)


def _parse(
    duration: int | str,
    name: str,
    accepted: str,
    batch_size: int,
    num_examples: int,
    allow_time: bool = False,
) -> tuple[Fraction, bool]:
    """Returns (exact steps, False), or (seconds, True) with `allow_time`."""
    if batch_size < 1 or num_examples < 1:
        raise ConfigError(
            f"batch_size={batch_size}, num_examples={num_examples}: both must be at least 1"
        )
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
    if unit == "seconds":
        if not allow_time:
            raise _error(name, duration, "is a time, not steps", accepted)
        return amount, True
    examples = {"steps": batch_size, "epochs": num_examples, "examples": 1}[unit]
    steps = amount * examples / batch_size
    if steps > MAX_STEPS:
        raise _error(name, duration, f"is more than {MAX_STEPS:,} steps", accepted)
    return steps, False


def _error(name: str, value: int | str, problem: str, accepted: str) -> ConfigError:
    return ConfigError(f"{name}={value!r:.100} {problem}; accepted: {accepted}")
