"""The arrays of a model by name, and parts of it by the words of these names."""

import re
from collections.abc import Collection
from typing import Any

import jax

from common.errors import ConfigError


def by_name(tree: Any) -> dict[str, Any]:
    """{"params/conv_stem/kernel": leaf, ...}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


class Parts:
    """The parameters that a config key names by parts of the model.

    An entry is a piece of the names that begins at a word: "stem" means "conv_stem/kernel" and
    "bn_stem/scale", "stage1" means "stage1_block2/conv1/kernel" but not "stage10_block1/...".
    """

    def __init__(self, key: str, text: str):
        """`text` is the value of the config's `key`: entries with commas; "" means no parameter."""
        self._key = key
        self._patterns = {}
        for entry in filter(None, map(str.strip, text.split(","))):
            more = r"\d" if entry[-1].isdigit() else "[a-z]"  # would continue the word or number
            self._patterns[entry] = re.compile(rf"(?<![^/_]){re.escape(entry)}(?!{more})")

    def __contains__(self, name: str) -> bool:
        return any(pattern.search(name) for pattern in self._patterns.values())

    def check(self, names: Collection[str]) -> None:
        """Raises ConfigError if an entry means no parameter among `names`."""
        for entry, pattern in self._patterns.items():
            if not any(map(pattern.search, names)):
                tops = dict.fromkeys(name.partition("/")[0] for name in names)
                raise ConfigError(
                    f"config.{self._key}: {entry!r} is not a part of the model; its parts are "
                    f"{', '.join(tops)}, and the words in these names mean all that have them"
                )
