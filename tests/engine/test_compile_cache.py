"""Compiled programs between starts, in processes of their own, as a person starts them."""

import os
import pathlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(pathlib.Path(__file__).parents[2])
PROGRAM = """
import sys
import jax, jax.numpy as jnp
from engine import compile_cache
compile_cache.use(sys.argv[1])
with compile_cache.watched(print):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    jax.jit(lambda x: jnp.tanh(x) @ x).lower(x).compile()
"""


@pytest.fixture
def start(tmp_path):
    def run(folder, **environment):
        kept = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
        found = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM, folder],
            cwd=ROOT,
            env={**kept, "HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout.strip()

    return run


def test_the_second_start_finds_the_program(start, tmp_path):
    first, second = start("~/kept"), start("~/kept")
    (folder,) = (tmp_path / "kept").iterdir()
    assert first.startswith("compiled in ") and f"; 1 program kept in {folder} " in first
    assert f"; 1 program from {folder}, which saved " in second and "kept" not in second[-20:]


def test_the_environment_goes_first_and_nothing_keeps_nothing(start, tmp_path):
    other = str(tmp_path / "other")
    assert f"kept in {other} " in start("~/kept", JAX_COMPILATION_CACHE_DIR=other)
    assert start("").count(";") == 0
    assert not (tmp_path / "kept").exists()


def test_a_folder_that_cannot_be_used_is_said_and_loses_nothing(start, tmp_path):
    start("~/kept")
    (folder,) = (tmp_path / "kept").iterdir()
    for path in folder.iterdir():  # reading a folder as a file is an OSError, as a lost disk is
        path.unlink()
        path.mkdir()
    said = start("~/kept")
    assert f"; nothing can be kept in {folder}: " in said and len(said.splitlines()) == 1
    assert any(folder.iterdir())


def test_a_torn_program_is_compiled_anew_and_does_not_stay(start, tmp_path):
    start("~/kept")
    for path in Path(tmp_path / "kept").rglob("*-cache"):
        path.write_bytes(path.read_bytes()[:100])
    said = start("~/kept")
    assert "held a damaged program and was emptied" in said and len(said.splitlines()) == 1
    assert "1 program kept in" in start("~/kept")
    assert "1 program from" in start("~/kept")
