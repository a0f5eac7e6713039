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


STALLED = """
import os, threading
import engine.cluster.stalls as stalls

def look():
    while not (said := stalls.in_libraries(sys.argv[1])):
        threading.Event().wait(0.1)
    print(said[0], flush=True)
    os._exit(0)

threading.Thread(target=look, daemon=True).start()
"""


@pytest.fixture
def start(tmp_path):
    def run(folder, warnings="error", program=PROGRAM, **environment):
        kept = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
        output = subprocess.run(
            [sys.executable, "-W", warnings, "-c", program, folder],
            cwd=ROOT,
            env={**kept, "HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
        )
        assert output.returncode == 0, output.stderr
        return output.stdout.strip()

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


@pytest.mark.parametrize("fault", ["torn by a kill", "not readable"])
def test_a_program_that_cannot_be_read_is_compiled_again(fault, start, tmp_path):
    start("~/kept")
    for path in Path(tmp_path / "kept").rglob("*-cache"):
        if fault == "torn by a kill":
            path.write_bytes(path.read_bytes()[:100])
        else:  # reading a folder as a file is an OSError, as a lost disk is
            path.unlink()
            path.mkdir()
    assert start("~/kept", warnings="default").startswith("compiled in ")


def test_a_folder_that_does_not_answer_is_named(start, tmp_path):
    start("~/kept")
    for path in Path(tmp_path / "kept").rglob("*-cache"):
        path.unlink()
        os.mkfifo(path)  # whoever opens it waits for a writer
    said = start("~/kept", program=f"import sys\n{STALLED}{PROGRAM}")
    assert said == "reading or writing the compiled programs in ~/kept"
