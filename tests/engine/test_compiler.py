"""Which options the train step is compiled with, and that they reach the compiler.

Compiled programs between starts are tested in processes of their own, as a user starts them.
"""

import collections
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.base import BATCH_AXES
from engine import compiler, sharding
from engine import step as steps
from tests.engine.test_step import linear_loss, put, step_settings, vector_init, zeros

LIMIT, LIBRARY = "xla_tpu_scoped_vmem_limit_kib", "xla_cpu_experimental_ynn_fusion_type"
LEVEL = "xla_backend_optimization_level"
SHORTEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import jax, jax.numpy as jnp
from engine import compiler, environment
environment.show_log(sys.stdout)
compiler.use_cache(sys.argv[1])
with compiler.watched():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    jax.jit(lambda x: jnp.tanh(x) @ x).lower(x).compile()
"""


def mesh_of(kind: str) -> Any:
    return types.SimpleNamespace(devices=np.array([[types.SimpleNamespace(device_kind=kind)]]))


@pytest.mark.parametrize(
    ("kinds", "larger"),
    [
        (("TPU v5 lite", "TPU v5", "TPU v5p"), True),
        (("NVIDIA H100", "TPU v2", "TPU v3", "TPU v4", "TPU v6 lite", "TPU7x"), False),
    ],
)
def test_some_chips_get_larger_windows(kinds, larger, monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    for kind in kinds:
        chosen = compiler.options(mesh_of(kind), larger_windows=True)
        assert bool(chosen) == larger and compiler.options(mesh_of(kind)) is None
        assert not chosen or int(chosen[LIMIT]) > 16 * 1024  # libtpu's own limit


def test_a_choice_of_the_user_has_priority(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_foo=1 --{LIMIT}=20480")
    assert compiler.options(mesh_of("TPU v5 lite"), larger_windows=True) is None
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_foo=1")
    assert compiler.options(mesh_of("TPU v5 lite"), larger_windows=True)
    monkeypatch.setenv("XLA_FLAGS", f"--{LIBRARY}=dot")
    assert compiler.options(mesh_of("cpu")) is None
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    assert compiler.options(mesh_of("cpu"), runs_once=True) == {LEVEL: "1"}
    assert compiler.options(mesh_of("TPU v4"), runs_once=True) is None
    monkeypatch.setenv("XLA_FLAGS", f"--{LEVEL}=2")
    assert compiler.options(mesh_of("cpu"), runs_once=True) is None


def test_initial_weights_keep_their_bits_at_the_level_of_programs_that_run_once():
    def draw(key: jax.Array) -> Any:
        return jax.random.truncated_normal(key, -2.0, 2.0, (64, 33)) * np.float32(0.1)

    key = jax.random.key(3)
    levels = [jax.jit(draw, compiler_options={LEVEL: level})(key) for level in "13"]
    np.testing.assert_array_equal(*levels)


def test_cpus_convolve_without_ynnpack():
    mesh = sharding.make(BATCH_AXES, 1, jax.devices()[:1])
    x, kernel = (jax.ShapeDtypeStruct(s, "float32") for s in ((8, 32, 32, 32), (3, 3, 32, 32)))

    def program(options: Any) -> str:
        numbers = ("NHWC", "HWIO", "NHWC")

        def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=numbers
            )

        return str(jax.jit(conv).lower(x, kernel).compile(options).as_text())

    assert "__ynn" in program(None)
    assert "__ynn" not in program(compiler.options(mesh))


def test_options_reach_the_compiler():
    """XLA refuses an option that it does not know."""
    mesh, settings = sharding.make(BATCH_AXES, 2), step_settings()
    state = put(mesh, steps.init_state(vector_init, settings, 0))
    batch = put(mesh, {"x": np.ones((16, 3), np.float32)}, batch=True)
    totals = zeros(linear_loss, mesh, state, batch)
    step = steps.make_train_step(linear_loss, mesh, settings, {"xla_unknown": "1"})
    lowered = step.lower(np.uint32(0), state, totals, batch)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_unknown"):
        lowered.compile()


# --- Compiled programs between starts.


@pytest.fixture
def start(tmp_path):
    def run(folder, warnings="error", **environment):
        kept = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
        output = subprocess.run(
            [sys.executable, "-W", warnings, "-c", PROGRAM, folder],
            cwd=ROOT,
            env={**kept, "HOME": str(tmp_path), SHORTEST: "0", **environment},
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
    assert second.endswith(f"; 1 program from {folder}")


def test_what_is_said_of_a_block(monkeypatch, caplog):
    """Only what the block has added counts."""
    names = [f"/jax/compilation_cache/cache_{name}" for name in ("hits", "misses")]
    counts = collections.defaultdict(int, {names[0]: 5, names[1]: 3})
    caplog.set_level("INFO", logger="tpu_suite")
    monkeypatch.setattr(compiler, "_counts", counts)
    monkeypatch.setattr(compiler, "cache_folder", lambda: "/x")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with compiler.watched():
        for name in (*names, names[0]):
            compiler._count(name)
    ends = "; 2 programs from /x; 1 program kept in /x for the next start of host 0 (for all hosts "
    assert f"{ends}give --config.compilation_cache=gs://...)" in caplog.text


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
