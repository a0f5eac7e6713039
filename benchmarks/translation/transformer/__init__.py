"""The Transformer, a translator (Vaswani et al. 2017, arXiv:1706.03762), on pairs of sentences.

This file joins the other files of this folder and of its family into a benchmark: `models` has the
network, `losses` the loss, `search` of the family the beam search.
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
from benchmarks.sharded import Sharded
from benchmarks.translation import records, references, search
from benchmarks.translation.packing import FEATURES
from benchmarks.translation.transformer import input_pipeline, losses, models
from benchmarks.translation.translator import Translation
from errors import ConfigError, DataError
from keys import Count, NotNegative, Seed, Share, read

WMT = {"train": 566_340, "eval": 3_003}  # packed rows of Google's v0.6 files; newstest2014
VOCABULARY = 33_708  # subwords of Google's file
_PRECISIONS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
Width = Annotated[int, "[1, 65536]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The config's keys that this benchmark reads; configs/transformer.py explains them."""

    seed: Seed
    data_dir: str
    train_files: str
    eval_files: str
    vocabulary_file: str
    eval_references: str
    num_train_rows: Count
    num_eval_sentences: Count
    vocabulary_size: Annotated[int, "[0, 1e6]"]
    row_length: Annotated[int, "[8, 65536]"]
    eval_lengths: Sequence[Annotated[int, "[1, 65536]"]]
    shuffle_buffer_size: Annotated[int, "[1, 1e9]"]
    input_streams: Annotated[int, "[1, 1e6]"]
    num_layers: Annotated[int, "[1, 99]"]  # dropouts are numbered for so many
    width: Width
    mlp_width: Width
    num_heads: Width
    dropout: Annotated[float, "[0, 1)"]
    label_smoothing: Annotated[float, "[0, 1)"]
    precision: Literal["bfloat16", "float32"]
    remat: bool
    beam_size: Annotated[int, "[1, 100]"]
    length_penalty: NotNegative
    extra_length: Annotated[int, "[0, 65536]"]
    target: Share


def make(config: Any, cache_dir: str) -> Translator:
    """Makes the benchmark; see `benchmarks.load`.

    Raises:
      ConfigError: a value cannot work.
    """
    settings = read(Settings, config)
    _check(settings)
    return Translator(settings, cache_dir)


def _check(settings: Settings) -> None:
    """Refuses values that cannot work."""
    width, heads = settings.width, settings.num_heads
    if width % (2 * heads):
        raise ConfigError(
            f"config.num_heads={heads}: config.width={width} must be a multiple of twice as many"
        )
    lengths = tuple(settings.eval_lengths)
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ConfigError(f"config.eval_lengths={lengths}: must rise, such as (32, 64, 128)")


class Translator(Translation, Sharded):
    """A Transformer that translates sentences."""

    unit = "rows"
    declared = {"train": "num_train_rows", "eval": "num_eval_sentences"}
    throughput = ("tokens", "cross_entropy")
    published_vocabulary = VOCABULARY
    advice = {
        "reading": "move the records closer (a bucket of this region, a faster disk), or raise "
        "--config.input_streams",
        "decoding": "use a machine with more CPU cores",
    }

    def __init__(self, settings: Settings, cache_dir: str):
        self.settings, self._cache_dir = settings, cache_dir
        self.targets = (Target("BLEU", settings.target),)

    # Data.

    @functools.cached_property
    def _train(self) -> records.Source:
        return self._open("train", self.settings.train_files, self.settings.row_length)

    @functools.cached_property
    def _eval(self) -> records.Source:
        return self._open("eval", self.settings.eval_files, self.eval_lengths[-1])

    def num_examples(self, split: str) -> int:
        if split == "eval":
            _ = self.references  # they are refused before training, not after it
        return super().num_examples(split)

    def source(self, split: str) -> records.Source:
        return self._train if split == "train" else self._eval

    def _open(self, split: str, patterns: str, length: int) -> records.Source:
        settings = self.settings
        index = f"{self._cache_dir}/{split}.json"
        source = records.open_records(
            settings.data_dir, patterns, index, split, length, self.vocabulary.size
        )
        self.check_declared(split, source.shards)
        return source

    def read_sides(self) -> tuple[np.ndarray, np.ndarray]:
        return input_pipeline.read_sides(self._eval)

    def read_references(self) -> tuple[str, list[str]]:
        settings = self.settings
        path, lines = references.read(settings.data_dir, settings.eval_references)
        count = self._eval.shards.total
        if path and len(lines) != count:
            raise DataError(
                f"{path} has {len(lines):,} lines, and there are {count:,} eval records: each "
                "record needs the line of its reference; see config.eval_references"
            )
        return path, lines

    def nominal_examples(self, split: str) -> int:
        return self.declared_examples(split) or WMT[split]

    def batch_spec(self, split: str, batch_size: int) -> tuple[Spec, ...]:
        def spec(rows: Mapping[str, int], **others: Any) -> Spec:
            shapes = {name: ((batch_size, size), np.int32) for name, size in rows.items()}
            shapes |= {name: ((batch_size,), kind) for name, kind in others.items()}
            return {name: jax.ShapeDtypeStruct(*row) for name, row in shapes.items()}

        settings = self.settings
        if split == "train":
            length: int = settings.row_length
            rows = dict.fromkeys(FEATURES, length)
            return (spec(rows, dropout=np.int32, id=np.int32),)
        sizes = settings.eval_lengths
        return tuple(spec({"inputs": n}, id=np.int32, mask=np.float32) for n in sizes)

    def train_batches(
        self, batch_size: int, shard: int, num_shards: int, start_step: int
    ) -> Iterator[HostBatch]:
        order = self.order(batch_size)
        return input_pipeline.train_batches(self._train, order, shard, num_shards, start_step)

    def host_bytes(
        self, split: str, batch_size: int, num_shards: int
    ) -> dict[tuple[str, ...], int]:
        """Eight batches and, to train, the records that are held for shuffling."""
        length = self.settings.row_length
        if split == "eval":
            return {(): sum(side.nbytes for side in self.sides)}
        batches = 8 * batch_size * length * len(FEATURES) * 4 // num_shards
        held = {("shuffle_buffer_size",): self.held_bytes(num_shards)}
        return {("train_batch_size", "row_length"): batches} | held

    # Forward pass, loss and score.

    @functools.cached_property
    def _model(self) -> models.Transformer:
        settings = self.settings
        return models.Transformer(
            vocab_size=self.vocabulary_size,
            width=settings.width,
            mlp_width=settings.mlp_width,
            heads=settings.num_heads,
            layers=settings.num_layers,
            dropout=settings.dropout,
            remat=settings.remat,
            dtype=_PRECISIONS[settings.precision],
        )

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        length = self.settings.row_length
        rows = {name: jnp.zeros((1, length), jnp.int32) for name in FEATURES}
        return self._model.init(rng, rows, None)["params"], {}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], rng: jax.Array
    ) -> tuple[Terms, Terms, Any]:
        """Smoothed cross-entropy, the mean over the target tokens of all devices.

        `rng` is not used: the batch's leaf "dropout" makes a row's dropout the same on any device.
        """
        del rng
        settings, targets = self.settings, batch["targets"]
        features: Any = self._model.apply({"params": params}, batch, batch["dropout"])
        each = losses.smoothed_cross_entropy(
            features, params["embedding"], targets, self.vocabulary_size, settings.label_smoothing
        )
        real = (targets > 0).astype(each.dtype)
        sums = {"cross_entropy": (jnp.sum(each * real), jnp.sum(real))}
        return sums, sums, model_state

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The best translation of each sentence, int32[b, size + extra_length], zeros behind."""
        del model_state
        settings, inputs = self.settings, batch["inputs"]
        lengths = jnp.sum(inputs > 0, axis=1)
        limit = jnp.where(lengths > 0, lengths + settings.extra_length, 0)
        beams, length = settings.beam_size, inputs.shape[1] + settings.extra_length
        run = functools.partial(self._model.apply, {"params": params})
        memory: Any = run(inputs, method="encode")
        sequences, _ = search.beam_search(
            functools.partial(run, memory=memory, method="step"),
            self._model.start(memory, beams, length),
            limit,
            beams=beams,
            alpha=settings.length_penalty,
            length=length,
            vocab_size=self.vocabulary_size,
        )
        return {"id": batch["id"], "tokens": sequences[:, 0]}
