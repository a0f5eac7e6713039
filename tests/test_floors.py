"""Who may import whom (the table of floors in the design notes), and that an import does nothing."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import benchmarks

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("benchmarks", "configs", "engine", "ops", "scripts")
LOCAL = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py"))} | set(FOLDERS)

_DRIVERS = {"train", "evaluate", "engine.mesh", "engine.preemption"}
_LOOP = {"benchmarks", "benchmarks.base.*", "engine.*", "ops.records.*"}
ALLOWED = {  # "a.*" is a and all in it, "a" what its __init__ defines
    "main": {f"{name}.*" for name in _DRIVERS},
    "scripts": {f"{name}.*" for name in _DRIVERS | {"records"}},
    "train": _LOOP | {"evaluate.*"},
    "evaluate": _LOOP,
    "benchmarks": {"benchmarks.base.*", "models.*", "input_pipeline.*", "ops.*"},  # and its room
    "models": set(),
    "input_pipeline": {"ops.*"},
    "engine": {"engine.*"},
    "ops": {"ops.*"},
    "configs": {"configs.*", "ml_collections.*"},
}
ONLY_IN = {"orbax": "engine/checkpoint.py", "clu": "engine/report.py"}


def imports(path: str, source: str) -> set[str]:
    """Full names of all that a file imports, lazily or not: "engine.mesh.Feed"."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.split("/")[: -node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def is_within(name: str, entry: str) -> bool:
    module = entry.removesuffix(".*")
    if name == module or (entry.endswith(".*") and name.startswith(f"{module}.")):
        return True
    inner = name.removeprefix(f"{module}.")
    return inner != name and "." not in inner and not (ROOT / module / inner).exists() and not (
        ROOT / module / f"{inner}.py"
    ).exists()


def faults(path: str, source: str) -> list[str]:
    """The imports of a file, given by its path from the root, that its floor forbids."""
    first, *rest = path.removesuffix(".py").split("/")
    if first not in ALLOWED:
        return [f"{path} has no floor"]
    allowed = ALLOWED[first] | ({f"benchmarks.{rest[0]}.*"} if first == "benchmarks" else set())
    found = []
    for name in sorted(imports(path, source)):
        top = name.split(".")[0]
        if top in LOCAL or first == "configs":
            wrong = not any(is_within(name, entry) for entry in allowed)
        else:
            wrong = ONLY_IN.get(top, path) != path
            wrong |= top == "flax" and first in ("train", "evaluate", "engine")
        found += [f"{path} imports {name}"] * wrong
    return found


def sources() -> list[pathlib.Path]:
    return [*ROOT.glob("*.py"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.py"))]
