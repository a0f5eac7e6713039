"""What a trained Transformer can be used for: as any translator, with its own attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.translation.use import TranslatorUses


class TransformerUses(TranslatorUses):
    """The uses of a Transformer."""

    attends = "the mean over the heads of the decoder's last layer"

    def attention(self, params: Any, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        sides = {"inputs": jnp.asarray(source)[None], "targets": jnp.asarray(target)[None]}
        rows = dict(sides)
        for name, ids in sides.items():
            rows[f"{name}_segmentation"] = jnp.ones_like(ids)
            rows[f"{name}_position"] = jnp.arange(ids.shape[1])[None]
        model = self._benchmark.network.clone(remat=False)
        _, captured = model.apply(
            {"params": params},
            rows,
            None,
            capture_intermediates=lambda module, method: (
                module.name in ("query", "key_value") and method == "transposed"
            ),
            mutable=["intermediates"],
        )
        layer = captured["intermediates"][f"decoder_{model.layers - 1}"]["cross_attention"]
        (query,), (key, _) = (layer[name]["transposed"][0] for name in ("query", "key_value"))
        heads = 1, model.heads, -1
        query, key = (x.astype(jnp.float32).reshape(*heads, x.shape[-1]) for x in (query, key))
        scores = jnp.einsum("bhdt,bhds->bhts", query, key) / np.sqrt(query.shape[2])
        return np.asarray(jax.nn.softmax(scores, -1)[0].mean(axis=0))
