"""Ends a turn of a measurement of CPU time."""

import time


def settle() -> None:
    """Waits until no thread of this process works any more."""
    while True:
        before = time.process_time()
        time.sleep(0.1)
        if time.process_time() - before < 0.005:
            return
