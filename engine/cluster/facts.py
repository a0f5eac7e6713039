"""Names what must be the same on all hosts of a run."""

from __future__ import annotations

import hashlib
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import keys
from engine import manifest

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = ("benchmarks", "engine", "modes", "ops")


def of(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The configuration, the versions of the libraries and the program; for `joining.join`."""
    versions, digest = manifest.versions(), hashlib.sha256()
    sources = [path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py")]
    for path in [*sorted(_ROOT.glob("*.py")), *sorted(sources)]:
        digest.update(path.read_bytes())
    return {
        "Python": platform.python_version(),
        "the program (SHA-256 of its files)": digest.hexdigest()[:12],
        **{f"the version of {name}": versions.get(name, "absent") for name in manifest.LIBRARIES},
        **{f"config.{key}": str(value) for key, value in keys.flat(recipe).items()},
    }
