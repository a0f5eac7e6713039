"""What benchmarks on records share: they open the files, count the records and order them."""

import functools
from typing import Any

from benchmarks.base import Benchmark, Identity
from common.data import files
from common.data.order import Order
from common.data.shards import Shards
from common.errors import ConfigError


class RecordBenchmark(Benchmark):
    """A benchmark that reads records."""

    settings: Any
    # The keys of the config that declare the numbers of examples; 0 accepts any number.
    declared = {"train": "num_train_images", "eval": "num_eval_images"}

    @property
    def keys(self) -> Any:
        """The settings: `seed`, `shuffle_buffer_size`, `input_streams` and the `declared` keys."""
        return self.settings

    def open(self, split: str, trust_manifest: bool = True) -> Any:
        """Opens the data of "train" or "eval": an object with `shards`, the files and their counts.

        `trust_manifest` is whether manifest.json may spare the scan.
        """
        raise NotImplementedError

    @functools.cached_property
    def _sources(self) -> dict[str, Any]:
        return {}

    def source(self, split: str) -> Any:
        """The data of "train" or "eval" as `open` gives them; the first call opens them.

        Raises ConfigError if the data have another number of examples than declared.
        """
        if split not in self._sources:
            source = self.open(split)
            shards: Shards = source.shards
            key, expected = self.declared[split], self.declared_examples(split)
            if expected not in (0, shards.total):
                raise ConfigError(
                    f"config.{key}={expected:,}, but the {split} split has {shards.total:,} in "
                    f"{len(set(shards.paths))} files: if these are all, "
                    f"--config.{key}={shards.total}"
                )
            self._sources[split] = source
        return self._sources[split]

    def decode_all(self, source: Any) -> None:
        """Decodes every record that the scan has not decoded; DataError if one cannot be."""

    def check(self, split: str) -> list[str]:
        self.num_examples(split)  # refuses what a run refuses besides the records
        listed, counted = self.source(split).shards, self.open(split, trust_manifest=False)
        self.decode_all(counted)
        rows = zip(listed.paths, listed.counts, counted.shards.counts, strict=True)
        return [
            f"{path}: {count:,} {self.unit} of the {split} split can be used, in manifest.json "
            f"there are {stated:,}"
            for path, stated, count in rows
            if stated != count
        ]

    def declared_examples(self, split: str) -> int:
        return getattr(self.keys, self.declared[split])

    def num_examples(self, split: str) -> int:
        return self.source(split).shards.total

    def data_sizes(self) -> dict[str, int]:
        return {key: self.num_examples(split) for split, key in self.declared.items()}

    def order(self, batch_size: int) -> Order:
        """The order of the training examples."""
        keys, counts = self.keys, self.source("train").shards.counts
        return Order.make(
            counts, keys.seed, batch_size, keys.input_streams, keys.shuffle_buffer_size
        )

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return self.order(batch_size).batch_ids(step).tolist()

    def describe(self, ids: list[int]) -> list[str]:
        return [self.source("train").shards.where(i) for i in ids]

    def identity(self, split: str) -> Identity:
        shards, folder = self.source(split).shards, self.keys.data_dir
        records = files.identity(f"{split} records", folder, shards.paths, shards.counts)
        return Identity(content=records)

    def held_bytes(self, num_shards: int) -> int:
        """Estimates the training records in a host's memory: three blocks for each stream."""
        shards = self.source("train").shards
        examples = 3 * min(self.keys.shuffle_buffer_size, shards.total)
        counts: dict[str, int] = {}
        for path, count in zip(shards.paths, shards.counts, strict=True):  # may name a file twice
            counts[path] = counts.get(path, 0) + count
        return files.bytes_of(examples, [*counts], [*counts.values()]) // num_shards
