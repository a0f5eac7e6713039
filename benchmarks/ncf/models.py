"""NeuMF: a generalised matrix factorisation beside a perceptron (He et al. 2017).

As in MLPerf's TPU path, each side has one table whose rows are the embeddings of both parts, one
after the other. On [64; 256, 256, 128, 64] and ml-20m that makes 31,832,577 parameters.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class NeuMF(nn.Module):
    """Whether a user would rate an item, as a logit.

    Attributes:
      num_users: rows of the users' table.
      num_items: rows of the items' table.
      gmf_dim: width of the factorisation.
      mlp_layers: widths of the perceptron; the first is its input, half user and half item.
    """

    num_users: int
    num_items: int
    gmf_dim: int
    mlp_layers: tuple[int, ...]

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
        return nn.Dense(1, kernel_init=lecun, name="logit")(joined)[..., 0]
