"""Random models for beam searches: the next token depends on a hash of all tokens so far."""

import jax
import jax.numpy as jnp
import numpy as np

T = 5  # positions
PADDED = 8  # logits of the model; the vocabularies are smaller


def following(seen, token):
    """The hash after one more token."""
    return (seen * 5 + token * 7 + 1) % 64


def step(tables, ids, position, cache):
    """The rows of `tables` [b, T, 64, ...] for the tokens so far; the cache is their hash."""
    seen = jnp.where(position > 0, following(cache["seen"], ids), cache["seen"])
    rows = jax.vmap(lambda table, seen: table[position, seen])
    return *(rows(table, seen) for table in tables), {"seen": seen}


def start(rows, beams):
    return {"seen": jnp.zeros((rows, beams), jnp.int32)}


def look_up(table, row, tokens):
    """The same for one table, sentence and beam, in NumPy."""
    seen = 0
    for token in tokens:
        seen = following(seen, token)
    return np.asarray(table)[row, len(tokens), seen]


def log_softmax(logits):
    shifted = (logits - logits.max()).astype(np.float32)
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float32))


def random_logits(draw, rows):
    """From flat to peaked distributions; in every third sentence EOS is improbable."""
    scale = draw.uniform(0.3, 4, (rows, 1, 1, 1))
    logits = draw.normal(0, scale, (rows, T, 64, PADDED)).astype(np.float32)
    logits[::3, :, :, 1] -= 15
    return logits


def tied_logits(rows):
    """Each word is certain or one of m equal ones, so that sums of float32 are exact multiples."""
    draw = np.random.default_rng(3)
    order = np.argsort(draw.random((rows, T, 64, PADDED - 1))) + 1
    choices = draw.choice([2, 3, 4], (rows, 1, 1))
    choices = np.where(draw.random((rows, T, 64)) < 0.3, 1, choices)
    logits = np.full((rows, T, 64, PADDED), -1e4, np.float32)
    is_chosen = np.arange(PADDED - 1) < choices[..., None]
    np.put_along_axis(logits, order, np.where(is_chosen, 0, -1e4).astype(np.float32), axis=3)
    return logits


def rounded_logits(draw, rows):
    """Logits in bfloat16 whose largest is that of PAD; and the same in float32."""
    logits = random_logits(draw, rows)
    logits[..., 0] += 20
    narrow = jnp.asarray(logits, jnp.bfloat16)
    return narrow, np.asarray(narrow.astype(jnp.float32))


def steps_of(function, *arguments):
    """How many steps `function(noting, *arguments)` takes; `noting(step)` is the step to search by.

    The positions of the steps must count from 0.
    """
    calls = []

    def noting(step):
        def noted(ids, position, cache):
            jax.debug.callback(lambda position: calls.append(int(position)), position)
            return step(ids, position, cache)

        return noted

    jax.block_until_ready(function(noting, *arguments))
    jax.effects_barrier()
    assert sorted(calls) == list(range(len(calls)))
    return len(calls)
