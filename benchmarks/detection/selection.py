"""Top-k of many numbers without sorting them, by radix select.

XLA turns a top-k with a large k into a full sort, which TPUs do slowly. A radix select finds the
k-th largest number digit by digit, from the highest to the lowest. Each pass over the numbers
counts how many are at least as large as the prefix so far and each possible next digit.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

_DIGIT = 3  # bits that a pass finds; a fourth one would more than double its comparisons
_LINE = 512  # positions that are counted together


def largest(values: jax.Array, eligible: jax.Array, k: jax.typing.ArrayLike) -> jax.Array:
    """The mask of the k largest eligible numbers of each row; of equal ones, the lower indices.

    With random integers as values, it draws k random eligible positions.

    Args:
        values: f32[..., n] or int32[..., n], >= 0. NaN counts as larger than any other number.
        eligible: bool[..., n].
        k: int32[...].

    Returns:
        bool[..., n] with min(k, number of eligible) True values per row.
    """
    k = jnp.asarray(k)
    keys = jnp.where(eligible, _ordered(values), -1)
    return _largest(keys, k, 31) & (k > 0)[..., None]


@partial(jax.jit, static_argnames="k", inline=True)  # traced once for all images of a shape
def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of f32[b, n], faster for a large k: only the k largest numbers are sorted.

    Returns (values f32[b, k], the largest first, index int32[b, k]); of equal values, the one of
    the lower index comes first. -0.0 is below 0.0; nan is not allowed.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # in the order of x
    index, _ = compact(_largest(keys, jnp.int32(k), 32), k)
    values, order = lax.top_k(jnp.take_along_axis(x, index, 1), k)
    return values, jnp.take_along_axis(index, order, 1)


def compact(mask: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The first positions of each row where a mask is True (nonzero), in their order.

    Nothing is sorted. Positions are cut into lines; the cumulative counts of the lines tell which
    line has the r-th True value, and the counts within this line give its position.

    `mask` is bool[b, N]. Returns (index int32[b, count], valid bool[b, count]); beyond a row's True
    values, `valid` is False and `index` 0.
    """
    lines = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % _LINE))).reshape(len(mask), -1, _LINE)
    until = jnp.cumsum(jnp.sum(lines, 2, dtype=jnp.int32), 1)  # [b, lines]
    ranks = jnp.arange(1, count + 1, dtype=jnp.int32)
    line = jnp.sum(until[:, None] < ranks[:, None], 2, dtype=jnp.int32)  # [b, count]
    valid = ranks <= until[:, -1:]
    line = jnp.where(valid, line, 0)
    before = jnp.where(line > 0, take(until, line - 1), 0)
    within = jnp.cumsum(take(lines, line), 2, dtype=jnp.int32)  # [b, count, _LINE]
    column = jnp.sum(within < (ranks - before)[..., None], 2, dtype=jnp.int32)
    return jnp.where(valid, line * _LINE + column, 0), valid


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[i, index[i]]` for each i: [b, n, ...] and int32[b, k] to [b, k, ...]."""
    return jax.vmap(lambda values, index: values[index])(values, index)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 keys in the order of the numbers >= 0 in `x`; integers stay as they are.

    float64 numbers are rounded to float32.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.int32)  # -0.0 as 0.0


def _largest(keys: jax.Array, k: jax.Array, bits: int) -> jax.Array:
    """The mask of the k largest integers in [..., n], or of all that are >= 0 if they are fewer."""
    kth = _kth_largest(keys, k, bits)[..., None]
    above, level = keys > kth, keys == kth
    # The first numbers that equal the k-th largest fill up what is missing.
    from_end = keys.shape[-1] - jnp.arange(keys.shape[-1], dtype=jnp.int32)
    missing = k - jnp.sum(above, -1, dtype=jnp.int32)
    ranked = jnp.where(level, from_end, 0)
    last = _kth_largest(ranked, missing, keys.shape[-1].bit_length())[..., None]
    return above | (level & (from_end >= last))


def _kth_largest(keys: jax.Array, k: jax.Array, bits: int) -> jax.Array:
    """The k-th largest of integers [..., n] from 0 to 2**bits - 1; 0 where there are fewer."""
    rounds = -(-bits // _DIGIT)

    def next_digit(i: jax.Array, prefix: jax.Array) -> jax.Array:
        shift = (_DIGIT * (rounds - 1 - i)).astype(keys.dtype)
        digit = jnp.zeros_like(prefix)
        for candidate in range(1, 2**_DIGIT):  # one pass counts for all of them
            at_least = prefix | (jnp.asarray(candidate, keys.dtype) << shift)
            count = jnp.sum(keys >= at_least[..., None], -1, dtype=jnp.int32)
            is_within = candidate >> (bits - shift) == 0
            digit += ((count >= k) & is_within).astype(keys.dtype)
        return prefix | (digit << shift)

    shape = jnp.broadcast_shapes(keys.shape[:-1], k.shape)
    return lax.fori_loop(0, rounds, next_digit, jnp.zeros(shape, keys.dtype))
