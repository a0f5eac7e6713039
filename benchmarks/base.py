"""Defines what a benchmark is: a data set, a model and a target quality.

A benchmark owns its data, its forward pass and loss, its predictions and its score; the training
loop owns the rest (docs/design.md). docs/tour.md adds a benchmark step by step.

Letters in shapes: B is the global batch, h one host's share of it, b one device's share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ops.portable import Portable

# The mesh axes that every batch is sharded over. BatchNorm statistics may span "group".
BATCH_AXES = ("groups", "group")

Spec = dict[str, jax.ShapeDtypeStruct]
HostBatch = dict[str, np.ndarray]
Terms = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum f32[], weight f32[])
Arrays = Any  # a tree of arrays


@dataclasses.dataclass(frozen=True)
class Target:
    """One quality that a run trains to: `scores[metric] >= value`."""

    metric: str
    value: float
    percent: bool = False  # reports show the metric in per cent


@dataclasses.dataclass(frozen=True)
class Matrix:
    """How often examples of a true class (row) were taken for a class (column); int[K, K]."""

    names: Sequence[str]
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar of a chart; `value` and `ideal`, where a mark is drawn, are from 0 to 1."""

    label: str
    value: float
    ideal: float
    count: int  # of the examples behind it


@dataclasses.dataclass(frozen=True)
class Picture:
    """A JPEG or PNG with a few lines below it; a `flag` is shown as a warning.

    A `wide` picture has two images beside each other.
    """

    data: bytes
    caption: Sequence[str]
    flag: str = ""
    wide: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One thing to show about the predictions; the parts that are empty are not shown.

    Texts may come from the data: whoever shows them escapes them.
    """

    title: str
    text: str = ""
    columns: Sequence[str] = ()  # the head of the table
    rows: Sequence[Sequence[str]] = ()
    has_mean: bool = False  # whether the last row is the mean of the others
    matrix: Matrix | None = None
    bars: Sequence[Bar] = ()
    pictures: Sequence[Picture] = ()
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # by name


@dataclasses.dataclass(frozen=True)
class Group:
    """How the optimizer treats a group of parameters."""

    decayed: bool = False  # whether weight decay applies
    rate: float = 1.0  # multiplies the learning rate; 0 freezes the parameters


class Stage(NamedTuple):
    """The steps of a run that have one kind of training batch."""

    name: str  # for tables, such as "128 pixels"
    steps: int


class Imported(NamedTuple):
    """Weights of another library in a benchmark's own form, as NumPy arrays."""

    source: str  # the file
    params: Arrays
    model_state: Arrays
    metadata: dict[str, Any]  # what a checkpoint's manifest says instead of `Benchmark.metadata`
    summary: str  # what the file holds, in one line


class Benchmark:
    """The interface between the loop and a benchmark; the defaults suit most benchmarks.

    The module `benchmarks/<name>` has `make(config, cache_dir) -> Benchmark`, which only checks
    the config. The first method that needs the data opens them, so that steps can be compiled on a
    machine without data and without TensorFlow.
    """

    targets: tuple[Target, ...]  # a run has reached its target when it has reached all of them
    # Metrics that are shares of the evaluated examples: few examples get a confidence interval.
    proportions: tuple[str, ...] = ()
    unit = "examples"  # the name of the examples in reports, such as "images"
    # Where examples differ in size: (unit, term or metric whose weight counts it), such as
    # ("tokens", "cross_entropy"). Reports then show tokens per second.
    throughput: tuple[str, str] | None = None
    bn_span: int | str = 1  # which devices share BatchNorm statistics, see `engine.mesh.make`
    groups: Mapping[str, Group] = {
        "decayed": Group(decayed=True),
        "not decayed": Group(),
        "frozen": Group(rate=0.0),
    }
    # How a trained model is used if the benchmark has no `classify`, as a sentence.
    use = "python main.py --mode=eval evaluates it"
    # Remedies by the part of the input that is too slow ("reading", "decoding", "transfer" or
    # "input"), as sentences that name the benchmark's own config keys.
    advice: Mapping[str, str] = {}
    # Commands that use a trained model, by purpose, for the report; "{workdir}" stands for its run.
    uses: Mapping[str, str] = {}
    # True: the train step is compiled with `engine.compiler.larger_windows`. Estimates decide.
    larger_windows = False
    # True: process 0 scores in a thread while the devices train on. For scores that take minutes.
    scores_in_background = False

    # Data.

    def num_examples(self, split: str) -> int:
        """The number of examples in an epoch ("train") or in an evaluation ("eval")."""
        raise NotImplementedError

    def declared_examples(self, split: str) -> int:
        """The number of examples that the config declares, and the data must have; else 0.

        If it is declared, steps are compiled before the data are opened.
        """
        del split
        return 0

    def nominal_examples(self, split: str) -> int:
        """The number of examples to assume where there are no data, as in --mode=preflight."""
        return self.declared_examples(split) or self.num_examples(split)

    def notes(self, norm_examples: int, evaluating: bool) -> list[str]:
        """Sentences about the data that a person should know before they are trained on.

        `norm_examples` is the number of examples that share the statistics of BatchNorm;
        `evaluating` is whether the evaluation's data may be opened.
        """
        del norm_examples, evaluating
        return []

    def check_random_start(self, norm_examples: int) -> None:
        """Raises ConfigError if a run cannot begin with the weights of `init`."""
        del norm_examples

    @property
    def metadata(self) -> dict[str, Any]:
        """JSON that a checkpoint keeps about the data, such as class names."""
        return {}

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        """The shapes and dtypes of all kinds of batches in `split`; leaves are [B, ...]."""
        raise NotImplementedError

    def planned(self, total_steps: int) -> None:
        """Tells the length of the run, before training batches are made; again if it changes."""
        del total_steps

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

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        """Endless batches of leaves [h, ...]; batch k is a function of (seed, k) alone.

        Concatenated over shards, batch k is the same global batch for any `num_shards`. At one
        step all shards yield the same shape. For the warning about slow input, a batch may have a
        leaf host_seconds float32[h], which is not in `batch_spec`: the seconds that one of
        os.cpu_count() threads spent on each example.
        """
        raise NotImplementedError

    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        """Every example once over all shards, padded with rows whose `mask` float32[h] is 0.

        All shards yield the same number of batches, and the same shape at one step.
        """
        raise NotImplementedError

    def plain_train_batches(
        self, batch_size: int, shard: int, num_shards: int
    ) -> Iterator[HostBatch]:
        """Every training example once, as `eval_batches` has those of the evaluation."""
        raise NotImplementedError

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        """The leaf "id" of the global training batch `step` (from 0); [] where it has none.

        Computed without reading the examples.
        """
        del batch_size, step
        return []

    def describe(self, ids: list[int]) -> list[str]:
        """The place of each training example in the data, for messages."""
        return [f"example {i}" for i in ids]

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """Estimates the bytes that a split's input needs in the memory of each host.

        Each part comes with the config keys that decide its size, for messages; () are data whose
        size no key decides.
        """
        del split, batch_size, num_shards
        return {}

    # Model.

    def init(self, rng: jax.Array) -> tuple[Arrays, Arrays]:
        """Returns (params, model_state), traced by jax; `model_state` may be {}."""
        raise NotImplementedError

    def read_foreign(self, path: str) -> Imported | None:
        """Reads a file or folder, local or gs://, of another library's weights.

        Returns None if `path` is none, such as a workdir. The module may have
        `foreign_settings(path)`, see `benchmarks.settle`; this method is called with the settings
        that it has given.

        Raises:
          DataError: the file cannot be used.
        """
        del path
        return None

    def adopt(self, params: Arrays, model_state: Arrays, loaded: Arrays) -> tuple[Arrays, Arrays]:
        """Puts another model's arrays into those of `init`, for `config.init_from`.

        All arrays are on the host; `loaded` is {"params": ..., "model_state": ...} of the other
        model. Arrays in the result (params, model_state) that come from it are the same objects as
        in `loaded`. By default every array is taken whose path and shape are the same. Raises
        CheckpointError, without the name of the other model, where too little of it fits.
        """
        ours = {"params": params, "model_state": model_state}
        theirs = dict(jax.tree_util.tree_leaves_with_path(loaded))

        def choose(path: Any, mine: np.ndarray) -> np.ndarray:
            other = theirs.get(path)
            return mine if other is None or other.shape != mine.shape else other

        adopted = jax.tree_util.tree_map_with_path(choose, ours)
        return adopted["params"], adopted["model_state"]

    def label(self, path: str) -> str:
        """The key in `groups` of the parameter at `path`, such as "head/kernel".

        By default only kernels are decayed (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
        """
        return "decayed" if path.rpartition("/")[2] == "kernel" else "not decayed"

    def loss(
        self, params: Arrays, model_state: Arrays, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Arrays]:
        """Returns (terms, metrics, model_state) of one device's share [b, ...].

        The loss is the sum over `terms` of sum / weight, where both are first added over all
        devices. A term whose global weight is 0 counts as 0. Weights depend on the batch, and on
        `params` only behind `jax.lax.stop_gradient`. `rng` differs from step to step, from device
        to device and from micro-batch to micro-batch. In `model_state`, floats become their mean
        over devices; integers must be equal on all devices.
        """
        raise NotImplementedError

    def predict(
        self, params: Arrays, model_state: Arrays, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns the arrays [b, ...] that `score` needs of one device's share of a batch."""
        raise NotImplementedError

    def portable(self, params: Arrays, model_state: Arrays) -> Portable | None:
        """The model in the forms that other programs read; None where there are none.

        The arrays are NumPy's.
        """
        del params, model_state
        return None

    def embed(
        self, params: Arrays, model_state: Arrays, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """For --mode=probe: features f32[b, F] and label i32[b] of a batch of `eval_batches`."""
        raise NotImplementedError

    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """Scores, at least the targets' metrics, from the outputs of `predict` without padding.

        Only process 0 calls it, with the rows of all hosts.
        """
        raise NotImplementedError

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        """Those of the scores that the line of an evaluation shows; files keep all of them."""
        return scores

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """Shows the predictions: what went wrong, examples, files for other programs.

        --mode=report shows them on its page; --mode=eval and the report write their files. Only
        process 0 calls it, with the rows that `score` gets.
        """
        del rows
        return []


def mean_scores(rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
    """The mean of each output over all rows, summed in float64: the `score` of most benchmarks."""
    sums: dict[str, float] = {}
    count = 0
    for row in rows:
        count += len(next(iter(row.values())))
        for name, values in row.items():
            sums[name] = sums.get(name, 0.0) + float(np.sum(values, dtype=np.float64))
    return {name: total / count for name, total in sums.items()}
