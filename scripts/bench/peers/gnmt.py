"""GNMT in its plain form: LSTMs as scans, whose products with the inputs are hoisted out of them.

The gradients are those that jax derives. The logits of all tokens exist at once, and the scores of
the attention are stored. Dropout masks are drawn by "rbg".
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.base import Spec
from benchmarks.translation.gnmt import Gnmt, Settings
from benchmarks.translation.vocabulary import EOS
from scripts.bench.peers import Peer


class LSTM(nn.Module):
    """The outputs [T, b, width] of a layer for inputs [T, b, n]; 0 where `alive` [T, b] is not."""

    width: int
    weights: Any  # their initializer
    dtype: Any
    reverse: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, alive: jax.Array | None = None) -> jax.Array:
        init = self.weights
        dense = nn.Dense(4 * self.width, dtype=self.dtype, kernel_init=init, bias_init=init)
        gates = dense(x)  # the input products of all steps, outside of the loop
        kernel = self.param("recurrent", init, (self.width, 4 * self.width))
        narrow = kernel.astype(self.dtype)

        def step(state: Any, inputs: Any) -> Any:
            (h, c), (gates, is_alive) = state, inputs
            i, f, g, o = jnp.split((gates + h @ narrow).astype(jnp.float32), 4, -1)
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
            h = nn.sigmoid(o) * jnp.tanh(c)
            if is_alive is not None:
                h, c = (jnp.where(is_alive[:, None], y, 0) for y in (h, c))
            h = h.astype(self.dtype)
            return (h, c), h

        zeros = jnp.zeros((x.shape[1], self.width), self.dtype)
        start = zeros, zeros.astype(jnp.float32)
        return jax.lax.scan(step, start, (gates, alive), reverse=self.reverse)[1]


class Attention(nn.Module):
    """The context [T, b, H] of queries [T, b, H]: normalised additive attention."""

    width: int
    weights: Any  # their initializer
    gain: float
    dtype: Any

    @nn.compact
    def __call__(self, query: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
        dense = partial(
            nn.Dense, self.width, use_bias=False, dtype=self.dtype, kernel_init=self.weights
        )
        direction = self.param("direction", self.weights, (self.width,))
        gain = self.param("gain", lambda _: jnp.float32(self.gain))
        bias = self.param("bias", nn.initializers.zeros, (self.width,)).astype(self.dtype)
        direction = (gain * direction / jnp.linalg.norm(direction)).astype(self.dtype)
        inside = dense(name="query")(query)[:, :, None] + (dense(name="key")(values) + bias)
        scores = (jnp.tanh(inside) @ direction).astype(jnp.float32)  # [T, b, S]
        shares = jax.nn.softmax(jnp.where(visible, scores, -1e9), -1).astype(self.dtype)
        return jnp.einsum("tbs,bsh->tbh", shares, values)


class GNMT(nn.Module):
    """Logits float32[T, b, words] for "inputs" [b, S] and "targets" [b, T]."""

    words: int
    settings: Settings

    @nn.compact
    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        keys = self.settings
        scale, dtype, width = keys.init_scale, keys.dtype, keys.width

        def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -scale, scale)

        layer = partial(LSTM, width, init, dtype)
        embed = nn.Embed(self.words, width, embedding_init=init, dtype=dtype, name="embedding")
        drop = partial(nn.Dropout, keys.dropout, deterministic=False)
        visible = batch["inputs"] > 0
        x = drop()(embed(batch["inputs"].T))
        sides = [
            layer(reverse=turned, name=f"encoder_0_{turned:d}")(x, visible.T)
            for turned in (False, True)
        ]
        x = jnp.concatenate(sides, -1)
        for i in range(1, keys.num_encoder_layers):
            y = layer(name=f"encoder_{i}")(drop()(x))
            x = x + y if i > 1 else y
        values = jnp.swapaxes(x, 0, 1)
        before = jnp.pad(batch["targets"].T, ((1, 0), (0, 0)))[:-1]
        x = layer(name="decoder_0")(drop()(embed(before)))
        attention = Attention(width, init, keys.attention_gain, dtype, name="attention")
        context = attention(x, values, visible)
        for i in range(1, keys.num_decoder_layers):
            y = layer(name=f"decoder_{i}")(drop()(jnp.concatenate([x, context], -1)))
            x = x + y if i > 1 else y
        dense = partial(nn.Dense, use_bias=keys.projection_bias, dtype=dtype)
        classifier = dense(self.words, kernel_init=init, bias_init=init, name="classifier")
        return classifier(x).astype(jnp.float32)


def make(benchmark: Gnmt, freeze: str) -> Peer:
    """The peer of a benchmark."""
    settings = benchmark.settings
    network = GNMT(benchmark.vocabulary_size, settings)

    def init(key: jax.Array) -> tuple[Any, Any]:
        rows = {side: jnp.zeros((1, 2), jnp.int32) for side in ("inputs", "targets")}
        return network.init({"params": key, "dropout": key}, rows)["params"], {}

    def loss(params: Any, state: Any, batch: Mapping[str, jax.Array], key: jax.Array) -> Any:
        logits: Any = network.apply({"params": params}, batch, rngs={"dropout": key})
        targets = batch["targets"].T
        real = targets > 0 if settings.counts_eos else targets > EOS
        labels = jax.nn.one_hot(targets, logits.shape[-1])
        labels = optax.smooth_labels(labels, settings.label_smoothing)
        total = jnp.sum(optax.softmax_cross_entropy(logits, labels) * real)
        return total / targets.shape[1], ({"tokens": jnp.sum(real) * 1.0}, state)

    def specs(batch_size: int) -> tuple[Spec, ...]:
        specs = benchmark.batch_spec("train", batch_size)
        return tuple({side: spec[side] for side in ("inputs", "targets")} for spec in specs)

    rate = optax.linear_schedule(0.0, 0.002, 200)
    optimizer = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(rate))
    return Peer(init, loss, optimizer, specs)
