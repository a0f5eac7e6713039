"""Warns when the devices wait for input, and says which part of the input is too slow."""

from __future__ import annotations

import os
from collections.abc import Mapping

from engine.mesh import Feed

_SHARE = 0.2  # of the time; less is not worth a warning
_INTERVALS = 3  # in a row; the first after a start or an evaluation is often slow

_ADVICE = {  # for benchmarks that bring none of their own
    "reading": "move the data closer (a bucket of this region, a faster disk)",
    "decoding": "use machines with more CPU cores, or store smaller examples",
    "transfer": "send fewer bytes (smaller examples), or use more hosts for the same devices",
    "input": "profile the benchmark's train_batches",
}


class Bottleneck:
    """Follows a run's input over its log intervals."""

    def __init__(self, advice: Mapping[str, str] | None = None, threads: int = 0):
        """`advice` is a remedy for each slow part of the input, `threads` how many decode.

        The parts are "reading", "decoding", "transfer" and "input" (not known which). 0 threads
        means one per CPU of this host.
        """
        self._advice = _ADVICE | dict(advice or {})
        self._threads = threads or os.cpu_count() or 1
        self._before = (0.0, 0.0, 0.0)
        self._slow = 0  # intervals in a row

    def interval(self, seconds: float, clocks: Feed) -> tuple[dict[str, float], str]:
        """Closes an interval.

        Args:
          seconds: its length, without pauses for evaluation and saving.
          clocks: the input's clocks now.

        Returns:
          ({"input_wait", "input_transfer", "decode_busy"}, warning). The first two are shares of
          the interval, the third is a share of the decoding threads' time. The warning is "" in
          most intervals: after the first one the next come after 10 and 100 times as many slow
          intervals.
        """
        now = (clocks.waited, clocks.copied, clocks.worked)
        deltas = [after - before for after, before in zip(now, self._before, strict=True)]
        self._before = now
        waited, copied = (min(delta / seconds, 1.0) for delta in deltas[:2])
        busy = min(deltas[2] / seconds / self._threads, 1.0)
        shares = {"input_wait": waited, "input_transfer": copied, "decode_busy": busy}
        self._slow = self._slow + 1 if waited > _SHARE else 0
        due = self._slow in [_INTERVALS * 10**k for k in range(6)]
        return shares, self._warning(waited, copied, busy) if due else ""

    def _warning(self, waited: float, copied: float, busy: float) -> str:
        if copied > waited / 2:
            part, reason = "transfer", f"copies to the devices took {copied:.0%} of the time"
        elif busy != busy:  # nan: the benchmark does not say
            part, reason = "input", "batches are not ready in time"
        else:
            part = "decoding" if busy > 0.5 else "reading"
            reason = f"the {self._threads} decoding threads were busy {busy:.0%} of the time"
        return (
            f"WARNING input-bound: {part}. The devices waited for input {waited:.0%} of the time, "
            f"{self._slow} intervals in a row, and {reason}. Remedy: {self._advice[part]}"
        )
