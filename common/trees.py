"""The arrays of a model by name."""

from __future__ import annotations

from typing import Any

import jax


def by_name(tree: Any) -> dict[str, Any]:
    """{"params/conv_stem/kernel": leaf, ...}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
