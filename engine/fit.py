"""config.gradient_accumulation_steps = "auto": the fewest micro-batches with which a step fits.

The compiler says what a program needs of a device's memory, before anything runs. So a few numbers
are compiled, no step fails to find out, and the program that is chosen then trains. Evaluation
predicts the largest part of its batch that fits. All hosts compile and choose the same.
"""

import bisect
import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp

from common.errors import DeviceError
from engine import sharding
from engine.cluster import guard, watchdog
from engine.forecast.worker import refusal
from engine.plan import Programs, evaluated_weights
from engine.run import host_bytes
from engine.step import CompiledStep, TrainState

T = TypeVar("T")
_log = logging.getLogger("tpu_suite")
_WAITING = 3  # batches on a device beside that of the step: `sharding.Feed`, the step before it
_SPARE = 0.05  # of a GPU's or TPU's memory: gaps between arrays, and what libraries take
# On CPUs the next step takes its temporaries while one runs, and malloc leaves holes of their size:
# runs took them 2.2 to 3 times. Threads and libraries that a process needs later take some more.
_ON_CPUS, _LATER = 3, 2**29
_GIB = 2.0**30
_USED = re.compile(r"Used ([\d.]+)G of [\d.]+G hbm")  # libtpu, of a program that does not fit


class DoesNotFit(DeviceError):
    """Not even the smallest part of a batch fits a device."""


def smallest(
    numbers: Sequence[int], needs: Callable[[int], float], fixed: float, free: float
) -> tuple[int, dict[int, float]]:
    """The smallest of `numbers` of parts whose program fits; 0 if none does.

    Args:
      numbers: rising; after the first, which adds up no gradients, a larger one needs less.
      needs: number -> bytes of its program, inf if the compiler does not say how many.
      fixed: about how many of them do not depend on the number.
      free: the bytes that there are.

    Returns:
      The number, and what each number needs for which `needs` was asked: few of them.
    """
    tried: dict[int, float] = {}
    low, high, at = -1, len(numbers), 0  # the number at low does not fit, that at high does
    while high - low > 1:
        number = numbers[at]
        need = tried[number] = needs(number)
        low, high = (low, at) if need <= free and need < math.inf else (at, high)
        expected = 2.0 * number  # where nothing is known
        if need < math.inf:
            expected = number * (need - fixed) / (free - fixed) if free > fixed else math.inf
        at = min(max(bisect.bisect_left(numbers, expected), low + 1), high - 1)
    return (numbers[high] if high < len(numbers) else 0), tried


@dataclasses.dataclass(frozen=True)
class Fit:
    """Finds the programs that fit. A number in the config is taken as it is."""

    programs: Programs
    state: TrainState  # its shapes
    trains: bool  # False: it evaluates alone, without the optimizer's state
    free: Callable[[], float]  # the bytes that each device has; inf: only the compiler knows
    memory: Callable[[Any], float]  # a compiled step -> its bytes
    say: Callable[[str], None] = _log.info

    @classmethod
    def of_run(cls, programs: Programs, state: TrainState, *splits: str) -> Self:
        """For this run's devices; the run reads these splits of the data, which are open."""

        def free() -> float:
            return _free(programs, state, splits)

        times = _ON_CPUS if programs.mesh.devices.flat[0].platform == "cpu" else 1
        memory = functools.partial(_memory, times=times)
        return cls(programs, state, "train" in splits, free, memory)

    def train(self, compiled: Callable[[Programs], T]) -> tuple[Programs, T]:
        """(the programs with their number of micro-batches, the train step of them).

        `compiled` makes the step, or raises what the compiler says. DoesNotFit has the figures.
        """
        programs, state = self.programs, self.state
        settings, benchmark = programs.settings, programs.benchmark
        if settings.gradient_accumulation_steps != "auto":
            return programs, compiled(programs)
        numbers = _divisors(settings.train_batch_size // programs.mesh.size)
        if "/" in str(benchmark.bn_span):  # it says how many images a forward pass has
            numbers = [programs.micro_batches]
        cut = {n: dataclasses.replace(programs, micro_batches=n) for n in numbers}
        number, step = self._choose(
            "gradient_accumulation_steps",
            {n: n for n in numbers},
            lambda n: compiled(cut[n]),
            _bytes(state) + _bytes(state.params),  # with the sum of the gradients
            lambda n: _WAITING * _batch(programs, "train"),
        )
        statistics = [x for x in jax.tree.leaves(state.model_state) if x.dtype != jnp.int32]
        if number > 1 and statistics:
            self.say(
                f"NOTE where BatchNorm learns statistics, {cut[number].norm_examples:,} of the "
                f"{settings.train_batch_size:,} {benchmark.unit} of a batch share them"
            )
        return cut[number], step

    def predict(self, compiled: Callable[[int], T]) -> tuple[int, T]:
        """(evaluation's batch or, with "auto", its largest part that fits; the predict step).

        `compiled` makes it for so many examples, as for `train`.
        """
        programs, size = self.programs, self.programs.settings.eval_batch_size
        if programs.settings.gradient_accumulation_steps != "auto":
            return size, compiled(size)
        weights = _bytes(evaluated_weights(self.state))
        sizes = {n: size // n for n in _divisors(size // programs.mesh.size)}
        batch, beside = _WAITING * _batch(programs, "eval"), 0.0
        if self.trains:
            beside = _bytes(self.state) - weights + (1 + _WAITING) * _batch(programs, "train")
        number, step = self._choose(
            "eval_batch_size",
            sizes,
            lambda n: compiled(sizes[n]),
            weights,
            lambda n: beside + batch / n,
        )
        return sizes[number], step

    def _choose(
        self,
        key: str,
        values: Mapping[int, int],
        compiled: Callable[[int], T],
        fixed: float,
        beside: Callable[[int], float],
    ) -> tuple[int, T]:
        """The smallest number of parts that fits on all hosts, and its program.

        Says how each number came out; `values` has for each what the config's `key` would be.
        `fixed` is as in `smallest`, and so much is `beside` a program.
        """
        steps: dict[int, T] = {}

        @functools.cache
        def own(number: int) -> float:
            watchdog.doing(f"compiling for {key}={values[number]}")
            try:
                steps[number] = compiled(number)
                return self.memory(steps[number]) + beside(number)
            except jax.errors.JaxRuntimeError as error:
                text, fits = refusal(error, key)
                if fits is None:
                    raise
                used = _USED.search(text)
                return float(used[1]) * _GIB if used else math.inf

        def needs(number: int) -> float:
            need = own(number)
            refused = number not in steps and need <= free
            return sharding.largest_of_processes(math.inf if refused else need)

        first, *_ = values
        own(first)  # before the memory is read: a compiler on CPUs keeps some for itself
        free = -sharding.largest_of_processes(-self.free())
        number, tried = smallest([*values], needs, fixed + beside(1), free)
        lines = []
        for n, need in sorted(tried.items()):
            figure = f"needs {need / _GIB:.2f} GiB" if need < math.inf else "is refused"
            line = f"{values[n]} {figure}"
            if not lines and free < math.inf:
                line += f", the device has {max(free, 0) / _GIB:.2f} GiB"
            lines.append(line + ": chosen" * (n == number))
        if not number:
            raise DoesNotFit(
                f"config.{key}: no value fits: {'; '.join(lines)}. Use a smaller model, smaller "
                "images or shorter texts, or devices with more memory; on CPUs also end other "
                "programs, or raise config.host_memory_limit and `ulimit -v`"
            )
        self.say(f"{key}: {'; '.join(lines)}")
        return number, steps[number]


def _memory(step: CompiledStep, times: int) -> float:
    """Bytes that a step needs of a device, temporaries so often; 0 where the compiler is silent."""

    def total(program: Any) -> float:
        if not (sizes := program.memory_analysis()):
            return 0.0
        results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        work = times * sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes
        return float(sizes.argument_size_in_bytes + results + work)

    return max(map(total, step.programs.values()))


def _free(programs: Programs, state: TrainState, splits: Sequence[str]) -> float:
    """Bytes that each device of this host still has.

    Simulated devices share the memory of their host, which also has the input and, while it is
    written, a copy of the state.
    """
    devices, settings = programs.mesh.local_devices, programs.settings
    if devices[0].platform == "cpu":
        free = guard.memory_free(limit=settings.host_memory_limit) - _LATER
        free -= sum(host_bytes(programs.benchmark, settings, *splits).values())
        return (free - _bytes(state) * ("train" in splits)) / len(devices)
    stats = [device.memory_stats() or {} for device in devices]
    known = [x["bytes_limit"] - x.get("bytes_in_use", 0) for x in stats if "bytes_limit" in x]
    return (1 - _SPARE) * min(known, default=math.inf)


def _batch(programs: Programs, split: str) -> float:
    """Bytes of a device's share of the largest batch."""
    return max(map(_bytes, programs.batch_specs(split))) / programs.mesh.size


def _bytes(tree: Any) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
