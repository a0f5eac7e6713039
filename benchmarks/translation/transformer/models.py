"""The Transformer (Vaswani et al. 2017, arXiv:1706.03762) as MLPerf trains it, and as Marian does.

Each layer is x + dropout(f(norm(x))) (pre-norm), with a norm after the last one of a stack; in the
variant of Marian it is norm(x + dropout(f(x))) (post-norm). The embeddings are tied: one table
embeds the source and the target and gives the logits. Rows may hold several sentences, one after
the other ("packed"); no sentence sees another one.

Letters in shapes: b rows, L tokens of a row, S source tokens, T target tokens, k beams. Parameters
are float32; products are in the compute dtype, norms and softmax in float32.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.translation.losses import MASKED_LOGIT
from benchmarks.translation.reductions import dot
from benchmarks.translation.transformer import losses
from benchmarks.translation.transformer.attention import attend
from common.hashing import dropout
from common.layers.convolutions import device_kind

_TILE = 128  # the table has a multiple of it as rows: that fills the TPU's matrix unit
_ENCODER, _DECODER = 0, 1000  # the first number of the dropouts of a stack

Cache = dict[str, dict[str, jax.Array]]


class Variant(NamedTuple):
    """What programs that train Transformers do in different ways."""

    post_norm: bool  # norm(x + f(x)) instead of x + f(norm(x))
    has_biases: bool  # of attention and of the logits
    ends_at_slowest: bool  # whether the last frequency of the positions is 1/10000
    epsilon: float  # added to the norms' variance


VARIANTS = {
    "tensor2tensor": Variant(False, False, True, 1e-6),
    # Junczys-Dowmunt et al. 2018, arXiv:1804.00344; the models of OPUS-MT.
    "marian": Variant(True, True, False, 1e-5),
}
ACTIVATIONS: Any = {"relu": nn.relu, "swish": nn.swish, "gelu": partial(nn.gelu, approximate=False)}


class Memory(NamedTuple):
    """The encoder's result for decoding; nothing in it has an axis of beams.

    `keys` and `values` [b, heads, head, S] by layer, in the compute dtype; `mask` bool[b, S].
    """

    keys: dict[str, jax.Array]
    values: dict[str, jax.Array]
    mask: jax.Array


def positional_encoding(length: int, width: int, ends_at_slowest: bool = True) -> np.ndarray:
    """Sinusoids float32[length, width]: sin(p w) of all frequencies, then cos(p w).

    The frequencies are w_i = 10000^(-i / (width / 2 - 1)), from 1 to 1/10000 (Vaswani et al. 2017,
    section 3.5, as tensor2tensor lays them out), or 10000^(-i / (width / 2)), as in the paper.
    """
    half = width // 2
    frequency = 10000.0 ** (-np.arange(half) / max(half - ends_at_slowest, 1))
    angle = np.arange(length)[:, None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], 1).astype(np.float32)


def shift_right(targets: jax.Array, position: jax.Array) -> jax.Array:
    """The decoder's input int32[b, L] (teacher forcing): the token before; 0 starts a sentence."""
    before = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where(position == 0, 0, before)


def attention_mask(queries: jax.Array, keys: jax.Array, causal: bool) -> jax.Array:
    """bool[b, Lq, Lk]: the keys that a query sees, by segment numbers int32[b, L]; 0 is padding."""
    same = (queries[:, :, None] == keys[:, None, :]) & (keys[:, None, :] > 0)
    return same & np.tri(*same.shape[1:], dtype=bool) if causal else same


def _xavier(parts: int) -> Any:
    """Xavier's initializer for `parts` kernels [n, m] side by side: float32[n, parts * m]."""
    init = nn.initializers.xavier_uniform()

    def make(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
        part = shape[0], shape[1] // parts
        return jnp.concatenate([init(k, part, dtype) for k in jax.random.split(key, parts)], 1)

    return make


class Projections(nn.Module):
    """Dense layers side by side, such as q, k, v: one kernel [width, parts * width] for all."""

    parts: int
    width: int
    dtype: Any
    has_bias: bool

    def setup(self):
        shape = self.width, self.parts * self.width
        self.kernel = self.param("kernel", _xavier(self.parts), shape, jnp.float32)
        if self.has_bias:
            self.bias = self.param("bias", nn.initializers.zeros_init(), shape[1:], jnp.float32)

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """The products [..., width] of x [..., width]."""
        y = dot(x.astype(self.dtype), self.kernel.astype(self.dtype))
        return jnp.split(self._biased(y), self.parts, -1)

    def transposed(self, x: jax.Array) -> list[jax.Array]:
        """The products [b, width, L] of x [b, L, width]."""
        operands = x.astype(self.dtype), self.kernel.astype(self.dtype)
        y = jnp.einsum("bld,de->bel", *operands)
        return jnp.split(self._biased(y, tokens_last=True), self.parts, 1)

    def from_transposed(self, x: jax.Array) -> jax.Array:
        """The product [b, L, width] of x [b, width, L]; for one part."""
        operands = x.astype(self.dtype), self.kernel.astype(self.dtype)
        return self._biased(jnp.einsum("bel,ed->bld", *operands))

    def _biased(self, y: jax.Array, tokens_last: bool = False) -> jax.Array:
        if not self.has_bias:
            return y
        bias = self.bias.astype(self.dtype)
        return y + (bias[:, None] if tokens_last else bias)


class MultiHeadAttention(nn.Module):
    """Multi-head attention.

    The queries, keys and values of a self-attention are one product. With `cross`, keys and values
    are one product of the encoder's features.
    """

    heads: int
    rate: float
    dtype: Any
    width: int
    has_biases: bool = False
    cross: bool = False

    def setup(self):
        projections = partial(
            Projections, width=self.width, dtype=self.dtype, has_bias=self.has_biases
        )
        if self.cross:
            self.query, self.key_value = projections(1), projections(2)
        else:
            self.query_key_value = projections(3)
        self.out = projections(1)

    def _tokens_last(self, parts: list[jax.Array]) -> list[jax.Array]:
        """[b, heads, head, L] of [b, width, L]."""
        return [y.reshape(len(y), self.heads, -1, y.shape[-1]) for y in parts]

    def _heads_last(self, parts: list[jax.Array]) -> list[jax.Array]:
        """[b, k, heads, head] of [b, k, width]."""
        return [y.reshape(*y.shape[:-1], self.heads, -1) for y in parts]

    def project(self, features: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys and values [b, heads, head, S] of the encoder's features [b, S, width]."""
        keys, values = self._tokens_last(self.key_value.transposed(features))
        return keys, values

    def __call__(
        self, x: jax.Array, features: jax.Array | None, mask: jax.Array, seeds: Any, site: int
    ) -> jax.Array:
        """Returns [b, Lq, width] for x [b, Lq, width] and mask bool[b, Lq, Lk].

        `features` [b, Lk, width] are the encoder's, or None. `site` is the number of the dropout.
        """
        tokens_last = device_kind() != "cpu"

        def heads(projections: Projections, x: jax.Array) -> list[jax.Array]:
            if tokens_last:
                return self._tokens_last(projections.transposed(x))
            return [jnp.swapaxes(y, 1, 2) for y in self._heads_last(projections(x))]

        if features is None:
            query, key, value = heads(self.query_key_value, x)
        else:
            (query,), (key, value) = heads(self.query, x), heads(self.key_value, features)
        query = _scaled(query, self.width // self.heads)
        context = attend(query, key, value, mask, (self.rate, seeds, site), tokens_last)
        if tokens_last:
            return self.out.from_transposed(context.reshape(len(x), self.width, -1))
        return self.out(jnp.swapaxes(context, 1, 2).reshape(x.shape))[0]

    def step(self, x: jax.Array, position: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Self-attention of one token [b, k, width] at `position` int32[] to the tokens up to it.

        `cache` has {"keys", "values"} [b, k, T, heads, head] of the tokens before; it is returned
        beside the result [b, k, width] with this token's key and value.
        """
        query, key, value = self._heads_last(self.query_key_value(x))
        update = partial(jax.lax.dynamic_update_index_in_dim, index=position, axis=2)
        cache = {"keys": update(cache["keys"], key), "values": update(cache["values"], value)}
        scores = jnp.einsum("bkhd,bkthd->bkht", _scaled(query, query.shape[-1]), cache["keys"])
        past = jnp.arange(scores.shape[-1]) <= position
        probabilities = _softmax(scores, past).astype(self.dtype)
        context = jnp.einsum("bkht,bkthd->bkhd", probabilities, cache["values"])
        return self.out(context.reshape(x.shape))[0], cache

    def cross_step(self, x: jax.Array, keys: Any, values: Any, mask: jax.Array) -> jax.Array:
        """Attention of one token of each beam [b, k, width] to keys and values [b, heads, head, S].

        `mask` is bool[b, S].
        """
        (query,) = self._heads_last(self.query(x))
        scores = jnp.einsum("bkhd,bhds->bhks", _scaled(query, query.shape[-1]), keys)
        probabilities = _softmax(scores, mask[:, None, None]).astype(self.dtype)
        context = jnp.einsum("bhks,bhds->bkhd", probabilities, values)
        return self.out(context.reshape(x.shape))[0]


def _scaled(query: jax.Array, head: int) -> jax.Array:
    return query * jnp.asarray(1 / math.sqrt(head), query.dtype)


def _softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax in float32 over the keys that `mask` shows; uniform where it shows none."""
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    return jax.nn.softmax(jnp.where(mask, scores, MASKED_LOGIT), -1)


class FeedForward(nn.Module):
    """The feed-forward sub-layer (MLP): two dense layers with biases around an activation."""

    hidden: int
    rate: float
    dtype: Any
    activation: str

    @nn.compact
    def __call__(self, x: jax.Array, seeds: Any, site: int) -> jax.Array:
        init = nn.initializers.xavier_uniform()
        dense: Any = partial(nn.Dense, dtype=self.dtype, kernel_init=init, dot_general=dot)
        y = ACTIVATIONS[self.activation](dense(self.hidden, name="in")(x))
        y = dropout(y, self.rate, seeds, site)
        return dense(x.shape[-1], name="out")(y)


class Layer(nn.Module):
    """A layer of the encoder, or with `cross` of the decoder; it numbers up to six dropouts."""

    heads: int
    mlp_width: int
    rate: float
    dtype: Any
    width: int
    variant: Variant
    activation: str
    cross: bool

    def setup(self):
        attention = partial(
            MultiHeadAttention,
            self.heads,
            self.rate,
            self.dtype,
            self.width,
            self.variant.has_biases,
        )
        norm = partial(nn.LayerNorm, epsilon=self.variant.epsilon, dtype=self.dtype)
        self.attention, self.attention_norm = attention(), norm()
        if self.cross:
            self.cross_attention, self.cross_norm = attention(cross=True), norm()
        self.mlp = FeedForward(self.mlp_width, self.rate, self.dtype, self.activation)
        self.mlp_norm = norm()

    def _add(self, x: jax.Array, sublayer: Any, norm: Any) -> jax.Array:
        """The residual connection around `sublayer`, with its norm before or after it."""
        if self.variant.post_norm:
            return norm(x + sublayer(x))
        return x + sublayer(norm(x))

    def __call__(
        self, x: jax.Array, memory: jax.Array | None, masks: Any, seeds: Any, site: int
    ) -> jax.Array:
        """Returns [b, L, width]; `masks` are for the self-attention and the cross-attention."""

        def dropped(y: jax.Array, number: int) -> jax.Array:
            return dropout(y, self.rate, seeds, site + number)

        def attend(x: jax.Array) -> jax.Array:
            return dropped(self.attention(x, None, self_mask, seeds, site), 1)

        def attend_memory(x: jax.Array) -> jax.Array:
            return dropped(self.cross_attention(x, memory, cross_mask, seeds, site + 2), 3)

        self_mask, cross_mask = masks
        x = self._add(x, attend, self.attention_norm)
        if memory is not None:
            x = self._add(x, attend_memory, self.cross_norm)
        return self._add(x, lambda x: dropped(self.mlp(x, seeds, site + 4), 5), self.mlp_norm)

    def step(
        self, x: jax.Array, position: jax.Array, cache: Any, cross: tuple[Any, Any, Any]
    ) -> tuple[jax.Array, Any]:
        """One token of each beam [b, k, width]; `cross` is keys, values and their mask."""
        caches = []

        def attend(x: jax.Array) -> jax.Array:
            y, updated = self.attention.step(x, position, cache)
            caches.append(updated)
            return y

        x = self._add(x, attend, self.attention_norm)
        x = self._add(x, lambda x: self.cross_attention.cross_step(x, *cross), self.cross_norm)
        return self._add(x, lambda x: self.mlp(x, None, 0), self.mlp_norm), caches[0]


class Transformer(nn.Module):
    """Encoder and decoder with tied embeddings, wired as the module's docstring says."""

    # Words, PAD (0) and EOS (1) included. The table has rows up to the next multiple of 128, which
    # are no words.
    vocab_size: int
    width: int = 1024  # the features' width; even, and a multiple of `heads`
    mlp_width: int = 4096  # the width of each layer's hidden layer
    heads: int = 16  # heads of each attention
    layers: int = 6  # layers of each stack
    # The probability of 0 in the embeddings, every sub-layer's result, the attention's
    # probabilities, and the hidden layers.
    dropout: float = 0.1
    variant: Variant = VARIANTS["tensor2tensor"]
    activation: str = "relu"  # between the dense layers of each hidden layer
    remat: bool = False  # whether the backward pass computes each layer again, to save memory
    dtype: Any = jnp.bfloat16  # the dtype of products and activations

    def setup(self):
        shape = -(-self.vocab_size // _TILE) * _TILE, self.width
        init = nn.initializers.normal(self.width**-0.5)
        self.embedding = self.param("embedding", init, shape, jnp.float32)
        if self.variant.has_biases:
            zeros = nn.initializers.zeros_init()
            self.logits_bias = self.param("logits_bias", zeros, shape[:1], jnp.float32)
        layer: Any = nn.remat(Layer, static_argnums=(5,)) if self.remat else Layer
        layer = partial(
            layer,
            self.heads,
            self.mlp_width,
            self.dropout,
            self.dtype,
            self.width,
            self.variant,
            self.activation,
        )
        self.encoder = [layer(cross=False) for _ in range(self.layers)]
        self.decoder = [layer(cross=True) for _ in range(self.layers)]
        if self.variant.post_norm:
            self.encoder_norm = self.decoder_norm = lambda x: x  # each layer ends with one
        else:
            norm = partial(nn.LayerNorm, epsilon=self.variant.epsilon, dtype=self.dtype)
            self.encoder_norm, self.decoder_norm = norm(), norm()

    def __call__(self, rows: Mapping[str, jax.Array], seeds: jax.Array | None) -> jax.Array:
        """The decoder's features [b, L, width], from which `losses` computes logits.

        Args:
          rows: "inputs" and "targets", their "_segmentation" (from 1; 0 is padding) and their
            "_position" (from 0 in each segment), int32[b, L].
          seeds: int32[b], from which the dropout of each row is drawn; None for no dropout.
        """
        source, target = rows["inputs_segmentation"], rows["targets_segmentation"]
        memory = self._encode(rows["inputs"], rows["inputs_position"], source, seeds)
        ids = shift_right(rows["targets"], rows["targets_position"])
        x = self._embed(ids, rows["targets_position"])
        x = dropout(x, self.dropout, seeds, _DECODER)
        own_mask = attention_mask(target, target, causal=True)
        masks = own_mask, attention_mask(target, source, causal=False)
        for i, layer in enumerate(self.decoder):
            x = layer(x, memory, masks, seeds, _DECODER + 10 * (i + 1))
        return self.decoder_norm(x)

    def _encode(
        self, ids: jax.Array, position: jax.Array, segments: jax.Array, seeds: Any
    ) -> jax.Array:
        x = dropout(self._embed(ids, position), self.dropout, seeds, _ENCODER)
        masks = attention_mask(segments, segments, causal=False), None
        for i, layer in enumerate(self.encoder):
            x = layer(x, None, masks, seeds, _ENCODER + 10 * (i + 1))
        return self.encoder_norm(x)

    def _embed(self, ids: jax.Array, position: jax.Array) -> jax.Array:
        """[b, L, width]: sqrt(width) times the rows of the table, plus the positions."""
        table = self._positions(ids.shape[1])
        return (self._words(ids) + table[position]).astype(self.dtype)

    def _words(self, ids: jax.Array) -> jax.Array:
        return self.embedding[ids] * math.sqrt(self.width)

    def _positions(self, length: int) -> jax.Array:
        return jnp.asarray(positional_encoding(length, self.width, self.variant.ends_at_slowest))

    def encode(self, inputs: jax.Array) -> Memory:
        """Encodes one sentence in each row, int32[b, S] padded with zeros, for `step`."""
        position = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        segments = (inputs > 0).astype(jnp.int32)
        features = self._encode(inputs, position, segments, None)
        keys, values = {}, {}
        for name, layer in zip(_names(self.layers), self.decoder, strict=True):
            keys[name], values[name] = layer.cross_attention.project(features)
        return Memory(keys, values, segments > 0)

    def init_cache(self, memory: Memory, beams: int, steps: int) -> Cache:
        """The empty KV cache (keys and values) for `steps` tokens; leaves are [b, beams, ...]."""
        shape = len(memory.mask), beams, steps, self.heads, self.width // self.heads
        zeros = jnp.zeros(shape, self.dtype)
        return {name: {"keys": zeros, "values": zeros} for name in _names(self.layers)}

    def step(
        self, ids: jax.Array, position: jax.Array, cache: Cache, memory: Memory
    ) -> tuple[jax.Array, Cache]:
        """The logits float32[b, k, V] after one more token of each beam, and the cache.

        `ids` int32[b, k] are the tokens before `position` int32[]; 0 at position 0. V is the size
        of the table; the logits of rows that are no words are -1e9.
        """
        steps = cache[_names(1)[0]]["keys"].shape[2]
        table = self._positions(steps)
        x = self._words(ids) + table[position]
        x, new = x.astype(self.dtype), {}
        for name, layer in zip(_names(self.layers), self.decoder, strict=True):
            cross = memory.keys[name], memory.values[name], memory.mask
            x, new[name] = layer.step(x, position, cache[name], cross)
        bias = self.logits_bias if self.variant.has_biases else None
        return losses.logits(self.decoder_norm(x), self.embedding, self.vocab_size, bias), new


def _names(layers: int) -> list[str]:
    return [f"layer_{i}" for i in range(layers)]
