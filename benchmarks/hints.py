"""What a benchmark may add for reports, compilation and forecasts.

Every member has a default that suits most benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """The steps of a run that have one kind of training batch."""

    name: str  # for tables, such as "128 pixels"
    steps: int


class Identity(NamedTuple):
    """How a later run sees whether its data are those that a model was trained on."""

    # Values of `Benchmark.metadata` without which the model's numbers mean something else, such as
    # the names of the classes in their order. A run refuses other values.
    meaning: Mapping[str, Any] = {}
    # Sizes, counts and digests of the data by name; a run says in a NOTE which ones differ.
    content: Mapping[str, str] = {}


class Hints:
    """The optional half of `benchmarks.base.Benchmark`."""

    # Reports.

    # Metrics that are shares of the evaluated examples: few examples get a confidence interval.
    proportions: tuple[str, ...] = ()
    # Where examples differ in size: (unit, term or metric whose weight counts it), such as
    # ("tokens", "cross_entropy"). Reports then show tokens per second.
    throughput: tuple[str, str] | None = None
    # Remedies by the part of the input that is too slow ("reading", "decoding", "transfer" or
    # "input"), as sentences that name the benchmark's own config keys.
    advice: Mapping[str, str] = {}

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        """Those of the scores that the line of an evaluation shows; files keep all of them."""
        return scores

    def notes(self, norm_examples: int, evaluating: bool) -> list[str]:
        """Sentences about the data that a person should know before they are trained on.

        `norm_examples` is the number of examples that share the statistics of BatchNorm;
        `evaluating` is whether the evaluation's data may be opened.
        """
        del norm_examples, evaluating
        return []

    def remarks(self, split: str) -> list[tuple[str, str, str]]:
        """What a full check says of the records of a split, all of which it could read.

        Each row is ("ok" or "warn", the text, a remedy or "").
        """
        del split
        return []

    def identity(self, split: str) -> Identity:
        """What the data of a split are; it reads no data that the split's batches do not need."""
        del split
        return Identity()

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        """The leaf "id" of the global training batch `step` (from 0); [] where it has none.

        Computed without reading the examples.
        """
        del batch_size, step
        return []

    def describe(self, ids: list[int]) -> list[str]:
        """The place of each training example in the data, for messages."""
        return [f"example {i}" for i in ids]

    # Compilation and the loop.

    bn_span: int | str = 1  # which devices share BatchNorm statistics, see `engine.mesh.make`
    # True: the train step is compiled with larger windows, see `engine.compiler`. Estimates decide.
    larger_windows = False
    # True: process 0 scores in a thread while the devices train on. For scores that take minutes.
    scores_in_background = False

    def declared_examples(self, split: str) -> int:
        """The number of examples that the config declares, and the data must have; else 0."""
        del split
        return 0

    def planned(self, total_steps: int) -> None:
        """Tells the length of the run, before training batches are made; again if it changes."""
        del total_steps

    def check_random_start(self, norm_examples: int) -> None:
        """Raises ConfigError if a run cannot begin with the weights of `init`."""
        del norm_examples

    # Forecasts.

    def nominal_examples(self, split: str) -> int:
        """The number of examples to assume where no data can be read; 0: it must be counted."""
        return self.declared_examples(split)

    def stages(self) -> tuple[Stage, ...]:
        """How many steps of the planned run have each kind of batch in `batch_spec("train", ...)`.

        () where the kinds come in no fixed number; forecasts then count them equally.
        """
        return ()

    def input_rates(self) -> tuple[Mapping[str, float], ...]:
        """Training examples that a second of CPU time prepares, as measured, for forecasts.

        By the config's setting that has this rate, for each of `stages` or for all steps; () where
        it is not known.
        """
        return ()

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """Estimates the bytes that a split's input needs in the memory of each host.

        Each part comes with the config keys that decide its size, for messages; () are data whose
        size no key decides.
        """
        del split, batch_size, num_shards
        return {}
