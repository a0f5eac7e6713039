"""What a benchmark is: a data set, a model and a target quality.

A benchmark owns its data, its forward pass and loss, its predictions and its score. The loop in
`train.py` owns time, randomness, devices, the optimizer, checkpoints, reports and the stop rule.
Letters in shapes: B = global batch, h = one host's share of it, b = one device's share.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

# The mesh axes that every batch is sharded over. BatchNorm statistics may span "group".
BATCH_AXES = ("groups", "group")

Spec = dict[str, jax.ShapeDtypeStruct]
HostBatch = dict[str, np.ndarray]
Terms = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum f32[], weight f32[])


@dataclasses.dataclass(frozen=True)
class Target:
    """The quality a run trains to: `scores[metric] >= value`; `percent` is how reports show it."""

    metric: str
    value: float
    percent: bool = False


@dataclasses.dataclass(frozen=True)
class Mlperf:
    """What the log of an MLPerf run says of a benchmark; `engine.mlperf` says the rest.

    `values` are hyperparameters under the log's keys (the value of "eval_offset" is filled in),
    `tensors` the names of the parameters that are initialised, both as the reference
    implementation calls them. `steps_per_epoch` is what the log counts epochs by; 0: examples.
    """

    name: str
    target: float  # the quality that the rules ask for
    values: list[tuple[str, Any]]
    tensors: list[str]
    steps_per_epoch: float = 0.0


class Rate(Protocol):
    """The learning rate of a run in numbers, as `engine.schedules.Rate` has it."""

    @property
    def peak(self) -> float:
        """The highest."""
        ...

    @property
    def warmup_steps(self) -> float:
        """Steps until then; whole but for config.learning_rate_schedule='polynomial'."""
        ...

    @property
    def decay_steps(self) -> float:
        """Steps from then to the last rate of 'polynomial'; 0 with others."""
        ...


class Benchmark(Protocol):
    """The seam between the loop and a benchmark; `benchmarks/<name>` has `make(config, cache_dir)`.

    `make` only checks the config. Data is opened by the first member that needs it, so that a
    step can be compiled on a machine that has no data and no TensorFlow.
    """

    target: Target
    unit: str  # what one example is called in reports: "images"
    bn_span: int | str  # who shares BatchNorm statistics: axis "group", see `engine.mesh.make`
    # Remedies when "memory" does not suffice, or "reading", "decoding" or "transfer" is too slow.
    advice: Mapping[str, str] = types.MappingProxyType({})

    @property
    def num_train_examples(self) -> int:
        """Examples in one epoch."""
        ...

    @property
    def num_eval_examples(self) -> int:
        """Examples that one evaluation must score, each exactly once."""
        ...

    def declared_examples(self, split: str) -> int:
        """Examples in `split` ("train" or "eval") that the config says there are, else 0.

        Where it says so, steps are compiled before data are opened; the data must agree.
        """
        ...

    def nominal_examples(self, split: str) -> int:
        """`declared_examples`, else what the data set of the published results has."""
        ...

    @property
    def metadata(self) -> dict[str, Any]:
        """JSON facts that a checkpoint needs to be understood later, such as class names."""
        ...

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        """Every shape that may occur in `split` ("train" or "eval"); leaves are [B, ...]."""
        ...

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        """Endless batches of leaves [h, ...]; batch k is a function of (seed, k) alone.

        Concatenated over shards, batch k is the same global batch for any `num_shards`. A leaf
        host_seconds float32[h], beyond `batch_spec`, stays on the host: seconds that one of
        os.cpu_count() threads spent on each example, for the warning about slow input.
        """
        ...

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        """The leaf "id" of the global training batch `step` (from 0), without reading data.

        [] if the benchmark's examples have no ids.
        """
        ...

    def places(self, ids: list[int]) -> list[str]:
        """Where the training examples of such ids (leaf "id") lie, in words, for messages."""
        ...

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        """Every example once over all shards, padded with rows of `mask` 0.

        All shards yield the same number of batches.
        """
        ...

    def host_bytes(self, batch_size: int, num_shards: int) -> int:
        """About how much memory the input needs on each of `num_shards` hosts, in bytes."""
        ...

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        """Returns (params, model_state); `model_state` is opaque to the loop, `{}` if none."""
        ...

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Returns (terms, metrics, model_state) on one device's share [b, ...].

        The loss is the sum over `terms` of sum / weight, both summed over all devices first;
        weights may depend on the batch but not on `params`.
        """
        ...

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Per-example arrays [b, ...] on one device's share."""
        ...

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """Scores from the outputs of `predict`, all hosts' rows, without padding."""
        ...

    def mlperf(self, form: str, steps: int, rate: Rate, norm_examples: int, params: Any) -> Mlperf:
        """What the log of a run says.

        Args:
          form: "mllog" or "v0.5".
          steps: of the whole run.
          rate: the run's learning rate.
          norm_examples: how many examples have their BatchNorm statistics taken together.
          params: arrays or ShapeDtypeStructs.

        Raises:
          ConfigError: MLPerf has no such benchmark, or its log no word for this configuration.
        """
        ...


def mean_scores(rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
    """The mean of each output over all rows, summed in float64: most benchmarks' `score`."""
    sums: dict[str, float] = {}
    count = 0
    for row in rows:
        count += len(next(iter(row.values())))
        for name, values in row.items():
            sums[name] = sums.get(name, 0.0) + float(np.sum(values, dtype=np.float64))
    return {name: total / count for name, total in sums.items()}
