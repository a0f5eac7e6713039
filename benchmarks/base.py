"""Defines what a benchmark is: a data set, a model and a target quality.

A benchmark owns its data, its forward pass and loss, its predictions and its score; the training
loop owns the rest (docs/design.md). docs/tour.md adds a benchmark step by step. `Benchmark` has
what every benchmark must have, then what it may have; `benchmarks.uses` is what its trained models
are good for.

Letters in shapes: B is the global batch, h one host's share of it, b one device's share.
"""

import abc
import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.part import Part
from benchmarks.uses import Imported, Uses
from common.errors import count

BATCH_NORM_AXIS = "group"  # the mesh axis of `config.bn_span` devices that share BatchNorm's mean
BATCH_AXES = ("groups", BATCH_NORM_AXIS)  # the mesh axes that every batch is sharded over

Spec = dict[str, jax.ShapeDtypeStruct]
HostBatch = dict[str, np.ndarray]
Terms = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum f32[], weight f32[])
Arrays = Any  # a tree of arrays


@dataclasses.dataclass(frozen=True)
class Target:
    """One quality that a run trains to: `scores[metric] >= value`.

    To add one, return `metric` from `Benchmark.score` and put a `Target` into `targets`;
    `engine.stopping` ends the run when all are reached.
    """

    metric: str
    value: float
    percent: bool = False  # reports show the metric in per cent


@dataclasses.dataclass(frozen=True)
class Group:
    """How the optimizer treats a group of parameters."""

    decayed: bool = False  # whether weight decay applies
    rate: float = 1.0  # multiplies the learning rate; 0 freezes the parameters


@dataclasses.dataclass(frozen=True)
class Model:
    """What a run takes from the model whose weights it begins with: a benchmark's `MODEL`."""

    keys: tuple[str, ...] = ()  # keys of the config that every such model decides
    body_keys: tuple[str, ...] = ()  # the same, of this benchmark's models only
    whole_keys: tuple[str, ...] = ()  # of models that are used unchanged, such as a class count
    follows: tuple[str, ...] = ()  # other benchmarks with whose models it can begin
    # (config, values of a model of `follows`) -> values of further keys; ConfigError: it is unfit.
    follow: Callable[[Any, Mapping[str, Any]], dict[str, Any]] = lambda config, values: {}
    # (the config in a manifest, the manifest) -> the config with what the data have decided.
    restored: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = (
        lambda values, manifest: values
    )
    # Another library's file -> (values of keys, (note, key) pairs); None: no model of this kind.
    foreign_settings: Callable[[str], tuple[dict[str, Any], list[tuple[str, str]]] | None] = (
        lambda file: None
    )
    # (`common.foreign` file, whether the stem takes blocks of 2x2 pixels) -> the weights, for
    # benchmarks that follow this one.
    foreign_weights: Callable[[Any, bool], Imported] | None = None
    library: Any = None  # in a family: the module of the other library's names


class Stage(NamedTuple):
    """The steps of a run that have one kind of training batch."""

    name: str  # for tables, such as "128 pixels"
    steps: int


class Identity(NamedTuple):
    """How a later run sees whether it has the data that a model was trained on."""

    # Values of `Benchmark.metadata` without which the model's numbers mean something else, such as
    # the names of the classes in their order. A run refuses other values.
    meaning: Mapping[str, Any] = {}
    # Sizes, counts and digests of the data by name; a run says in a NOTE which ones differ.
    content: Mapping[str, str] = {}
    hint: str = ""  # what else a user may do with data of another meaning, for the message


class Benchmark(abc.ABC):
    """The interface between the loop and a benchmark, in the order of the calls.

    Its module's `make(config, cache_dir) -> Benchmark` checks the config alone. `init`, `loss`,
    `batch_spec` and forecasts need neither data nor TensorFlow: sizes that the config leaves to the
    data are then those of the published data. `open` opens a split; modes without data never call
    it. The batches, `score` and all else that is about the data come after it.
    """

    # The part of the training data that the run uses; `benchmarks.load` sets it, `open` takes it.
    part: Part = Part()

    # A run has reached its target when it has reached all of them. `open` may set other values.
    targets: tuple[Target, ...]

    # --- What every benchmark has.

    def open(self, split: str) -> int:
        """Opens the data of "train" or "eval", checks and counts them; returns `num_examples`.

        ConfigError or DataError if a run cannot use them. The first call may take minutes, and the
        first process makes it before the others; later calls are quick.
        """
        return self.num_examples(split)

    @abc.abstractmethod
    def num_examples(self, split: str) -> int:
        """The number of examples in an epoch ("train") or an evaluation ("eval"), once opened."""

    @property
    def eval_rows(self) -> int:
        """The rows of `eval_batches` without padding: more than the examples if one has several."""
        return self.num_examples("eval")

    @abc.abstractmethod
    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        """The shapes and dtypes of all kinds of batches in `split`; leaves are [B, ...]."""

    @abc.abstractmethod
    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        """Endless batches of leaves [h, ...]; batch k is a function of (seed, k) alone.

        Concatenated over shards, batch k is the same global batch for any `num_shards`. At one
        step all shards yield the same shape. For the warning about slow input, a batch may have a
        leaf host_seconds float32[h], which is not in `batch_spec`: the seconds that one of
        `common.pools.cores()` threads spent on each example.
        """

    @abc.abstractmethod
    def eval_batches(self, batch_size: int, shard: int, num_shards: int) -> Iterator[HostBatch]:
        """Every example once over all shards, padded with rows whose `mask` float32[h] is 0.

        All shards yield the same number of batches, and the same shape at one step.
        """

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> tuple[Arrays, Arrays]:
        """Returns (params, model_state), traced by jax; `model_state` may be {}."""

    @abc.abstractmethod
    def loss(
        self, params: Arrays, model_state: Arrays, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Arrays]:
        """Returns (terms, metrics, model_state) of one device's share [b, ...].

        The loss is the sum over `terms` of sum / weight, where both are first added over all
        devices. A term whose global weight is 0 counts as 0. Weights depend on the batch, and on
        `params` only behind `jax.lax.stop_gradient`. `rng` differs from step to step, from device
        to device and from micro-batch to micro-batch. In `model_state`, floats become their mean
        over devices; integers must be equal on all devices. It is traced once, so it must not
        change during a run.
        """

    @abc.abstractmethod
    def predict(
        self, params: Arrays, model_state: Arrays, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns the arrays [b, ...] that `score` needs of one device's share of a batch."""

    @abc.abstractmethod
    def score(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """Scores, at least the targets' metrics, from the outputs of `predict` without padding.

        Only process 0 calls it, with the rows of all hosts.
        """

    # --- What it may have; the defaults suit most.

    unit: str = "examples"  # the name of the examples in reports, such as "images"
    # The value of the config because of which nothing is held out, "config.eval_holdout='none'":
    # "eval" is never opened, and a run only trains. "" where there is something to evaluate.
    no_evaluation: str = ""
    groups: Mapping[str, Group] = {
        "decayed": Group(decayed=True),
        "not decayed": Group(),
        "frozen": Group(rate=0.0),
    }

    # Data and model.

    def check(self, split: str) -> list[str]:
        """Reads every record of a split as a first run does, even if manifest.json has the counts.

        Returns a sentence for each count in which manifest.json and the records differ. Raises
        DataError for the first record that cannot be used.
        """
        self.open(split)
        return []

    @property
    def metadata(self) -> dict[str, Any]:
        """JSON that a checkpoint keeps about the data, such as class names."""
        return {}

    def adopt(self, params: Arrays, model_state: Arrays, loaded: Arrays) -> tuple[Arrays, Arrays]:
        """Replaces arrays of `init` with another model's, for `config.init_from`.

        All arrays are on the host; `loaded` is {"params": ..., "model_state": ...} of the other
        model, with the "source" and the "manifest" of its checkpoint. Arrays in the result
        (params, model_state) that come from it are the same objects as in `loaded`. By default
        every array is taken whose path and shape are the same. Raises CheckpointError, without the
        name of the other model, where too little of it fits.
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

    # Scores and uses.

    def all_scores(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
        """`score`, and scores that take too long for training; --mode=eval and reports call it."""
        return self.score(rows)

    def group_scores(self, rows: Iterator[dict[str, np.ndarray]]) -> dict[str, tuple[float, int]]:
        """The first target's metric in groups of the evaluated examples, from the rows of `score`.

        Returns {name: (metric, number)}; {} where the examples have no groups. A group is a class
        or category, or examples of similar size; `number` counts its examples, for detectors its
        objects. The complete data decide the groups, so they are the same for every model, also for
        those trained on a part.
        """
        return {}

    @property
    def uses(self) -> Uses:
        """What the trained models are good for, besides their score."""
        return Uses()

    # Reports.

    @property
    def score_names(self) -> tuple[str, ...]:
        """The scores of `score` that `config.best_by` may name; a run asks with open data."""
        return tuple(target.metric for target in self.targets)

    # Metrics that are shares of the evaluated examples: few examples get a confidence interval.
    proportions: tuple[str, ...] = ()
    # Where examples differ in size: (unit, term or metric whose weight counts it), such as
    # ("tokens", "cross_entropy"). Reports then show tokens per second.
    throughput: tuple[str, str] | None = None
    # Fixes by the part of the input that is too slow ("reading", "decoding", "transfer" or
    # "input"), as sentences that name the benchmark's config keys.
    input_advice: Mapping[str, str] = {}

    def headline(self, scores: Mapping[str, float]) -> Mapping[str, float]:
        """The scores that the line of an evaluation shows; files keep all of them."""
        return scores

    def score_notes(self, scores: Mapping[str, float]) -> list[str]:
        """Sentences about the final scores, such as that something simple is as good.

        `scores` are of the best evaluation of a run, or of the evaluated checkpoint; they may lack
        some that other versions had. No data need be open.
        """
        return []

    def run_notes(self, norm_examples: int, evaluating: bool) -> list[str]:
        """Sentences about the data that a user should know before training.

        `norm_examples` is the number of examples that share the statistics of BatchNorm;
        `evaluating` is whether the evaluation's data may be opened.
        """
        return []

    def data_warnings(self, split: str) -> list[tuple[str, str, str]]:
        """What a full check says about the records of a split, after it has read all of them.

        Each row is ("ok" or "warn", the text, a fix or "").
        """
        return []

    def identity(self, split: str) -> Identity:
        """Identifies the data of a split; reads only data that the split's batches need."""
        return Identity()

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        """The leaf "id" of the global training batch `step` (from 0); [] where batches have none.

        Computed without reading the examples.
        """
        return []

    def collected(self, count: int) -> tuple[float, str]:
        """What so many training examples are made of, as people count what they collect.

        Such as (29000.0, "pairs") for 2,018 rows that hold them.
        """
        return count, self.unit

    def describe_examples(self, ids: list[int]) -> list[str]:
        """The place of each training example in the data, for messages."""
        return [f"example {i}" for i in ids]

    # Compilation and the loop.

    # Stands for a `config.patience` of 0; `open` sets it if the recipe's target is for other data.
    default_patience: int = 0

    @property
    def published(self) -> str:
        """A value of config.init_from that fits, for messages."""
        return "WORKDIR"

    bn_span: int | str = 1  # devices that share BatchNorm statistics, or "64/4096"
    # True: the train step is compiled with larger windows, see `engine.compiler`. Estimates decide.
    larger_windows: bool = False
    # True: process 0 scores in a thread while the devices train on. For scores that take minutes.
    scores_in_background: bool = False

    def declared_examples(self, split: str) -> int:
        """The number of examples that the config declares, and the data must have; else 0."""
        return 0

    def data_sizes(self) -> dict[str, int]:
        """The config keys that declare how large the data are, with the numbers of the data."""
        return {}

    def set_total_steps(self, total_steps: int) -> None:  # noqa: B027 (optional)
        """Takes the length of the run, before training batches are made."""

    def check_random_start(self, norm_examples: int) -> None:  # noqa: B027 (optional)
        """Raises ConfigError if a run cannot begin with the random weights of `init`."""

    def fake_batch(self, spec: Spec, draw: np.random.Generator) -> HostBatch | None:
        """Draws a batch of a kind in `batch_spec`, for config.dataset='fake'; None if it cannot.

        It may leave out leaves that are numbers of the examples, 0 to B - 1, and `mask`. Evaluation
        batches that need other data to be scored are None.
        """
        return None

    # Forecasts.

    # Of the published data: the examples by split, and others such as "classes" or "vocabulary".
    nominal_sizes: Mapping[str, int] = {}

    def nominal_examples(self, split: str) -> int:
        """The number of examples to assume where no data can be read; 0: it must be counted."""
        return self.declared_examples(split) or self.nominal_sizes.get(split, 0)

    def stages(self) -> tuple[Stage, ...]:
        """How many steps of the planned run have each kind of batch in `batch_spec("train", ...)`.

        () where the kinds come in no fixed number; forecasts then count them equally.
        """
        return ()

    def input_rates(self) -> tuple[Mapping[str, float], ...]:
        """Training examples that a second of CPU time prepares, as measured, for forecasts.

        Each rate comes under the config's setting that it was measured with; there is one for each
        of `stages`, or one for all steps. () where the rates are not known.
        """
        return ()

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """Estimates the bytes that a split's input needs in the memory of each host.

        Each part comes with the config keys that decide its size, for messages; () where no key
        does.
        """
        return {}


def mean_scores(rows: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
    """The mean of each output over all rows, summed in float64: the `score` of most benchmarks."""
    sums: dict[str, float] = {}
    count = 0
    for row in rows:
        count += len(next(iter(row.values())))
        for name, values in row.items():
            sums[name] = sums.get(name, 0.0) + float(np.sum(values, dtype=np.float64))
    return {name: total / count for name, total in sums.items()}


def distinct(named: Sequence[tuple[int, str]]) -> list[str]:
    """The names of (number, name) pairs; names that come again have their number: "crane (134)"."""
    times = collections.Counter(name for _, name in named)
    return [f"{name} ({number})" if times[name] > 1 else name for number, name in named]


def span(values: np.ndarray, noun: str) -> str:
    """The least and the largest of values int[n], n > 0: "1 to 9 tokens", or "1 token"."""
    low, high = int(values.min()), int(values.max())
    return f"{low:,} to {count(high, noun)}" if high > low else count(low, noun)
