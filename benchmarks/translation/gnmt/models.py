"""GNMT's LSTMs and Bahdanau attention (Wu et al. 2016, arXiv:1609.08144), as MLPerf wires them.

The encoder's layer 0 reads a sentence in both directions. Layers from 2 on add their input to their
output, in both stacks. The decoder's layer 0 sees only the words; its outputs are the attention's
queries, and all further layers get the same context with their input. So only the LSTMs run step by
step in training.

Letters in shapes: b rows, S source positions, T target positions, k beams, H width, V words.
Sequences are [positions, b, ...] inside. Parameters are float32; products are in the compute dtype;
cells, the attention's tanh and softmax are in float32.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.translation import losses
from benchmarks.translation.gnmt.lstm import cell, lstm
from benchmarks.translation.reductions import dot
from common.hashing import dropout

_TILE = 128  # the tables have a multiple of it as words: that fills the TPU's matrix unit
_UNROLLED = 4  # targets whose tanh are made in one pass: fewer passes over the sums
_ENCODER, _DECODER = 0, 1000  # the number of the dropout before layer 0 of a stack

Cache = dict[str, dict[str, jax.Array]]


class Memory(NamedTuple):
    """The encoder's result: `keys` and `values` [b, S, H], `mask` bool[b, S].

    The keys are the attention's projection Wk of the values, which is computed once.
    """

    keys: jax.Array
    values: jax.Array
    mask: jax.Array


def _symmetric(scale: float) -> Any:
    """An initializer: uniform between -scale and scale."""

    def make(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -scale, scale)

    return make


class LSTM(nn.Module):
    """A layer of one LSTM, or of two with the same inputs that read in opposite directions.

    Direction 0 reads from the first position, direction 1 from the last.
    """

    inputs: int
    width: int
    init_scale: float
    dtype: Any
    directions: int = 1

    def setup(self):
        init, gates = _symmetric(self.init_scale), 4 * self.width
        self.kernel = self.param("kernel", init, (self.directions, self.inputs, gates))
        self.recurrent_kernel = self.param(
            "recurrent_kernel", init, (self.directions, self.width, gates)
        )
        self.bias = self.param("bias", init, (self.directions, gates))

    def _products(self, x: jax.Array, direction: int = 0) -> jax.Array:
        return dot(x, self.kernel[direction].astype(self.dtype))

    def __call__(self, x: jax.Array, direction: int = 0, **options: Any) -> jax.Array:
        """The outputs [T, b, H] of one LSTM for inputs [T, b, n]; `options` go to `lstm`."""
        recurrent, bias = self.recurrent_kernel[direction], self.bias[direction]
        return lstm(self._products(x, direction), recurrent, bias, **options)

    def bidirectional(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """The outputs of two directions side by side, [S, b, 2H] for inputs [S, b, n].

        Positions after a sentence, where `mask` bool[S, b] is False, have outputs of 0.
        """
        sides = [self(x, turned, mask=mask, reverse=bool(turned)) for turned in range(2)]
        return jnp.concatenate(sides, -1)

    def step(self, x: jax.Array, cache: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        """The outputs [..., H] of one step with inputs [..., n], and the cache after it."""
        recurrent = self.recurrent_kernel[0].astype(self.dtype)
        product = jnp.dot(cache["h"], recurrent, preferred_element_type=cache["c"].dtype)
        h, c = cell(self._products(x) + (product + self.bias[0]), cache["c"])
        h = h.astype(self.dtype)
        return h, {"h": h, "c": c}


class BahdanauAttention(nn.Module):
    """Normalised additive (Bahdanau) attention: a score is (g v / |v|) . tanh(Wq q + Wk k + b).

    Source: Bahdanau et al. 2014, arXiv:1409.0473; Salimans and Kingma 2016, arXiv:1602.07868.
    """

    width: int
    init_scale: float
    initial_gain: float
    dtype: Any

    def setup(self):
        init, options = _symmetric(self.init_scale), {"dtype": self.dtype, "dot_general": dot}
        dense: Any = partial(nn.Dense, self.width, **options)
        self.query, self.key = (dense(use_bias=False, kernel_init=init) for _ in range(2))
        self.direction = self.param("direction", init, (self.width,))
        self.gain = self.param("gain", lambda _: jnp.float32(self.initial_gain))
        self.bias = self.param("bias", nn.initializers.zeros, (self.width,))

    def __call__(self, query: jax.Array, memory: Memory) -> tuple[jax.Array, jax.Array]:
        """Attends with queries [T, b, H], the outputs of the decoder's layer 0.

        Returns the context [T, b, H] in the compute dtype, and the probabilities float32[T, b, S],
        which are uniform where the mask shows nothing.
        """
        direction = self.gain * self.direction / jnp.linalg.norm(self.direction)
        scores = _scores(self.query(query), memory.keys, direction, self.bias)
        probabilities = jax.nn.softmax(jnp.where(memory.mask, scores, losses.MASKED_LOGIT), -1)
        context = jnp.einsum("tbs,bsh->tbh", probabilities.astype(self.dtype), memory.values)
        return context, probabilities


@jax.custom_vjp
def _scores(query: jax.Array, keys: jax.Array, direction: jax.Array, bias: jax.Array) -> jax.Array:
    """float32[T, b, S] of query [T, b, H] and keys [b, S, H]; float64 stays float64.

    The tanh of all pairs is by far the largest array. The backward pass recomputes it once, for a
    few targets at a time: all gradients are sums of it over different axes, and XLA would recompute
    it for each of them.
    """

    def score(_: None, query: jax.Array) -> tuple[None, jax.Array]:
        return None, jnp.sum(_tanh(query, keys, bias) * direction, -1)

    return jax.lax.scan(score, None, query, unroll=_UNROLLED)[1]


def _scores_forward(*saved: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _scores(*saved), saved


def _scores_backward(saved: tuple[jax.Array, ...], gradients: jax.Array) -> tuple[jax.Array, ...]:
    query, keys, direction, bias = saved

    def add(sums: Any, part: Any) -> Any:
        (of_keys, of_direction), (query, gradients) = sums, part
        tanh, gradients = _tanh(query, keys, bias), gradients[..., None]
        of_sum = gradients * (1 - tanh**2)  # by tanh's argument, but for the direction
        of_query = (jnp.sum(of_sum, 1) * direction).astype(query.dtype)
        return (of_keys + of_sum, of_direction + jnp.sum(gradients * tanh, 1)), of_query

    start = jnp.zeros(keys.shape, gradients.dtype), jnp.zeros(query.shape[1:], gradients.dtype)
    sums, of_query = jax.lax.scan(add, start, (query, gradients), unroll=_UNROLLED)
    of_keys, of_direction = sums[0] * direction, jnp.sum(sums[1], 0)
    return of_query, of_keys.astype(keys.dtype), of_direction, jnp.sum(of_keys, (0, 1))


_scores.defvjp(_scores_forward, _scores_backward)


def _tanh(query: jax.Array, keys: jax.Array, bias: jax.Array) -> jax.Array:
    """[b, S, H] of one target's query [b, H]."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.tanh(query.astype(dtype)[:, None] + (keys.astype(dtype) + bias))


class GNMT(nn.Module):
    """Encoder, decoder and classifier, wired as the module's docstring says."""

    # V, of both languages together, PAD (0) and EOS (1) included. The table of words and the
    # classifier have more, up to the next multiple of 128, which are no words.
    vocab_size: int
    width: int = 1024  # H
    encoder_layers: int = 4  # at least 2; the first one reads in both directions
    decoder_layers: int = 4  # at least 2
    dropout: float = 0.2  # the probability of 0 in the inputs of each LSTM
    projection_bias: bool = True  # whether the classifier has a bias
    init_scale: float = 0.1  # weights begin uniform in +-init_scale; the attention's bias is 0
    attention_gain: float = 1024**-0.5  # the initial g of the attention
    dtype: Any = jnp.bfloat16  # the dtype of products and activations

    def setup(self):
        init, words = _symmetric(self.init_scale), -(-self.vocab_size // _TILE) * _TILE
        self.embedding = self.param("embedding", init, (words, self.width))
        self.classifier = self.param("classifier", self._make_classifier, init, words)
        layer = partial(LSTM, width=self.width, init_scale=self.init_scale, dtype=self.dtype)
        sizes = [2 * self.width] + [self.width] * (self.encoder_layers - 2)
        self.encoder = [layer(self.width, directions=2), *map(layer, sizes)]
        sizes = [self.width] + [2 * self.width] * (self.decoder_layers - 1)
        self.decoder = [*map(layer, sizes)]
        sizes = self.width, self.init_scale, self.attention_gain
        self.attention = BahdanauAttention(*sizes, self.dtype)

    def _make_classifier(self, key: jax.Array, init: Any, words: int) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        bias = {"bias": init(second, (words,))} if self.projection_bias else {}
        return {"kernel": init(first, (self.width, words)), **bias}

    def __call__(self, batch: Mapping[str, jax.Array], seeds: jax.Array | None) -> jax.Array:
        """The decoder's features [T, b, H], from which `losses` computes logits.

        Args:
          batch: "inputs" int32[b, S] and "targets" int32[b, T], each a sentence with EOS,
            padded with zeros.
          seeds: int32[b], from which the dropout of each row is drawn; None for no dropout. A row
            gets the same masks in any S and T.
        """
        memory = self.encode(batch["inputs"], seeds)
        before = jnp.pad(batch["targets"].T, ((1, 0), (0, 0)))[:-1]
        site = _DECODER
        x = self.decoder[0](self._dropped(self._embed(before), seeds, site))
        context, _ = self.attention(x, memory)
        for i, layer in enumerate(self.decoder[1:], 1):
            y = layer(self._dropped(jnp.concatenate([x, context], -1), seeds, site + i))
            x = x + y if i > 1 else y
        return x

    def encode(self, inputs: jax.Array, seeds: jax.Array | None = None) -> Memory:
        """Encodes sentences int32[b, S] padded with zeros; `seeds` int32[b] are the dropout's."""
        mask = inputs > 0
        x = self._dropped(self._embed(inputs.T), seeds, _ENCODER)
        x = self.encoder[0].bidirectional(x, mask.T)
        for i, layer in enumerate(self.encoder[1:], 1):
            y = layer(self._dropped(x, seeds, _ENCODER + i))
            x = x + y if i > 1 else y
        values = jnp.swapaxes(x, 0, 1)
        return Memory(self.attention.key(values), values, mask)

    def _embed(self, ids: jax.Array) -> jax.Array:
        return self.embedding[ids].astype(self.dtype)

    def _dropped(self, x: jax.Array, seeds: jax.Array | None, site: int) -> jax.Array:
        """Dropout of [positions, b, n]; its keys count the positions of a row."""
        dropped = dropout(jnp.swapaxes(x, 0, 1), self.dropout, seeds, site)
        return jnp.swapaxes(dropped, 0, 1)

    def init_cache(self, rows: int, beams: int) -> Cache:
        """The states before the first word; leaves are [b, k, H], the cells in float32."""
        shape, dtype = (rows, beams, self.width), jnp.promote_types(self.dtype, jnp.float32)
        state = {"h": jnp.zeros(shape, self.dtype), "c": jnp.zeros(shape, dtype)}
        return {f"layer_{i}": state for i in range(self.decoder_layers)}

    def step(
        self, ids: jax.Array, cache: Cache, memory: Memory
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """(logits float32[b, k, Vp], attention float32[b, k, S], cache) after one more token.

        `ids` int32[b, k] are the tokens before; 0 at the start of a sentence. Vp is V rounded up to
        a multiple of 128; the logits of columns that are no words are -1e9. The attention is the
        probabilities of the source positions.
        """
        new = {}
        x, new["layer_0"] = self.decoder[0].step(self._embed(ids), cache["layer_0"])
        context, attention = self.attention(jnp.swapaxes(x, 0, 1), memory)
        context, attention = (jnp.swapaxes(y, 0, 1) for y in (context, attention))
        for i, layer in enumerate(self.decoder[1:], 1):
            name, inputs = f"layer_{i}", jnp.concatenate([x, context], -1)
            y, new[name] = layer.step(inputs, cache[name])
            x = x + y if i > 1 else y
        kernel, bias = self.classifier["kernel"], self.classifier.get("bias")
        return losses.logits(x, kernel, bias, self.vocab_size), attention, new
