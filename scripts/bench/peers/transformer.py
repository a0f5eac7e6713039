"""The step of flax's wmt example: a Transformer of plain layers on packed rows, Adam, bfloat16.

Rewritten after the example's definition (google/flax, examples/wmt, 2024), at our model's sizes:
one table embeds both languages and gives the logits, layers normalise first, dropout masks are
drawn by "rbg". Unlike in our model, a sentence that is not the first of its row sees the last token
of the sentence before as its start.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.base import Spec
from benchmarks.translation import transformer
from benchmarks.translation.schema import FEATURES
from benchmarks.translation.transformer.models import positional_encoding
from scripts.bench.peers import Peer


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder where `memory` is given."""

    heads: int
    hidden: int
    rate: float
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None,
        self_mask: jax.Array,
        cross_mask: jax.Array | None,
    ) -> jax.Array:
        init = nn.initializers.xavier_uniform()
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        drop = partial(nn.Dropout, self.rate, deterministic=False)
        attention = partial(
            nn.MultiHeadDotProductAttention,
            num_heads=self.heads,
            dtype=self.dtype,
            kernel_init=init,
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=self.rate,
            deterministic=False,
        )
        y = attention(name="attention")(norm(name="attention_norm")(x), mask=self_mask)
        x = x + drop()(y)
        if memory is not None:
            y = norm(name="cross_norm")(x)
            x = x + drop()(attention(name="cross_attention")(y, memory, mask=cross_mask))
        dense = partial(nn.Dense, dtype=self.dtype, kernel_init=init)
        y = dense(self.hidden, name="in")(norm(name="mlp_norm")(x))
        y = dense(x.shape[-1], name="out")(drop()(nn.relu(y)))
        return x + drop()(y)


class Transformer(nn.Module):
    """Logits float32[b, L, words] of packed rows."""

    words: int
    width: int
    layers: int
    rate: float
    dtype: Any
    layer: Any  # a `Layer` without its name

    @nn.compact
    def __call__(self, rows: Mapping[str, jax.Array]) -> jax.Array:
        init = nn.initializers.normal(1.0)
        table = nn.Embed(self.words, self.width, embedding_init=init, name="embedding")
        drop = partial(nn.Dropout, self.rate, deterministic=False)
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        mask = partial(nn.make_attention_mask, dtype=self.dtype)

        def embedded(ids: jax.Array, positions: jax.Array) -> jax.Array:
            waves = jnp.asarray(positional_encoding(ids.shape[1], self.width))
            return drop()(table(ids) + waves[positions]).astype(self.dtype)

        def seen(queries: str, keys: str) -> Any:
            real = mask(rows[queries] > 0, rows[keys] > 0)
            first, second = rows[f"{queries}_segmentation"], rows[f"{keys}_segmentation"]
            return nn.combine_masks(real, mask(first, second, jnp.equal), dtype=self.dtype)

        x = embedded(rows["inputs"], rows["inputs_position"])
        self_mask: Any = seen("inputs", "inputs")
        for i in range(self.layers):
            x = self.layer(name=f"encoder_{i}")(x, None, self_mask, None)
        memory = norm(name="encoder_norm")(x)
        before = jnp.pad(rows["targets"], ((0, 0), (1, 0)))[:, :-1]
        x = embedded(before, rows["targets_position"])
        causal = nn.make_causal_mask(rows["targets"], dtype=self.dtype)
        self_mask = nn.combine_masks(seen("targets", "targets"), causal, dtype=self.dtype)
        for i in range(self.layers):
            x = self.layer(name=f"decoder_{i}")(x, memory, self_mask, seen("targets", "inputs"))
        x = norm(name="decoder_norm")(x)
        return table.attend(x.astype(jnp.float32)) / math.sqrt(self.width)


def smoothed(logits: jax.Array, targets: jax.Array, smoothing: float) -> jax.Array:
    """The loss of each token, [b, L], minus the loss of a perfect model."""
    words = logits.shape[-1]
    high, low = 1 - smoothing, smoothing / (words - 1)
    perfect = -(high * math.log(high) + (words - 1) * low * math.log(low + 1e-20))
    labels = jnp.where(jax.nn.one_hot(targets, words, dtype=jnp.bool_), high, low)
    return -jnp.sum(labels * jax.nn.log_softmax(logits), -1) - perfect


def make(benchmark: transformer.Transformer, freeze: str) -> Peer:
    """The peer of a benchmark."""
    settings, words = benchmark.settings, benchmark.vocabulary_size
    sizes = settings.num_heads, settings.mlp_width
    layer = partial(Layer, *sizes, settings.dropout, settings.dtype)
    network = Transformer(
        words, settings.width, settings.num_layers, settings.dropout, settings.dtype, layer
    )

    def init(key: jax.Array) -> tuple[Any, Any]:
        rows = {name: jnp.zeros((1, settings.row_length), jnp.int32) for name in FEATURES}
        return network.init({"params": key, "dropout": key}, rows)["params"], {}

    def loss(params: Any, state: Any, batch: Mapping[str, jax.Array], key: jax.Array) -> Any:
        logits: Any = network.apply({"params": params}, batch, rngs={"dropout": key})
        targets = batch["targets"]
        real = (targets > 0).astype(jnp.float32)
        losses = smoothed(logits, targets, settings.label_smoothing)
        correct = jnp.sum((jnp.argmax(logits, -1) == targets) * real)
        metrics = {"correct": correct, "tokens": jnp.sum(real)}
        return jnp.sum(losses * real) / jnp.sum(real), (metrics, state)

    def specs(batch_size: int) -> tuple[Spec, ...]:
        shape = batch_size, settings.row_length
        return ({name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in FEATURES},)

    rate = optax.linear_schedule(0.0, 1e-3, 1107)
    optimizer = optax.adam(rate, b1=0.9, b2=0.98, eps=1e-9)
    return Peer(init, loss, optimizer, specs)
