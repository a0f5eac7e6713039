"""Which options the train step is compiled with, and that they reach the compiler."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import run as runs
from benchmarks.base import BATCH_AXES
from configs import mask_rcnn, ncf, resnet50, ssd
from engine import compiler
from engine import mesh as meshes
from engine import step as steps
from programs import Programs
from tests.engine.test_step import linear_loss, put, recipe, vector_init, zeros

LIMIT, LIBRARY = "xla_tpu_scoped_vmem_limit_kib", "xla_cpu_experimental_ynn_fusion_type"


def mesh_of(kind: str) -> Any:
    return SimpleNamespace(devices=np.array([[SimpleNamespace(device_kind=kind)]]))


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


def test_cpus_convolve_without_ynnpack():
    mesh = meshes.make(BATCH_AXES, 1, jax.devices()[:1])
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
    mesh, plan = meshes.make(BATCH_AXES, 2), recipe()
    state = put(mesh, steps.init_state(vector_init, plan, 0))
    batch = put(mesh, {"x": np.ones((16, 3), np.float32)}, batch=True)
    totals = zeros(linear_loss, mesh, state, batch)
    step = steps.make_train_step(linear_loss, mesh, plan, {"xla_unknown": "1"})
    lowered = step.lower(np.uint32(0), state, totals, batch)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_unknown"):
        lowered.compile()


@pytest.mark.parametrize(
    ("config", "larger"), [(resnet50, True), (ssd, True), (mask_rcnn, False), (ncf, False)]
)
def test_benchmarks_choose_larger_windows(config, larger, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(compiler, "options", lambda mesh, larger_windows: larger_windows)
    monkeypatch.setattr(steps, "make_train_step", lambda *arguments: seen.append(arguments[3]))
    monkeypatch.setattr(steps, "lower", lambda *_: [])
    nothing: Any = None
    programs = Programs.make(runs.read(config.get_config().lock()))
    assert programs.lower_train(nothing, nothing, nothing) == []
    assert seen == [larger]
