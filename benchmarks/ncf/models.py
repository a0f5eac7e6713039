"""NeuMF: generalised matrix factorisation (GMF) beside an MLP; the ranks for HR@10 and NDCG@10.

The model is He et al.'s (2017, arXiv:1708.05031). As in MLPerf's TPU implementation, users have one
table and items another, whose rows hold the embeddings of both parts, one after the other. With a
factorisation of 64 and an MLP of 256, 256, 128, 64 it has 31,832,577 parameters on ml-20m.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

TOP = 10  # an item ranked among the first 10 is a hit


class NeuMF(nn.Module):
    """The logit of the probability that a user rates an item."""

    num_users: int
    num_items: int
    gmf_dim: int  # width of the factorisation
    mlp_layers: tuple[int, ...]  # widths of the MLP; the first is half user, half item

    @nn.compact
    def __call__(self, user: jax.Array, item: jax.Array) -> jax.Array:
        """Logits f32[...] for i32 indices of shapes that broadcast, such as [b, 1] and [b, n]."""
        width = self.gmf_dim + self.mlp_layers[0] // 2
        glorot, lecun = nn.initializers.glorot_uniform(), nn.initializers.lecun_uniform()
        users = nn.Embed(self.num_users, width, embedding_init=glorot, name="users")(user)
        items = nn.Embed(self.num_items, width, embedding_init=glorot, name="items")(item)
        users, items = jnp.broadcast_arrays(users, items)
        factors = users[..., : self.gmf_dim] * items[..., : self.gmf_dim]
        hidden = jnp.concatenate([users[..., self.gmf_dim :], items[..., self.gmf_dim :]], -1)
        for i, size in enumerate(self.mlp_layers[1:]):
            hidden = nn.relu(nn.Dense(size, kernel_init=glorot, name=f"mlp_{i}")(hidden))
        joined = jnp.concatenate([factors, hidden], -1)
        return jnp.squeeze(nn.Dense(1, kernel_init=lecun, name="logit")(joined), -1)


def ranks(scores: jax.Array, items: jax.Array) -> jax.Array:
    """i32[b]: the rank of the first item of each row by score, from 0, as MLPerf's NCF counts.

    `scores` are f32[b, n] of `items` i32[b, n]. An item that a row has several times counts once.
    Items with the same score as the first, and nan, rank before the first, so that a model that
    gives all items one score hits nothing.
    """
    others, other_scores = jax.lax.sort((items[:, 1:], scores[:, 1:]), num_keys=1)
    is_repeated = jnp.pad(others[:, 1:] == others[:, :-1], ((0, 0), (1, 0)))
    counts = ~is_repeated & (others != items[:, :1])
    is_before = ~(other_scores < scores[:, :1])
    return jnp.sum(counts & is_before, axis=1, dtype=jnp.int32)


def hr_and_ndcg(rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The terms (hit, gain) f32[b] of HR@10 and NDCG@10 for ranks i32[b] from 0.

    hit is 1 for ranks below 10, else 0. gain is ln 2 / ln(rank + 2) there, the NDCG of a single
    relevant item.
    """
    hit = (rank < TOP).astype(jnp.float32)
    return hit, hit * math.log(2) / jnp.log(rank.astype(jnp.float32) + 2)
