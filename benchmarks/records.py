"""What benchmarks on records share: they open the files, count the records and order them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from benchmarks.base import Benchmark, Identity
from common.data import caches, files
from common.data.order import Order
from common.data.shards import GROUP, Shards
from common.errors import ConfigError
from common.tensorflow import tensorflow


class RecordFiles(NamedTuple):
    """Which files are the records of a split, and what spares their scan."""

    data_dir: str  # the folder, local or gs://
    patterns: str  # of the files' names, separated by commas
    split: str  # "train" or "eval"
    cache: str  # the JSON file that keeps the result of the scan for the next start
    trust_manifest: bool = True  # whether the data manifest may replace the scan


class Opened(Protocol):
    """The opened records of a split."""

    @property
    def shards(self) -> Shards: ...  # the files and the numbers of their examples


Source = TypeVar("Source", bound=Opened)


class RecordBenchmark(Benchmark, Generic[Source]):
    """A benchmark that reads records."""

    settings: Any
    cache_dir: str  # folder, local or gs://, for the results of scans
    # The keys of the config that declare the numbers of examples; 0 accepts any number.
    declared = {"train": "num_train_images", "eval": "num_eval_images"}

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}  # by split, once it is opened

    @property
    def keys(self) -> Any:
        """The settings: those of the files and their order, and the `declared` keys."""
        return self.settings

    def split_files(self, split: str, trust_manifest: bool = True) -> RecordFiles:
        """The records of "train" or "eval" that the config names."""
        patterns = self.keys.train_files if split == "train" else self.keys.eval_files
        cache = f"{self.cache_dir}/{split}.json"
        return RecordFiles(self.keys.data_dir, patterns, split, cache, trust_manifest)

    def open_records(self, where: RecordFiles) -> Source:
        """Opens the records of a split, checks and counts them."""
        raise NotImplementedError

    def open(self, split: str) -> int:
        """Also refuses another number of examples than declared, with a ConfigError."""
        if split not in self._sources:
            source = self.open_records(self.split_files(split))
            shards, key = source.shards, self.declared[split]
            if (expected := self.declared_examples(split)) not in (0, shards.total):
                raise ConfigError(
                    f"config.{key}={expected:,}, but the {split} split has {shards.total:,} in "
                    f"{len(set(shards.paths))} files: if these are all, "
                    f"--config.{key}={shards.total}"
                )
            if split == "train" and self.part:
                choice = self.part.choose(shards.total, *self.strata(source))
                source = self.take(source, choice)
            self._sources[split] = source
        return self.num_examples(split)

    def source(self, split: str) -> Source:
        """The records of a split that is opened."""
        return self._sources[split]

    def strata(self, source: Source) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What a part of the training examples keeps: see the arguments of `Part.choose`."""
        return None, None

    def take(self, source: Any, kept: np.ndarray) -> Any:
        """A source with only the examples of `kept`, bool[n]."""
        return dataclasses.replace(source, shards=source.shards.only(kept))

    def decode_all(self, source: Source) -> None:
        """Decodes every record that the scan has not decoded; DataError if one cannot be."""

    def check(self, split: str) -> list[str]:
        self.open(split)  # refuses what a run refuses besides the records
        listed = self.source(split).shards
        counted = self.open_records(self.split_files(split, trust_manifest=False))
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

    def describe_examples(self, ids: list[int]) -> list[str]:
        shards = self.source("train").shards
        return [shards.where(i) for i in ids]

    def identity(self, split: str) -> Identity:
        shards, folder = self.source(split).shards, self.keys.data_dir
        records = files.identity(f"{split} records", folder, shards.paths, shards.counts)
        return Identity(content=records)

    def held_bytes(self, num_shards: int) -> int:
        """Estimates the training records in a host's memory: three blocks for each stream."""
        shards = self.source("train").shards
        examples = 3 * min(self.keys.shuffle_buffer_size, shards.total)
        counts: dict[str, int] = {}  # of all records, because the files' sizes are those of all
        left_out = shards.left_out or ((),) * len(shards.paths)
        for path, count, others in zip(shards.paths, shards.counts, left_out, strict=True):
            counts[path] = count + len(others)
        return files.bytes_of(examples, [*counts], [*counts.values()]) // num_shards


def labels_and_groups(
    shards: Shards, cache: str, label: str = ""
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """int64[n], the values of the feature `label`, and [n], the group of each example.

    The files are read through once; `common.data.caches.scan_files` keeps the result in `cache`.
    None without a `label`, and where no record has a group.
    """
    tf = tensorflow()
    features: dict[str, Any] = {GROUP: tf.io.FixedLenFeature([], tf.string, default_value="")}
    features |= {label: tf.io.FixedLenFeature([], tf.int64)} if label else {}

    def scan(path: str) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {name: [] for name in features}

        def add(chunk: Any, first: int) -> None:
            for name, values in tf.io.parse_example(chunk, features).items():
                columns[name] += values.numpy().tolist()

        caches.count_records(path, add, "a schema of images")
        return columns | {GROUP: [group.decode(errors="replace") for group in columns[GROUP]]}

    paths = [*dict.fromkeys(shards.paths)]  # the groups of one split may share files
    of_file = dict(zip(paths, caches.scan_files(paths, scan, cache, [label]), strict=True))

    def column(name: str) -> np.ndarray:
        left_out: Sequence[Sequence[int]] = shards.left_out or ((),) * len(shards.paths)
        return np.concatenate(
            [
                np.delete(np.array(of_file[path][name]), np.array(others, np.int64))
                for path, others in zip(shards.paths, left_out, strict=True)
            ]
        )

    groups = column(GROUP)
    alone = groups == ""
    groups = np.where(alone, np.char.add("#", np.arange(len(groups)).astype(str)), groups)
    return column(label) if label else None, None if alone.all() else groups
