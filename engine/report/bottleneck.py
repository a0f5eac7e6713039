"""When the devices wait for input: which part of the input is too slow, and what to change."""

from __future__ import annotations

import os
from typing import Protocol

_SHARE = 0.2  # of the time; less is not worth a warning
_INTERVALS = 3  # in a row; the first after a start or an evaluation is often slow

_REMEDIES = {
    "reading": "have the records nearer (a bucket of this region, a faster disk), or raise "
    "--config.input_streams",
    "decoding": "for images --config.preprocessing=fast, or --config.decoded_cache=256 if the "
    "hosts have the memory; else use a machine with more CPU cores, or store smaller examples (not "
    "photos of many megapixels)",
    "transfer": "send fewer bytes (smaller examples), or use more hosts for the same devices",
    "input": "profile the benchmark's train_batches",
}


class Clocks(Protocol):
    """Seconds since the run began, as `engine.mesh.Feed` counts them."""

    waited: float
    copied: float
    worked: float


class Bottleneck:
    """Follows a run's input over its log intervals."""

    def __init__(self, threads: int = 0):
        """`threads` decode on this host; 0 means one per CPU."""
        self._threads = threads or os.cpu_count() or 1
        self._before = (0.0, 0.0, 0.0)
        self._slow = 0  # intervals in a row

    def interval(self, seconds: float, clocks: Clocks) -> tuple[dict[str, float], str]:
        """Closes an interval.

        Args:
          seconds: its length, without pauses for evaluation and saving.
          clocks: the input's clocks now.

        Returns:
          ({"input_wait", "input_transfer", "decode_busy"}, warning): shares of the interval, the
          last of what the decoding threads could have done; "" where nothing is to be said. After
          the first warning the next come after 10 and 100 times as many slow intervals.
        """
        now = (clocks.waited, clocks.copied, clocks.worked)
        deltas = [after - before for after, before in zip(now, self._before, strict=True)]
        self._before = now
        waited, copied = (min(delta / seconds, 1.0) for delta in deltas[:2])
        busy = min(deltas[2] / seconds / self._threads, 1.0)
        shares = {"input_wait": waited, "input_transfer": copied, "decode_busy": busy}
        self._slow = self._slow + 1 if waited > _SHARE else 0
        due = self._slow in [_INTERVALS * 10**k for k in range(6)]
        return shares, self._warning(shares) if due else ""

    def _warning(self, shares: dict[str, float]) -> str:
        waited, copied, busy = shares.values()
        if copied > waited / 2:
            part, why = "transfer", f"copies to the devices took {copied:.0%} of the time"
        elif busy != busy:  # nan: the benchmark does not say
            part, why = "input", "batches are not ready in time"
        elif busy > 0.5:
            part = "decoding"
            why = f"the {self._threads} threads that decode were busy {busy:.0%} of the time"
        else:
            part = "reading"
            why = f"the {self._threads} threads that decode were idle {1 - busy:.0%} of the time"
        return (
            f"WARNING the devices wait for input {waited:.0%} of the time, {self._slow} intervals "
            f"in a row. The narrow place is {part}: {why}. To change it: {_REMEDIES[part]}"
        )
