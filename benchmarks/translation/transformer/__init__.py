"""The Transformer (Vaswani et al. 2017, arXiv:1706.03762), a translator.

`records` reads the data and makes batches, `models` has the network, `attention` and `losses` its
two largest parts with their gradients, `finished_beams` the beam search, `mlperf` MLPerf's rules.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import Benchmark, HostBatch, Model, Terms
from benchmarks.records import RecordBenchmark, RecordFiles
from benchmarks.translation import evaluation, translator
from benchmarks.translation.schema import FEATURES
from benchmarks.translation.transformer import finished_beams, losses, marian, models, records
from benchmarks.translation.transformer.ctranslate import CTranslateUses
from benchmarks.translation.translator import Length, Translator
from benchmarks.translation.vocabulary import EOS, PAD, Marian
from benchmarks.uses import Imported
from common.data import files
from common.errors import ConfigError, DataError
from common.keys import Count, read_config

# Packed rows of Google's v0.6 files; newstest2014; subwords of Google's file.
WMT = {"train": 566_340, "eval": 3_003, "vocabulary": 33_708}
MODEL = Model(
    keys=("num_layers", "width", "mlp_width", "num_heads", "variant", "activation"),
    foreign_settings=marian.foreign_settings,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(translator.Settings):
    """The keys of the config; configs/transformer.py explains them."""

    num_train_rows: Count
    row_length: Annotated[int, "[8, 65536]"]
    shuffle_buffer_size: Annotated[int, "[1, 1e9]"]
    input_streams: Annotated[int, "[1, 1e6]"]
    num_layers: Annotated[int, "[1, 99]"]  # dropouts are numbered for so many
    mlp_width: Length
    num_heads: Length
    variant: Literal["tensor2tensor", "marian"] = "tensor2tensor"  # runs of before have no such
    activation: Literal["relu", "swish", "gelu"] = "relu"
    remat: bool
    extra_length: Annotated[int, "[0, 65536]"]
    eval_source: str = ""  # runs of before have none
    init_required: bool = False


class Transformer(Translator, RecordBenchmark[records.Records]):
    """The benchmark: rows packed with several pairs, and sentences to evaluate one by one."""

    settings: Settings
    unit = "rows"
    declared = {"train": "num_train_rows", "eval": "num_eval_sentences"}
    throughput = ("tokens", "cross_entropy")
    nominal_sizes = WMT
    input_advice = {
        "reading": "move the records closer (a bucket of this region, a faster disk), or raise "
        "--config.input_streams",
        "decoding": "use a machine with more CPU cores",
    }

    # Data.

    def open_records(self, where: RecordFiles) -> records.Records:
        settings = self.settings
        length = settings.row_length if where.split == "train" else settings.eval_lengths[-1]
        return records.open_records(where, length, self.vocabulary.size)

    @functools.cached_property
    def eval_text(self) -> tuple[str, str]:
        """The files of sources ("" for records) and references; equal names belong together."""
        settings = self.settings
        sources, references = (
            evaluation.find_text(settings.data_dir, getattr(settings, key), key)
            for key in ("eval_source", "eval_references")
        )
        for source, reference in itertools.product(sources, references):
            if source.rpartition(".")[0] == reference.rpartition(".")[0]:
                return source, reference
        if sources and "," not in settings.eval_source:
            if not references:
                raise DataError(f"{sources[0]} has no references: set config.eval_references")
            return sources[0], references[0]
        return "", references[0] if references else ""

    def _is_text(self, split: str) -> bool:
        """Whether a split is read from files of text instead of records."""
        return split == "eval" and bool(self.eval_text[0])

    def record_files(self, split: str) -> Sequence[str]:
        if not self._is_text(split):
            return self.source(split).shards.paths
        try:  # they are not evaluated, but may show that the vocabulary is another
            return files.find(self.settings.data_dir, self.settings.eval_files, "eval records")
        except DataError:
            return ()

    def read(self, split: str) -> None:
        if not self._is_text(split):
            RecordBenchmark.open(self, split)
            return
        count, declared = len(self.eval_pairs[0]), self.settings.num_eval_sentences
        if declared not in (0, count):
            raise ConfigError(
                f"config.num_eval_sentences={declared:,}, but {self.eval_text[0]} has {count:,}"
            )

    def num_examples(self, split: str) -> int:
        if self._is_text(split):
            return len(self.eval_pairs[0])
        return RecordBenchmark.num_examples(self, split)

    def check(self, split: str) -> list[str]:
        return (Benchmark if self._is_text(split) else RecordBenchmark).check(self, split)

    def files_identity(self, split: str) -> Mapping[str, str]:
        if split == "eval" and (path := self.eval_text[0]):
            count = self.num_examples(split)
            return files.identity("eval text", self.settings.data_dir, [path], [count])
        return RecordBenchmark.identity(self, split).content

    def collected(self, count: int) -> tuple[float, str]:
        """A row of training holds several pairs of sentences."""
        source = self.source("train")
        return count * source.pairs / (self.part.complete or source.shards.total), "pairs"

    def train_rows(self) -> Sequence[Mapping[str, int]]:
        return [dict.fromkeys(FEATURES, self.settings.row_length)]

    @functools.cached_property
    def eval_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        if not self.eval_text[0]:
            return self.source("eval").read_all()
        source, reference = self.eval_text
        most, vocabulary = self.settings.eval_lengths[-1], self.vocabulary
        sources = self._encoded(source, vocabulary.encode, most)
        return sources, self._encoded(reference, vocabulary.encode_target)

    def _encoded(
        self, path: str, encode: Callable[[str], list[int]], most: int | None = None
    ) -> np.ndarray:
        """The lines of a file, of `most` tokens at most, as int32[n, length] with EOS and zeros."""
        lines = [[*encode(line), EOS] for line in evaluation.read_lines(path)]
        size = max(map(len, lines))
        if most and size > most:
            number = 1 + [*map(len, lines)].index(size)
            raise DataError(
                f"{path}, line {number}: the sentence has {size} tokens, and the evaluation "
                f"allows {most}: set the last of --config.eval_lengths to {size} or more"
            )
        ids = np.zeros((len(lines), most or size), np.int32)
        for row, line in zip(ids, lines, strict=True):
            row[: len(line)] = line
        return ids

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        order = self.order(batch_size)
        return self.source("train").train_batches(order, shard, num_shards, start_step)

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """Eight batches and, to train, the records that are in memory for shuffling."""
        if split == "eval":
            return {(): sum(side.nbytes for side in self.eval_pairs)}
        batches = 8 * batch_size * self.settings.row_length * len(FEATURES) * 4 // num_shards
        shuffled = {("shuffle_buffer_size",): self.held_bytes(num_shards)}
        return {("train_batch_size", "row_length"): batches} | shuffled

    # Forward pass, loss and score.

    @functools.cached_property
    def network(self) -> models.Transformer:
        settings = self.settings
        return models.Transformer(
            vocab_size=self.vocabulary_size,
            width=settings.width,
            mlp_width=settings.mlp_width,
            heads=settings.num_heads,
            layers=settings.num_layers,
            dropout=settings.dropout,
            variant=models.VARIANTS[settings.variant],
            activation=settings.activation,
            remat=settings.remat,
            dtype=settings.dtype,
        )

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        length = self.settings.row_length
        rows = {name: jnp.zeros((1, length), jnp.int32) for name in FEATURES}
        return self.network.init(rng, rows, None)["params"], {}

    def check_random_start(self, norm_examples: int) -> None:
        del norm_examples
        if self.settings.init_required:
            raise ConfigError(
                "config.init_from names no model: give --config.init_from=WORKDIR of a "
                "Transformer's run; --config=configs/transformer.py begins without one"
            )

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Smoothed cross-entropy, the mean over the target tokens of all devices.

        `rng` is not used: the batch's leaf "dropout" makes a row's dropout the same on any device.
        """
        del rng
        settings, targets = self.settings, batch["targets"]
        if settings.variant == "marian":  # word 0 is only the start there, and its row stays
            table = params["embedding"]
            start = jax.lax.stop_gradient(table[PAD])
            params = {**params, "embedding": table.at[PAD].set(start)}
        features: Any = self.network.apply({"params": params}, batch, batch["dropout"])
        real = (targets > 0).astype(jnp.promote_types(features.dtype, jnp.float32))
        rule, bias = (self.vocabulary_size, settings.label_smoothing), params.get("logits_bias")
        loss = losses.total(features, params["embedding"], targets, real, *rule, bias)
        sums = {"cross_entropy": (loss, jnp.sum(real))}
        return sums, sums, model_state

    def n_best(self, params: Any, inputs: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
        settings = self.settings
        lengths = jnp.sum(inputs > 0, axis=1)
        limit = jnp.where(lengths > 0, lengths + settings.extra_length, 0)
        rules = self.search_rules(inputs.shape[1] + settings.extra_length, top)
        rules = rules._replace(marian=settings.variant == "marian")
        run = functools.partial(self.network.apply, {"params": params})
        memory: Any = run(inputs, method="encode")
        step = functools.partial(run, memory=memory, method="step")
        cache = self.network.init_cache(memory, rules.beam_size, rules.max_length)
        return finished_beams.search(step, cache, limit, rules)

    @property
    def uses(self) -> CTranslateUses:
        return _Uses(self)


class _Uses(CTranslateUses):
    """The uses of a Transformer, which can begin with the weights of OPUS-MT."""

    @property
    def formats(self) -> Sequence[str]:
        benchmark: Any = self._benchmark
        is_marian = benchmark.settings.variant == "marian"
        has_pieces = is_marian and isinstance(benchmark.vocabulary, Marian)
        return (*super().formats, *["hf"] * has_pieces)

    def foreign_folder(self, params: Any) -> tuple[Mapping[str, np.ndarray], Mapping[str, bytes]]:
        benchmark: Any = self._benchmark
        return marian.folder(benchmark.settings, benchmark.vocabulary, params)

    def read_foreign(self, file: str) -> Imported:
        return marian.read(self._benchmark, file)


def make(config: Any, cache_dir: str) -> Transformer:
    """Makes the benchmark; ConfigError if a value of the config cannot work."""
    settings = read_config(Settings, config)
    width, heads = settings.width, settings.num_heads
    if width % (2 * heads):
        raise ConfigError(
            f"config.num_heads={heads}: config.width={width} must be a multiple of {2 * heads}"
        )
    return Transformer(settings, cache_dir)
