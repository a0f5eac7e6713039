"""GNMT, a recurrent translator with attention (Wu et al. 2016, arXiv:1609.08144).

This file joins the other files of this folder and of its family into a benchmark: `corpus` holds
the pairs of sentences, `models` has the network, `losses` the loss, `coverage` the beam search.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import HostBatch, Spec, Target, Terms
from benchmarks.translation import references
from benchmarks.translation.gnmt import corpus, coverage, input_pipeline, losses, models
from benchmarks.translation.gnmt.buckets import Buckets
from benchmarks.translation.gnmt.corpus import Corpus, Patterns
from benchmarks.translation.translator import Translation
from benchmarks.translation.vocabulary import EOS
from errors import ConfigError, DataError
from keys import Count, NotNegative, Positive, Seed, Share, read

# Pairs of at most 48 tokens in Google's files; newstest2014; words of Google's file.
WMT = {"train": 3_442_299, "eval": 3_003, "vocabulary": 32_316}
_PRECISIONS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
_LOGITS = 1 << 26  # of a device at a time, at most: 256 MB in float32
Length = Annotated[int, "[1, 65536]"]
Layers = Annotated[int, "[2, 99]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The config's keys that this benchmark reads; configs/gnmt.py explains them."""

    seed: Seed
    data_dir: str
    train_source: str
    train_target: str
    eval_source: str
    eval_target: str
    train_files: str
    eval_files: str
    vocabulary_file: str
    eval_references: str
    num_train_pairs: Count
    num_eval_sentences: Count
    vocabulary_size: Annotated[int, "[0, 1e6]"]
    bucket_lengths: Sequence[Length]
    eval_lengths: Sequence[Length]
    num_encoder_layers: Layers
    num_decoder_layers: Layers
    width: Length
    dropout: Annotated[float, "[0, 1)"]
    label_smoothing: Annotated[float, "[0, 1)"]
    projection_bias: bool
    counts_eos: bool
    init_scale: Positive
    attention_gain: Positive
    precision: Literal["bfloat16", "float32"]
    beam_size: Annotated[int, "[1, 100]"]
    length_penalty: NotNegative
    coverage_penalty: NotNegative
    max_length: Length
    target: Share


def make(config: Any, cache_dir: str) -> Gnmt:
    """Makes the benchmark; see `benchmarks.load`.

    Raises:
      ConfigError: a value cannot work.
    """
    settings = read(Settings, config)
    for key in ("bucket_lengths", "eval_lengths"):
        lengths = tuple(getattr(settings, key))
        if not lengths or list(lengths) != sorted(set(lengths)):
            raise ConfigError(f"config.{key}={lengths}: must rise, such as (24, 32, 48)")
    return Gnmt(settings, cache_dir)


class Gnmt(Translation):
    """A GNMT that translates sentences."""

    unit = "pairs"
    throughput = ("tokens", "token_loss")
    published_vocabulary = WMT["vocabulary"]
    advice = {
        "input": "use a machine with faster CPU cores: the pairs are in memory, and a batch is "
        "copied out of it",
    }

    def __init__(self, settings: Settings, cache_dir: str):
        self.settings, self._cache_dir = settings, cache_dir
        self.targets = (Target("BLEU", settings.target),)

    # Data.

    @functools.cached_property
    def _train(self) -> Corpus:
        settings = self.settings
        patterns = Patterns(settings.train_source, settings.train_target, settings.train_files)
        found = corpus.load(
            settings.data_dir,
            patterns,
            self.vocabulary,
            split="train",
            longest=settings.bucket_lengths[-1],
            cache_dir=self._cache_dir,
        )
        if settings.num_train_pairs not in (0, len(found)):
            raise ConfigError(
                f"config.num_train_pairs={settings.num_train_pairs:,}, but {settings.data_dir} has "
                f"{len(found):,} pairs of at most {settings.bucket_lengths[-1]} tokens: is it "
                "complete? 0 takes as many as there are"
            )
        return found

    @functools.cached_property
    def _found(self) -> tuple[str, list[str]]:
        """The file of the references and its lines; they say how many sentences there are."""
        settings = self.settings
        return references.read(settings.data_dir, settings.eval_references)

    @functools.cached_property
    def _eval(self) -> Corpus:
        settings, (path, lines) = self.settings, self._found
        patterns = Patterns(settings.eval_source, settings.eval_target, settings.eval_files)
        declared = settings.num_eval_sentences
        if path and declared not in (0, len(lines)):
            raise ConfigError(
                f"config.num_eval_sentences={declared:,}, but {path} has {len(lines):,} lines"
            )
        found = corpus.load(
            settings.data_dir,
            patterns,
            self.vocabulary,
            split="eval",
            longest=settings.eval_lengths[-1],
            most=len(lines) or declared or None,
            cache_dir=self._cache_dir,
        )
        if declared not in (0, len(found)):
            raise ConfigError(
                f"config.num_eval_sentences={declared:,}, but {settings.data_dir} has "
                f"{len(found):,}: is it complete? 0 takes as many as there are"
            )
        if ".padded." in found.paths[0] and not (lines or declared):
            raise DataError(
                f"{found.paths[0]} has lines that only fill it up, and nothing says how many: put "
                f"newstest2014.de into {settings.data_dir}, or give "
                f"--config.num_eval_sentences={WMT['eval']}"
            )
        return found

    def num_examples(self, split: str) -> int:
        if split == "eval":
            _ = self.references  # they are refused before training, not after it
        return len(self._train if split == "train" else self._eval)

    def declared_examples(self, split: str) -> int:
        settings = self.settings
        return settings.num_train_pairs if split == "train" else settings.num_eval_sentences

    def nominal_examples(self, split: str) -> int:
        return self.declared_examples(split) or WMT[split]

    def read_sides(self) -> tuple[np.ndarray, np.ndarray]:
        every, held = np.arange(len(self._eval)), self._eval
        inputs = held.rows(every, 0, self.eval_lengths[-1])
        return inputs, held.rows(every, 1, int(held.lengths[:, 1].max()))

    def read_references(self) -> tuple[str, list[str]]:
        path, lines = self._found
        if path and len(lines) != len(self._eval):
            raise DataError(
                f"{path} has {len(lines):,} lines, and there are {len(self._eval):,} sentences to "
                "evaluate: each needs the line of its reference; see config.eval_references"
            )
        return path, lines

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        def spec(sides: Sequence[str], size: int, **others: Any) -> Spec:
            rows = {side: jax.ShapeDtypeStruct((batch_size, size), np.int32) for side in sides}
            return rows | {k: jax.ShapeDtypeStruct((batch_size,), d) for k, d in others.items()}

        settings = self.settings
        if split == "train":
            sides = "inputs", "targets"
            return tuple(
                spec(sides, size, dropout=np.int32, id=np.int32) for size in settings.bucket_lengths
            )
        return tuple(
            spec(("inputs",), size, id=np.int32, mask=np.float32) for size in settings.eval_lengths
        )

    @functools.lru_cache(2)  # noqa: B019 (a run has one benchmark)
    def _buckets(self, batch_size: int) -> Buckets:
        settings, lengths = self.settings, self._train.lengths.max(axis=1)
        return Buckets.make(lengths, settings.bucket_lengths, settings.seed, batch_size)

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        buckets = self._buckets(batch_size)
        return input_pipeline.train_batches(self._train, buckets, shard, num_shards, start_step)

    def train_ids(self, batch_size: int, step: int) -> list[int]:
        return self._buckets(batch_size).batch(step).pairs.tolist()

    def describe(self, ids: list[int]) -> list[str]:
        return [self._train.describe(i) for i in ids]

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """The pairs, all of which each host holds, and the orders of two epochs."""
        if split == "eval":
            return {("eval_lengths",): self._eval.nbytes}
        self._buckets(batch_size)  # a batch that is too large is refused before anything compiles
        return {(): self._train.nbytes + 2 * 8 * len(self._train)}

    # Forward pass, loss and score.

    @functools.cached_property
    def _model(self) -> models.GNMT:
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
            dtype=_PRECISIONS[settings.precision],
        )

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        rows = {side: jnp.zeros((1, 2), jnp.int32) for side in ("inputs", "targets")}
        return self._model.init(rng, rows, None)["params"], {}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Smoothed cross-entropy, summed over the tokens of a sentence; the mean over sentences.

        `rng` is not used: the batch's leaf "dropout" makes a row's dropout the same on any device.
        """
        del rng
        settings, targets = self.settings, batch["targets"].T
        features: Any = self._model.apply({"params": params}, batch, batch["dropout"])
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

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The best translation of each sentence, int32[b, max_length], zeros behind."""
        del model_state
        settings, inputs = self.settings, batch["inputs"]
        run = functools.partial(self._model.apply, {"params": params})
        memory: Any = run(inputs, method="encode")
        has_words = jnp.any(inputs > 0, axis=1)
        cache: Any = self._model.start(len(inputs), settings.beam_size)

        def step(ids: jax.Array, position: jax.Array, cache: Any) -> Any:
            del position
            return run(ids, cache, memory, method="step")

        sequences, _ = coverage.beam_search(
            step,
            cache,
            memory.visible,
            jnp.where(has_words, settings.max_length, 0),
            beams=settings.beam_size,
            alpha=settings.length_penalty,
            coverage=settings.coverage_penalty,
            length=settings.max_length,
            vocab_size=self.vocabulary_size,
        )
        return {"id": batch["id"], "tokens": sequences}
