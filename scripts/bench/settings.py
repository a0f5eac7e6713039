"""--set KEY=VALUE of scripts.bench.step and scripts.bench.loop: a change of their config."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from typing import Any


def change(config: Any, settings: Sequence[str]) -> None:
    """Changes keys of `config`; exits with one line if a key or value is invalid."""
    for text in settings:
        key, _, value = text.partition("=")
        if key not in config:
            sys.exit(f"ERROR: --set {text}: the config has no key {key!r}")
        kind = type(config[key])
        try:
            parsed = value if kind is str else ast.literal_eval(value)
            config[key] = float(parsed) if kind is float else parsed
        except (ValueError, SyntaxError, TypeError):
            sys.exit(f"ERROR: --set {text}: the value must have the type of {config[key]!r}")
