"""GNMT (Wu et al. 2016, arXiv:1609.08144), a recurrent translator with attention.

`loader` reads all pairs of sentences, from text or records, into a `corpus`, which also makes
batches of pairs of similar length. `models` has the network, `lstm` and `losses` its two largest
parts with their gradients, `coverage_beams` the beam search, `mlperf` the rules of MLPerf.
"""

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import HostBatch, Terms
from benchmarks.translation import losses, translator
from benchmarks.translation.gnmt import coverage_beams, loader, models
from benchmarks.translation.gnmt.corpus import Buckets, Corpus, bucket_batches
from benchmarks.translation.translator import Length, Lengths, Translator
from benchmarks.translation.use import TranslatorUses
from benchmarks.translation.vocabulary import EOS
from common.data import files
from common.errors import ConfigError, DataError
from common.keys import BatchSize, Count, NotNegative, Positive, read_config

# Pairs of at most 48 tokens in Google's files; newstest2014; entries with Google's file: PAD, EOS,
# unknown words, and 32,313 pieces.
WMT = {"train": 3_442_299, "eval": 3_003, "vocabulary": 32_316}
_LOGITS = 1 << 26  # the most logits of a device at a time: 256 MB in float32
Layers = Annotated[int, "[2, 99]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(translator.Settings):
    """The keys of the config; configs/gnmt.py explains them."""

    train_source: str
    train_target: str
    eval_source: str
    eval_target: str
    num_train_pairs: Count
    train_batch_size: BatchSize
    bucket_lengths: Lengths
    num_encoder_layers: Layers
    num_decoder_layers: Layers
    projection_bias: bool
    counts_eos: bool
    init_scale: Positive
    attention_gain: Positive
    coverage_penalty: NotNegative
    max_length: Length


class Gnmt(Translator):
    """The benchmark: all pairs in memory, trained on in buckets of similar length."""

    settings: Settings
    unit = "pairs"
    declared = {"train": "num_train_pairs", "eval": "num_eval_sentences"}
    throughput = ("tokens", "token_loss")
    nominal_sizes = WMT
    input_advice = {
        "input": "use a machine with faster CPU cores: the pairs are in memory, and a batch is "
        "copied out of it"
    }

    def __init__(self, settings: Settings, cache_dir: str):
        super().__init__(settings, cache_dir)
        self._corpora: dict[str, Corpus] = {}  # by split, once it is opened

    # Data.

    @property
    def language(self) -> str:
        suffix = re.search(r"\.([a-z]{2})$", self.settings.train_target)
        return suffix[1] if suffix else super().language

    def read(self, split: str) -> None:
        if split not in self._corpora:
            self._corpora[split] = self._load(split)
        if split == "train":  # a batch that is too large is refused before anything compiles
            self._buckets(self.settings.train_batch_size)

    def _load(self, split: str) -> Corpus:
        """Loads a split; ConfigError if it has another number of pairs than declared."""
        settings, declared = self.settings, self.declared_examples(split)
        path, lines = self.reference_file if split == "eval" else ("", [])
        if path and declared not in (0, len(lines)):
            raise ConfigError(
                f"config.num_eval_sentences={declared:,}, but {path} has {len(lines):,} lines"
            )
        limit = len(lines) or declared or None if split == "eval" else None
        corpus = loader.load(settings, split, self.vocabulary, limit, self.cache_dir)
        if declared not in (0, len(corpus)):
            longest = settings.bucket_lengths[-1]
            counted = f" pairs of at most {longest} tokens" if split == "train" else ""
            raise ConfigError(
                f"config.{self.declared[split]}={declared:,}, but {settings.data_dir} has "
                f"{len(corpus):,}{counted}: is it complete? 0 takes as many as there are"
            )
        if split == "eval" and ".padded." in corpus.paths[0] and not limit:
            raise DataError(
                f"{corpus.paths[0]} has lines that only fill it up, and nothing says how many: put "
                f"newstest2014.de into {settings.data_dir}, or give "
                f"--config.num_eval_sentences={WMT['eval']}"
            )
        if split == "train" and self.part:
            corpus = corpus.take(np.flatnonzero(self.part.choose(len(corpus))))
        return corpus

    def record_files(self, split: str) -> Sequence[str]:
        corpus = self._corpora[split]
        return corpus.paths if corpus.counts else ()

    def num_examples(self, split: str) -> int:
        return len(self._corpora[split])

    def files_identity(self, split: str) -> Mapping[str, str]:
        corpus = self._corpora[split]
        counts = corpus.counts or (len(corpus),) * len(corpus.paths)
        what, folder = f"{split} pairs", self.settings.data_dir
        lines = files.identity(what, folder, corpus.paths, counts)
        return lines | {what: f"{lines[what]}, CRC-32 {zlib.crc32(corpus.ids.data):08x}"}

    def train_rows(self) -> Sequence[Mapping[str, int]]:
        return [{"inputs": size, "targets": size} for size in self.settings.bucket_lengths]

    @functools.cached_property
    def eval_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        corpus = self._corpora["eval"]
        every = np.arange(len(corpus))
        sources = corpus.rows(every, 0, self.settings.eval_lengths[-1])
        return sources, corpus.rows(every, 1, int(corpus.lengths[:, 1].max()))

    @functools.cached_property
    def _buckets(self) -> Callable[[int], Buckets]:
        seed, sizes = self.settings.seed, self.settings.bucket_lengths
        lengths = self._corpora["train"].lengths.max(axis=1)
        return functools.lru_cache(2)(lambda batch: Buckets.make(lengths, sizes, seed, batch))

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        plan = self._buckets(batch_size)
        return bucket_batches(self._corpora["train"], plan, shard, num_shards, start_step)

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return self._buckets(batch_size).batch(step).pairs.tolist()

    def describe_examples(self, ids: list[int]) -> list[str]:
        return [self._corpora["train"].describe(i) for i in ids]

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """The bytes of all pairs, which each host holds, and of the orders of two epochs."""
        corpus = self._corpora[split]
        if split == "eval":
            return {("eval_lengths",): corpus.nbytes}
        return {(): corpus.nbytes + 2 * 8 * len(corpus)}

    # Forward pass, loss and score.

    @functools.cached_property
    def network(self) -> models.GNMT:
        settings = self.settings
        return models.GNMT(
            vocab_size=self.vocabulary_size,
            width=settings.width,
            encoder_layers=settings.num_encoder_layers,
            decoder_layers=settings.num_decoder_layers,
            dropout=settings.dropout,
            projection_bias=settings.projection_bias,
            init_scale=settings.init_scale,
            attention_gain=settings.attention_gain,
            dtype=settings.dtype,
        )

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        rows = {side: jnp.zeros((1, 2), jnp.int32) for side in ("inputs", "targets")}
        return self.network.init(rng, rows, None)["params"], {}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Smoothed cross-entropy, summed over the tokens of a sentence; the mean over sentences.

        `rng` is not used: the batch's leaf "dropout" makes a row's dropout the same on any device.
        """
        del rng
        settings, targets = self.settings, batch["targets"].T
        features: Any = self.network.apply({"params": params}, batch, batch["dropout"])
        real = targets > 0 if settings.counts_eos else targets > EOS
        size = self.vocabulary_size
        with jax.named_scope("logits"):
            total = losses.smoothed_cross_entropy(
                features,
                params["classifier"]["kernel"],
                params["classifier"].get("bias"),
                targets,
                real.astype(jnp.float32),
                vocab_size=size,
                smoothing=settings.label_smoothing,
                slices=-(-targets.size * size // _LOGITS),
            )
        sentences = jnp.float32(targets.shape[1])
        tokens = jnp.sum(real, dtype=jnp.float32)
        return {"cross_entropy": (total, sentences)}, {"token_loss": (total, tokens)}, model_state

    def n_best(self, params: Any, inputs: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
        settings = self.settings
        run = functools.partial(self.network.apply, {"params": params})
        memory: Any = run(inputs, method="encode")
        has_words = jnp.any(inputs > 0, axis=1)
        cache: Any = self.network.init_cache(len(inputs), settings.beam_size)

        def step(ids: jax.Array, position: jax.Array, cache: Any) -> Any:
            del position
            return run(ids, cache, memory, method="step")

        limit = jnp.where(has_words, settings.max_length, 0)
        rules, coverage = self.search_rules(settings.max_length, top), settings.coverage_penalty
        return coverage_beams.search(step, cache, memory.mask, limit, coverage, rules)

    @property
    def uses(self) -> TranslatorUses:
        return TranslatorUses(self)


def make(config: Any, cache_dir: str) -> Gnmt:
    """Makes the benchmark; ConfigError if a value of the config cannot work."""
    return Gnmt(read_config(Settings, config), cache_dir)
