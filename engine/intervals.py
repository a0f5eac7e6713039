"""Reports the log intervals of a training run: means, rates, waiting for input, time left."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from common import pools
from common.progress import hms
from engine.plan import Plan
from engine.report.writers import Reporter, is_like
from engine.run import Run
from engine.sharding import Feed, num_chips

_FIRST_LINE = 60  # seconds of training without a report, after which a line says how fast it is
_SLOW_SHARE = 0.2  # of the time, waiting for input; less is not worth a warning
_SLOW_INTERVALS = 3  # in a row; the first after a start or an evaluation is often slow
_ADVICE = {  # where the benchmark has none
    "reading": "move the data closer (a bucket of this region, a faster disk)",
    "decoding": "use machines with more CPU cores, or store smaller examples",
    "transfer": "send fewer bytes (smaller examples), or use more hosts for the same devices",
    "input": "profile the benchmark's train_batches",
}


class Intervals:
    """Reports each interval one step after its end, so that the loop never waits for its sums."""

    def __init__(
        self, reporter: Reporter, feed: Feed, run: Run, plan: Plan, step: int, evaluating: bool
    ):
        """Begins the first interval after `step` steps; `evaluating` says if the run evaluates."""
        self._reporter, self._feed, self._run, self._plan = reporter, feed, run, plan
        self._total = plan.total_steps
        self._learning_rate = jax.jit(plan.learning_rate)
        self._next_evaluation = plan.eval_every.next_after if evaluating else None
        self._progress = Progress(step, self._total)
        self._bottleneck = Bottleneck(run.benchmark.input_advice)
        self._pending: tuple[int, Any, Any] | None = None  # an interval that is not yet reported
        self._has_line = False  # whether the user has seen how fast the run is

    def close(self, step: int, totals: Any) -> None:
        """Ends an interval at `step`; `totals` are its sums on the devices."""
        # Asked for now, the rate comes with the sums; later it would come after the next step.
        self._pending = step, totals, self._learning_rate(jax.device_put(step - 1))

    def pause(self, seconds: float, evaluated: bool = False) -> None:
        """Leaves time out of the rates; `evaluated` says that it was one complete evaluation."""
        self._progress.pause(seconds)
        if evaluated:
            self._progress.eval_seconds = seconds

    def show_progress(self, step: int) -> None:
        """Shows the step and the time left on a terminal; prints one line if no report is near."""
        done = max(step - 1, 1)  # the newest step may still run
        elapsed, seconds = self._progress.so_far(done)
        if not self._has_line and elapsed > _FIRST_LINE:
            self._has_line, hours = True, seconds * self._total / 3600
            where = "on this CPU " if jax.default_backend() == "cpu" else ""
            run = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
            self._reporter.say(
                f"step {done:,}/{self._total:,}: {where}a step takes about "
                f"{seconds:.2g} s, the run {run} besides its evaluations"
            )
        left, total = hms(self._progress.remaining(step)), self._total
        bar = "#" * (20 * min(step, total) // total)
        self._reporter.live(f"[{bar:20}] {step / total:4.0%}  step {step:,}/{total:,}  {left} left")

    def report(self) -> Any:
        """Reports the closed interval and returns its totals; None if no interval was closed.

        An interval with a step that was not finite is only returned.
        """
        if self._pending is None:
            return None
        step, totals, learning_rate = jax.device_get(self._pending)
        self._pending = None
        if not int(totals["bad_step"]):
            sums = {k: v for k, v in totals.items() if k != "bad_step"}
            self._report(step, sums, float(learning_rate))
        return totals

    def _report(self, step: int, sums: dict[str, tuple[Any, Any]], learning_rate: float) -> None:
        self._has_line = True
        benchmark, batch_size = self._run.benchmark, self._run.settings.train_batch_size
        means = {k: float(total / weight) for k, (total, weight) in sums.items() if weight}
        seconds, steps = self._progress.window(step)
        shares, warning = self._bottleneck.interval(seconds, self._feed)
        unit, count = benchmark.unit, float(batch_size * steps)
        if benchmark.throughput:
            unit, name = benchmark.throughput
            count = float(sums[name][1])
        rate, epoch = count / seconds, step * batch_size / self._plan.num_examples
        self._progress.foresee(step, self._next_evaluation)
        left = self._progress.remaining(step)
        row = {
            "step": step,
            "epoch": epoch,
            **means,
            "learning_rate": learning_rate,
            f"{unit}_per_second": rate,
            f"{unit}_per_second_per_chip": rate / num_chips(self._run.mesh),
            "step_seconds": seconds / steps,
            **{k: share for k, share in shares.items() if not math.isnan(share)},
            "eta_seconds": left,
        }
        words = [  # metrics.jsonl has all of them
            self._reporter.quantity(name, mean).replace(" accuracy", "")
            for name, mean in means.items()
            if name == "loss" or is_like(name, self._run.metrics)
        ]
        cells = [f"step {step:,}/{self._total:,}", f"epoch {epoch:.2f}", *words]
        cells += [f"{rate:,.0f} {unit}/s", f"input wait {shares['input_wait']:.0%}"]
        self._reporter.train(row, "  ".join([*cells, f"{hms(left)} left"]))
        if warning:
            logging.getLogger("tpu_suite").warning("%s", warning)  # on every host's terminal


class Bottleneck:
    """Follows a run's input over its log intervals."""

    def __init__(self, advice: Mapping[str, str] | None = None, threads: int = 0):
        """`advice` is the benchmark's; 0 decoding `threads` means one per core."""
        self._advice = _ADVICE | dict(advice or {})
        self._threads = threads or pools.cores()
        self._before = (0.0, 0.0, 0.0)
        self._slow = 0  # intervals in a row

    def interval(self, seconds: float, clocks: Feed) -> tuple[dict[str, float], str]:
        """Closes an interval of `seconds`, without pauses for evaluation and saving.

        Returns ({"input_wait", "input_transfer", "decode_busy"}, warning). The first two are shares
        of the interval, the third is a share of the decoding threads' time. The warning comes after
        3, 30, 300, ... slow intervals in a row; else it is "".
        """
        now = (clocks.waited, clocks.copied, clocks.worked)
        limits = (seconds, seconds, seconds * self._threads)
        waited, copied, busy = (
            min((after - before) / limit, 1.0)
            for after, before, limit in zip(now, self._before, limits, strict=True)
        )
        self._before = now
        shares = {"input_wait": waited, "input_transfer": copied, "decode_busy": busy}
        self._slow = self._slow + 1 if waited > _SLOW_SHARE else 0
        due = self._slow in [_SLOW_INTERVALS * 10**k for k in range(6)]
        return shares, self._warning(waited, copied, busy) if due else ""

    def _warning(self, waited: float, copied: float, busy: float) -> str:
        if copied > waited / 2:
            part, reason = "transfer", f"copies to the devices took {copied:.0%} of the time"
        elif math.isnan(busy):  # the benchmark's batches have no host_seconds
            part, reason = "input", "batches are not ready in time"
        else:
            part = "decoding" if busy > 0.5 else "reading"
            reason = f"the {self._threads} decoding threads were busy {busy:.0%} of the time"
        return (
            f"WARNING input-bound: {part}. The devices waited for input {waited:.0%} of the time, "
            f"{self._slow} intervals in a row, and {reason}. Fix: {self._advice[part]}"
        )


class Progress:
    """Measures a run over windows of steps, without the pauses for evaluation and saving."""

    def __init__(self, step: int, total_steps: int):
        self._total = total_steps
        self._window_step, self._window_start = step, time.monotonic()
        self._paused = 0.0
        self._step_seconds = math.nan
        self.eval_seconds = 0.0
        self.evals_left = 0

    def pause(self, seconds: float) -> None:
        """Leaves time out of the open window."""
        self._paused += seconds

    def so_far(self, step: int) -> tuple[float, float]:
        """(seconds of the open window, seconds of a step in it), which stays open."""
        elapsed = time.monotonic() - self._window_start - self._paused
        return elapsed, elapsed / max(step - self._window_step, 1)

    def window(self, step: int) -> tuple[float, int]:
        """Closes the window at `step` and returns its (seconds without pauses, steps)."""
        now = time.monotonic()
        elapsed = max(now - self._window_start - self._paused, 1e-9)
        steps = max(step - self._window_step, 1)
        self._step_seconds = elapsed / steps
        self._window_step, self._window_start, self._paused = step, now, 0.0
        return elapsed, steps

    def foresee(self, step: int, next_eval: Callable[[int], int | None] | None) -> None:
        """Estimates how many evaluations are left after `step`.

        `next_eval(step)` is the step of the first evaluation after `step`, or None if the clock
        decides. `next_eval` itself is None if the run does not evaluate.
        """
        following = next_eval and next_eval(step)
        after = next_eval(following) if next_eval and following else None
        if following is None or after is None:
            self.evals_left = int(next_eval is not None)
        else:
            self.evals_left = max(1, math.ceil((self._total - step) / (after - following)))

    def remaining(self, step: int) -> float:
        """Estimates the seconds to the end, with evaluations; nan before the first window."""
        return (self._total - step) * self._step_seconds + self.evals_left * self.eval_seconds
