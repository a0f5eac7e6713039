"""One random batch of images instead of data: `config.dataset='fake'`, to time the devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.base import Benchmark, HostBatch
from benchmarks.resnet import ResNet
from ops import padding


class FakeImages(ResNet):
    """ResNet on one random batch, which the loop keeps on the devices because it comes again."""

    def num_examples(self, split: str) -> int:
        return self.declared_examples(split)

    @property
    def metadata(self) -> dict[str, Any]:
        return {"class_names": [], "input_spec": self.input_spec.as_dict()}

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        return itertools.repeat(self._batch("train", batch_size, shard, num_shards))

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        batch = self._batch("eval", batch_size, shard, num_shards)
        rows, total = batch_size // num_shards, self.num_examples("eval")
        for first in range(shard * rows, total + shard * rows, batch_size):
            mask = padding.mask(total - first, rows)
            yield batch if mask.all() else batch | {"mask": mask}

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return list(range(batch_size))

    describe = Benchmark.describe
    embed = Benchmark.embed
    notes = Benchmark.notes
    exhibits = Benchmark.exhibits  # nothing can be learnt from random images

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """One batch, which every host makes completely, and its copy for the devices."""
        pixels_bytes = self._settings.image_size**2 * 3
        return {(f"{split}_batch_size", "image_size"): 2 * batch_size * pixels_bytes}

    def _batch(self, split: str, batch_size: int, shard: int, num_shards: int) -> HostBatch:
        """One host's share of the random batch of a split."""
        (spec,) = self.batch_spec(split, batch_size)
        draw = np.random.default_rng([self._settings.seed, split == "train"])
        batch: HostBatch = {
            "image": draw.integers(0, 256, spec["image"].shape, np.uint8),
            "label": draw.integers(0, self._classes, batch_size, np.int32),
            "id": np.arange(batch_size, dtype=np.int32),
            "flip": draw.integers(0, 2, batch_size).astype(np.bool_),
            "mask": np.ones(batch_size, np.float32),
        }
        share = batch_size // num_shards
        return {k: batch[k][shard * share : (shard + 1) * share] for k in spec}
