"""The modules that a plain run imports stay few, so that a newcomer can read them all."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

import benchmarks

ROOT = pathlib.Path(__file__).parents[1]


def imports(path: pathlib.Path) -> Iterator[str]:
    """What a file imports at its top."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def closure(*modules: str) -> set[pathlib.Path]:
    """The repository's own files that come with some modules."""
    files: set[pathlib.Path] = set()
    waiting = list(modules)
    while waiting:
        base = ROOT / waiting.pop().replace(".", "/")
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists() and path not in files:
                files.add(path)
                waiting += imports(path)
    return files


# What is rarer than a plain run loads where a recipe or a mode names it: docs/design.md.
@pytest.mark.parametrize(
    ("benchmark", "most_files", "most_lines"),
    [
        ("resnet", 65, 8700),
        ("ssd", 80, 9805),
        ("mask_rcnn", 82, 10000),
        ("transformer", 67, 8800),
        ("gnmt", 66, 8590),
        ("ncf", 54, 7050),
    ],
)
def test_a_run_imports_few_files(benchmark, most_files, most_lines):
    files = closure("train", benchmarks.modules()[benchmark])
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert len(files) <= most_files and lines <= most_lines, (len(files), lines)
