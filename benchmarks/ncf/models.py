"""NeuMF: generalised matrix factorisation (GMF) beside an MLP.

The model is He et al.'s (2017, arXiv:1708.05031). As in MLPerf's TPU implementation, users have one
table and items another, whose rows hold the embeddings of both parts, one after the other. With a
factorisation of 64 and an MLP of 256, 256, 128, 64 it has 31,832,577 parameters on ml-20m.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


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

    @property
    def users_at_once(self) -> int:
        """How many users are scored at once, so that a layer over all items takes about 16 MB."""
        widest = max((1, *self.mlp_layers[1:]))
        return max(1, (1 << 22) // (self.num_items * widest))

    def of_all_items(self, params: Any) -> Callable[[jax.Array], jax.Array]:
        """Returns a function from a user's vector f32[w] to the logits f32[items] of all items.

        They are those of `__call__` up to rounding. The first layer is linear in the item and the
        user, so that it needs no product for each pair.
        """
        items, factors = params["items"]["embedding"], self.gmf_dim
        width, last = items.shape[1] - factors, params["logit"]
        layers = [params[f"mlp_{i}"] for i in range(len(self.mlp_layers) - 1)]
        kernel, weights = last["kernel"][:, 0], last["kernel"][factors:]
        first, *others = [*layers, {"kernel": weights, "bias": last["bias"]}]
        of_items = items[:, factors:] @ first["kernel"][width:]

        def logits(vector: jax.Array) -> jax.Array:
            hidden = of_items + vector[factors:] @ first["kernel"][:width] + first["bias"]
            for layer in others:
                hidden = nn.relu(hidden) @ layer["kernel"] + layer["bias"]
            return items[:, :factors] @ (vector[:factors] * kernel[:factors]) + hidden[:, 0]

        return logits
