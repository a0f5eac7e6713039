"""Programs of users: how they are found, lowered for devices, and refused in one line.

This machine's CPUs stand in for the devices of a slice, but in the test that needs libtpu.
"""

import functools
import os
import re
import sys
import textwrap
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from common import errors
from common.errors import ConfigError
from engine.forecast import cache, forecasts, user_program
from engine.forecast.forecasts import Answer, Request
from engine.forecast.user_program import ProgramError

X = jax.ShapeDtypeStruct((16, 16), jnp.float32)
DEVICES = jax.devices()


def product(a: Any, b: Any) -> Any:
    return jnp.tanh(a @ b).sum()


def sharded() -> Any:
    return NamedSharding(Mesh(np.array(DEVICES), ("d",)), PartitionSpec("d"))


def place(sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)


def lowered(made: Any) -> Any:
    return user_program.lower(made, DEVICES)[0]


# Lowering.


@pytest.mark.parametrize(
    ("made", "used", "sizes"),
    [
        ((product, (X, X)), 1, {"a": 1024, "b": 1024}),
        ((jax.jit(product), (X, X)), 1, {"a": 1024, "b": 1024}),
        ((product, (np.ones((16, 16)), jnp.ones((16, 16)))), 1, None),
        ((product, (place(sharded()), X)), 8, {"a": 128, "b": 1024}),
        ((jax.jit(product, in_shardings=(None, sharded())), (X, X)), 8, {"a": 1024, "b": 128}),
        ((lambda a: jax.lax.with_sharding_constraint(a, sharded()), (X,)), 8, {"a": 1024}),
        ((lambda tree, n, how: tree["w"] * n, ({"w": X}, 3, "fast")), 1, {"tree['w']": 1024}),
        ((jax.jit(lambda a, n: jnp.ones((n, 16)) @ a, static_argnums=1), (X, 3)), 1, {"a": 1024}),
        ((functools.partial(product, b=np.ones((16, 16))), (X,)), 1, {"a": 1024}),
        ((lambda: jnp.ones((4, 4)), ()), 1, {}),
        ((lambda a, unused: a + 1, (X, X)), 1, {"a": 1024}),
    ],
)
def test_forms_of_programs(made, used, sizes):
    program = lowered(made)
    assert len(user_program.placement(program)) == used
    if sizes is not None:
        assert dict(user_program.argument_bytes(program)) == sizes


def test_a_shard_map_is_on_all_devices_of_its_mesh():
    mesh, spec = Mesh(np.array(DEVICES[:4]), ("d",)), PartitionSpec("d")
    mapped = jax.shard_map(lambda a: a * 2, mesh=mesh, in_specs=spec, out_specs=spec)
    assert len(user_program.placement(lowered((mapped, (X,))))) == 4


def test_a_pmap_is_on_all_its_devices():
    mean = jax.pmap(lambda a: jax.lax.pmean(a.sum(), "d"), axis_name="d", devices=DEVICES)
    step = lowered((mean, (jax.ShapeDtypeStruct((8, 2, 16), jnp.float32),)))
    assert len(cache.placement(step)) == 8


def test_constants_may_be_computed_while_a_program_is_traced():
    def step(a: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return a * (jnp.ones(3) * 2)[0]

    assert "2.000000e+00" in lowered((step, (X,))).as_text()


def test_donation_stays():
    text = lowered((jax.jit(lambda a: a + 1, donate_argnums=0), (X,))).as_text()
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text


def test_arguments_have_names():
    big = jax.ShapeDtypeStruct((64, 16), jnp.bfloat16)
    names = user_program.argument_bytes(lowered((lambda p: p["w"][1] @ X_ONES, ({"w": [X, big]},))))
    assert names == [("p['w'][1]", 2048)]  # what is not used takes no memory


X_ONES = np.ones((16, 16), np.float32)


def test_make_may_say_how_many_examples_a_call_has():
    assert user_program.lower((product, (X, X), 32), DEVICES)[1] == 32
    assert user_program.lower((product, (X, X)), DEVICES)[1] is None


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "not None"),
        (product, "not function"),
        ((product, X), "a tuple with one item for each argument of the function, not Shape"),
        ((product, [X, X]), "not list"),
        ((product, (X, X), "many"), "the number of examples in a call, not str"),
        ((product, (X, X), 0), "the number of examples"),
    ],
)
def test_what_make_must_return(made, words):
    with pytest.raises(ProgramError, match=f"^[^\n]*{words}[^\n]*$"):
        lowered(made)


def test_a_sharding_over_other_devices_is_refused():
    leaf = place(sharded())
    with pytest.raises(ProgramError, match="over this machine's cpu"):
        user_program._abstract("tpu", (jax.tree_util.SequenceKey(0),), leaf)
    alone = place(jax.sharding.SingleDeviceSharding(DEVICES[0]))
    assert user_program._abstract("tpu", (), alone).sharding is None  # an array made on the host


# Loading, with the user's modules and the slice's devices.


FILE = """
import common
import jax
import helper

BACKEND = jax.default_backend(), jax.device_count(), len(jax.devices())

def make(devices):
    from common.errors import Mine
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    return common.OWNER, helper.OWNER, list(mesh.devices.flat) == list(devices), BACKEND

class Models:
    @staticmethod
    def small(devices):
        return len(devices)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common/__init__.py").write_text("OWNER = 'user'")
    (tmp_path / "common/errors.py").write_text("class Mine(Exception): pass")
    (tmp_path / "helper.py").write_text("OWNER = 'helper'")
    (tmp_path / "steps.py").write_text(FILE)
    yield tmp_path
    for name in ("helper", "steps"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_program_has_its_own_modules_and_the_slices_devices(folder, is_file):
    where = str(folder / "steps.py") if is_file else "steps"
    path = [*([] if is_file else [str(folder)]), *sys.path]
    before = sys.modules["common.errors"], jax.devices, [*sys.path]
    # A file's folder comes first, as when Python runs it.
    with user_program._world(DEVICES[:4], [str(folder), *path]):
        found = user_program._load((where, "make"))(DEVICES[:4])
        nested = user_program._load((where, "Models.small"))
    assert found == ("user", "helper", True, ("tpu", 4, 4)) and nested(DEVICES) == 8
    assert (sys.modules["common.errors"], jax.devices, [*sys.path]) == before
    assert errors is sys.modules["common.errors"]


def test_without_a_package_of_the_same_name_the_users_file_may_import_ours(tmp_path):
    (tmp_path / "mine.py").write_text("from engine.forecast import forecast as make")
    with user_program._world(DEVICES, [str(tmp_path)]):
        assert user_program._load((str(tmp_path / "mine.py"), "make")) is forecasts.forecast
    del sys.modules["mine"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (("no_such_module", "make"), "there is no module 'no_such_module'.*file.py:make"),
        (("json", "make"), "json has no function 'make'; it has .*loads"),
    ],
)
def test_programs_that_are_not_found(target, words):
    with pytest.raises(ConfigError, match=words) as caught:
        user_program._load(target)
    assert caught.value.code == errors.INVALID


# In the worker.


def answer(tmp_path: Any, code: str, name: str = "make", **options: Any) -> Answer:
    path = tmp_path / "its_program.py"
    path.write_text(textwrap.dedent(code))
    request = Request((str(path), name), "v5e:2x4", sys.path[:], str(tmp_path), **options)
    said: list[str] = []
    try:
        return user_program.answer(request, said.append)
    finally:
        sys.modules.pop("its_program", None)
        assert said[0].startswith("tracing the program")


@pytest.fixture
def slice_of_this_machine(monkeypatch, tmp_path):
    described = type("Described", (), {"devices": DEVICES})
    monkeypatch.setattr(user_program.topologies, "get_topology_desc", lambda *_, **__: described)
    monkeypatch.setattr(user_program, "compile_program", lambda program, *_: PROGRAM)
    monkeypatch.chdir(tmp_path)


PROGRAM = types.SimpleNamespace(parameters=(256, 4096))
HEAD = """
import jax, jax.numpy as jnp, os, sys
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
"""


@pytest.mark.usefixtures("slice_of_this_machine")
def test_an_answer(tmp_path):
    code = f"{HEAD}def make(devices): return (lambda a, b: a @ b), (X, X), 8 * len(devices)"
    found = answer(tmp_path, code)
    assert found.program == PROGRAM and found.fits is True and found.error == ""
    assert (found.used, found.examples) == (1, 64)
    assert found.arguments == (("b", 4096), ("a", 256))  # the sizes are the compiler's


@pytest.mark.usefixtures("slice_of_this_machine")
def test_calls_of_the_host_are_counted(tmp_path):
    code = f"""{HEAD}
def step(a):
    jax.debug.print("{{}}", a[0, 0])
    return jax.pure_callback(lambda v: v, X, a)

def make(devices): return step, (X,)
"""
    assert answer(tmp_path, code).callbacks == 2


@pytest.mark.usefixtures("slice_of_this_machine")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"make\(devices\) raised ZeroDivisionError at its_program.py:5: division"),
        ("sys.exit('bye')", r"make\(devices\) raised SystemExit at its_program.py:5: bye"),
        ("pass", r"make: it must return \(function, arguments\), not None"),
        ("return (lambda a: a @ a.reshape(64)), (X,)", "tracing.* TypeError at its_program.py:5: "),
        ("return (lambda a: a), (X, X)", "tracing its function raised TypeError"),
        (
            "raise RuntimeError('UNIMPLEMENTED: not available with compile-only client.')",
            r"return shapes, jax.ShapeDtypeStruct\(shape, dtype, sharding=...\)",
        ),
    ],
)
def test_the_users_mistakes_are_one_line_with_its_place(body, message, tmp_path):
    found = answer(tmp_path, f"{HEAD}def make(devices):\n    {body}")
    assert found.program is None and found.fits is None
    assert "\n" not in found.error and re.search(message, found.error)


@pytest.mark.usefixtures("slice_of_this_machine")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_library", "importing .* ModuleNotFoundError at its_program.py:1"),
        ("def make(devices)\n  pass", "importing .* SyntaxError at its_program.py:1"),
    ],
)
def test_a_file_that_cannot_be_imported_ends_all_slices(code, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        answer(tmp_path, code)


@pytest.mark.usefixtures("slice_of_this_machine")
def test_a_program_that_does_not_fit_says_what_is_large(tmp_path, monkeypatch):
    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM (16.02G).")

    monkeypatch.setattr(user_program, "compile_program", full)
    found = answer(tmp_path, f"{HEAD}def make(devices): return (lambda a: a @ a), (X,)")
    assert found.fits is False and found.arguments == (("a", 256),)
    assert found.error == "the program does not fit: Ran out of memory on HBM (16.02G)."


def test_libtpu_may_refuse_a_topology(monkeypatch, tmp_path):
    def refuse(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such layout\nmore")

    monkeypatch.setattr(user_program.topologies, "get_topology_desc", refuse)
    request = Request(("json", "loads"), "v5e:2x4", [], os.getcwd())
    found = user_program.answer(request, print)
    assert found.error == "libtpu cannot describe v5e:2x4: INVALID_ARGUMENT: no such layout"


# The compiler itself.


@pytest.mark.long
def test_programs_compile_for_tpus(tmp_path, monkeypatch):
    """In other processes; kernels and sorts have bundles, and nothing is for the CPU."""
    pytest.importorskip("libtpu", reason="libtpu is not installed (requirements-tpu.txt)")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "its_program.py"
    path.write_text(f"""{HEAD}
from jax.experimental import pallas as pl

def double(ref, out):
    out[...] = ref[...] * 2

def kernel(devices):
    return (lambda a: pl.pallas_call(double, out_shape=BIG)(a)), (BIG,)

BIG = jax.ShapeDtypeStruct((512, 1024), jnp.float32)

def largest(devices):
    return (lambda a: jax.lax.top_k(a, 8)), (BIG,)

def sharded(devices):
    assert jax.default_backend() == "tpu"
    mesh = jax.make_mesh((len(devices),), ("d",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    return jax.jit(lambda a: (a @ a.T).sum(), in_shardings=spec), (BIG,)
""")
    (found,) = forecasts.forecast(f"{path}:kernel", "v5e-1")
    assert found.error == "" and found.fits and found.used == 1
    assert found.program and found.program.arguments == 4 * 512 * 1024
    priced = [x for x in found.program.operations if x.kind]
    (sorts,) = forecasts.forecast(f"{path}:largest", "v5e-1")
    priced += [x for x in sorts.program.operations if x.kind] if sorts.program else []
    assert [(x.kind, (x.bundles or 0) > 0) for x in priced] == [("kernel", True), ("sort", True)]
    small, large = forecasts.forecast(f"{path}:sharded", "v5e-8,v4-8")
    assert small.program and large.program and (small.used, large.used) == (8, 4)
    assert small.program.arguments == 4 * 512 * 1024 / 8 == large.program.arguments / 2
    assert "all-gather" in small.program.collectives
