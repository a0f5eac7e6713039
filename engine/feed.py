"""Prefetch to the devices: copies batches there before the step needs them."""

import collections
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from engine import sharding


class Feed:
    """Prefetches global batches, of arrays [b, ...] sharded over all devices.

    A host batch that is the same object as the last one (fake data) is not copied again.

    The loop waited `waited` seconds for batches; `copied` of them went into copies to the devices.
    A copy begins `ahead` batches before its step, so only a run that is bound by copies waits here.
    All threads of this host `worked` so many seconds on the examples, from the leaf host_seconds of
    the batches; nan if they have no such leaf.
    """

    def __init__(self, batches: Iterable[dict[str, np.ndarray]], mesh: Mesh, ahead: int = 2):
        """Reads `batches`, this host's arrays [h, ...]; keeps `ahead` of them on the devices."""
        self.waited = self.copied = self.worked = 0.0
        self._batches = iter(batches)
        self._sharding = sharding.batch_sharding(mesh)
        self._ahead = ahead
        self._ready: collections.deque[dict[str, jax.Array]] = collections.deque()
        self._last: tuple[Any, Any] = (None, None)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        while True:
            self._fill()
            if not self._ready:
                return
            batch, start = self._ready.popleft(), time.monotonic()
            jax.block_until_ready(batch)  # a copy to a TPU or GPU goes on after its call
            seconds = time.monotonic() - start
            self.waited += seconds
            self.copied += seconds
            yield batch

    def _fill(self) -> None:
        start = time.monotonic()
        for batch in itertools.islice(self._batches, self._ahead + 1 - len(self._ready)):
            if batch is not self._last[0]:
                copy_start = time.monotonic()
                copy = {
                    name: jax.make_array_from_process_local_data(self._sharding, value)
                    for name, value in batch.items()
                    if name != "host_seconds"
                }
                self._last = (batch, copy)
                self.copied += time.monotonic() - copy_start
                self.worked += float(np.sum(batch.get("host_seconds", math.nan)))
            self._ready.append(self._last[1])
        self.waited += time.monotonic() - start
