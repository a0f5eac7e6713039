"""Warns when the devices wait for input, and says which part of the input is too slow."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from engine.mesh import Feed

_SHARE = 0.2  # of the time; less is not worth a warning
_INTERVALS = 3  # in a row; the first after a start or an evaluation is often slow

_ADVICE = {  # where the benchmark has none
    "reading": "move the data closer (a bucket of this region, a faster disk)",
    "decoding": "use machines with more CPU cores, or store smaller examples",
    "transfer": "send fewer bytes (smaller examples), or use more hosts for the same devices",
    "input": "profile the benchmark's train_batches",
}


class Bottleneck:
    """Follows a run's input over its log intervals."""

    def __init__(self, advice: Mapping[str, str] | None = None, threads: int = 0):
        """`advice` has remedies, see `benchmarks.base`; 0 decoding `threads`: one per CPU."""
        self._advice = _ADVICE | dict(advice or {})
        self._threads = threads or os.cpu_count() or 1
        self._before = (0.0, 0.0, 0.0)
        self._slow = 0  # intervals in a row

    def interval(self, seconds: float, clocks: Feed) -> tuple[dict[str, float], str]:
        """Closes an interval of `seconds`, without pauses for evaluation and saving.

        Returns:
          ({"input_wait", "input_transfer", "decode_busy"}, warning). The first two are shares of
          the interval, the third is a share of the decoding threads' time. The warning is "" unless
          one is due: after 3, 30, 300, ... slow intervals in a row.
        """
        now = (clocks.waited, clocks.copied, clocks.worked)
        limits = (seconds, seconds, seconds * self._threads)
        waited, copied, busy = (
            min((after - before) / limit, 1.0)
            for after, before, limit in zip(now, self._before, limits, strict=True)
        )
        self._before = now
        shares = {"input_wait": waited, "input_transfer": copied, "decode_busy": busy}
        self._slow = self._slow + 1 if waited > _SHARE else 0
        due = self._slow in [_INTERVALS * 10**k for k in range(6)]
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
            f"{self._slow} intervals in a row, and {reason}. Remedy: {self._advice[part]}"
        )
