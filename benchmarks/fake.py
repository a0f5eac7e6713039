"""One random batch instead of data, for every benchmark: `config.dataset='fake'`.

`benchmarks.load` gives it to any benchmark that has `fake_batch`. A run then needs no folder of
data, and its batch stays on the devices, so that its speed is theirs.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.base import Benchmark, HostBatch, Spec
from benchmarks.uses import Classes, Imported, Uses
from common.data import decoding
from common.errors import ConfigError

FAKE = "fake"  # the value of `config.dataset`
_FAKE = f"config.dataset={FAKE!r}"


def without_data(benchmark: Benchmark, seed: int) -> Benchmark:
    """The same benchmark with `FakeData` before its class, which draws its batches from `seed`."""
    kind = type(benchmark)
    fake = object.__new__(type(f"Fake{kind.__name__}", (FakeData, kind), {"_seed": seed}))
    vars(fake).update(vars(benchmark))
    return fake


class FakeData(Benchmark):
    """The half of a benchmark that has to do with data, without any: it goes before a class."""

    _seed: int

    def open(self, split: str) -> int:
        return self.num_examples(split)

    def num_examples(self, split: str) -> int:
        """As many as declared or published; ConfigError where `fake_batch` draws none."""
        (spec, *_) = self.batch_spec(split, 1)
        if self.fake_batch(spec, np.random.default_rng(0)) is None:
            if split == "train":
                raise ConfigError(f"{_FAKE}: this benchmark draws no batches; leave it out")
            raise ConfigError(f"{_FAKE} has no true answers to score against: use --mode=train")
        return self.nominal_examples(split)

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        """One batch for each of `stages`; without stages one of a middle kind."""
        specs = self.batch_spec("train", batch_size)
        ends = [*itertools.accumulate(stage.steps for stage in self.stages())]
        used = specs if ends else [specs[len(specs) // 2]]
        batches = [self._share(spec, "train", shard, num_shards) for spec in used]
        if not ends:
            return itertools.repeat(*batches)
        number = len(batches) - 1
        return (
            batches[min(int(np.searchsorted(ends, step, side="right")), number)]
            for step in itertools.count(start_step)
        )

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        total, rows = self.num_examples("eval"), batch_size // num_shards
        batch = self._share(self.batch_spec("eval", batch_size)[0], "eval", shard, num_shards)
        for first in range(shard * rows, total + shard * rows, batch_size):
            mask = decoding.mask(total - first, rows)
            yield batch if mask.all() else batch | {"mask": mask}

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return list(range(batch_size))

    # A run without data has nothing to check, to name and to prepare.
    check = Benchmark.check
    data_sizes = Benchmark.data_sizes
    describe_examples = Benchmark.describe_examples
    identity = Benchmark.identity
    metadata = Benchmark.metadata  # type: ignore[override] (a property)
    run_notes = Benchmark.run_notes
    data_warnings = Benchmark.data_warnings
    input_rates = Benchmark.input_rates

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """One batch of each kind, which every host makes completely, and copies for the devices."""
        leaves = (x for spec in self.batch_spec(split, batch_size) for x in spec.values())
        return {(f"{split}_batch_size",): 2 * sum(x.size * x.dtype.itemsize for x in leaves)}

    @property
    def uses(self) -> Uses:
        uses = super().uses
        if not isinstance(uses, Classes):  # which have numbers where they have no names
            return FakeUses(uses)
        uses.exhibits = lambda rows: []  # there are no pictures to show
        return uses

    def _share(self, spec: Spec, split: str, shard: int, num_shards: int) -> HostBatch:
        """One host's share of the random batch of a kind; leaves that are not drawn are numbers."""
        draw = np.random.default_rng([self._seed, split == "train"])
        drawn = self.fake_batch(spec, draw) or {}
        size = next(iter(spec.values())).shape[0]
        whole = {"mask": np.ones(size), **drawn}
        rows = slice(shard * size // num_shards, (shard + 1) * size // num_shards)
        numbers = np.arange(size)
        return {name: whole.get(name, numbers)[rows].astype(x.dtype) for name, x in spec.items()}


class FakeUses(Uses):
    """The uses of a model that has learnt random numbers: it begins with others' weights."""

    hint = f"it was trained with {_FAKE}, so it knows no names or words"

    def __init__(self, uses: Uses):
        self._uses, self.commands = uses, uses.commands

    def read_foreign(self, file: str) -> Imported | None:
        return self._uses.read_foreign(file)

    def check_files(self, manifest: Mapping[str, Any], source: str) -> None:
        raise ConfigError(f"{source}: {self.hint}")
