"""What a trained GNMT can be used for: as any translator, with its own attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.translation.use import TranslatorUses


class GnmtUses(TranslatorUses):
    """The uses of a GNMT."""

    attends = "the attention of the decoder's first layer, which all layers share"

    def attention(self, params: Any, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        _, captured = self._benchmark.network.apply(
            {"params": params},
            {"inputs": jnp.asarray(source)[None], "targets": jnp.asarray(target)[None]},
            None,
            capture_intermediates=lambda module, method: module.name == "attention",
            mutable=["intermediates"],
        )
        _, probabilities = captured["intermediates"]["attention"]["__call__"][0]
        return np.asarray(probabilities[:, 0], np.float32)
