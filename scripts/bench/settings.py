"""--set KEY=VALUE of the benchmarks: a change of the config that they measure."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from typing import Any


def change(config: Any, settings: Sequence[str]) -> None:
    """Changes keys of `config`; leaves with one line if there is no such key or value."""
    for text in settings:
        key, _, value = text.partition("=")
        if key not in config:
            sys.exit(f"ERROR: --set {text}: the config has no key {key!r}")
        kind = type(config[key])
        try:
            read = value if kind is str else ast.literal_eval(value)
            config[key] = float(read) if kind is float else read
        except (ValueError, SyntaxError, TypeError):
            sys.exit(f"ERROR: --set {text}: {key} is such as {config[key]!r}")
