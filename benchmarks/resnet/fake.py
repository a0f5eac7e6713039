"""One random batch of images instead of data: `config.dataset='fake'`, to time the devices."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.base import Benchmark, HostBatch, Spec
from benchmarks.resnet.classifier import ImageClassifier
from benchmarks.resnet.use import ClassifierUses
from benchmarks.uses import Uses
from common.data import decoding


class FakeImages(ImageClassifier):
    """A ResNet that trains on one random batch per size; the batches stay on the devices."""

    def num_examples(self, split: str) -> int:
        return self.declared_examples(split)

    @property
    def metadata(self) -> dict[str, Any]:
        return {"class_names": [], "input_spec": self.input_spec.as_dict()}

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        specs = self.batch_spec("train", batch_size)
        random = [self._batch(spec, "train", shard, num_shards) for spec in specs]
        if not (sizes := self.sizes):
            return itertools.repeat(*random)
        by_size = dict(zip(self.settings.images.sides, random, strict=True))
        return (by_size[sizes.at(step)] for step in itertools.count(start_step))

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        (spec,) = self.batch_spec("eval", batch_size)
        batch = self._batch(spec, "eval", shard, num_shards)
        rows, total = batch_size // num_shards, self.num_examples("eval")
        for first in range(shard * rows, total + shard * rows, batch_size):
            mask = decoding.mask(total - first, rows)
            yield batch if mask.all() else batch | {"mask": mask}

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return list(range(batch_size))

    check = Benchmark.check
    identity = Benchmark.identity
    describe = Benchmark.describe
    notes = Benchmark.notes
    input_rates = Benchmark.input_rates  # nothing is prepared

    @property
    def uses(self) -> Uses:
        """Nothing can be learnt from random images."""
        return ClassifierUses(self, has_data=False)

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """One batch of each size, which every host makes completely, and copies for the devices."""
        specs = self.batch_spec(split, batch_size)
        nbytes = sum(spec["image"].size for spec in specs)
        return {(f"{split}_batch_size", self.size_key(split)): 2 * nbytes}

    def _batch(self, spec: Spec, split: str, shard: int, num_shards: int) -> HostBatch:
        """One host's share of a random batch of a split."""
        batch_size = spec["label"].shape[0]
        draw = np.random.default_rng([self.keys.seed, split == "train"])
        batch: HostBatch = {
            "image": draw.integers(0, 256, spec["image"].shape, np.uint8),
            "label": draw.integers(0, self.classes, batch_size, np.int32),
            "id": np.arange(batch_size, dtype=np.int32),
            "flip": draw.integers(0, 2, batch_size).astype(np.bool_),
            "mask": np.ones(batch_size, np.float32),
            "draw": np.arange(batch_size, dtype=np.int32),
        }
        share = batch_size // num_shards
        return {k: batch[k][shard * share : (shard + 1) * share] for k in spec}
