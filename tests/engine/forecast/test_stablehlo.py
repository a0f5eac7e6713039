"""Programs in files. This machine's CPUs stand in for the devices of a slice."""

import io
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from common.errors import INVALID, ConfigError
from engine.forecast import stablehlo, user_program

DEVICES = jax.devices()
X = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def spread() -> Any:
    placement = NamedSharding(Mesh(np.array(DEVICES), ("d",)), PartitionSpec("d"))
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=placement)


def read(path: Any, content: str | bytes, devices: Any = DEVICES) -> Any:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return stablehlo.read(str(path), devices)


@pytest.mark.usefixtures("lines_in_programs")
@pytest.mark.parametrize(("shape", "used"), [(X, 1), (spread(), 8)])
def test_text_and_bytecode(shape, used, tmp_path):
    lowered = jax.jit(lambda a: (a @ a).sum()).lower(shape)
    bytecode = io.BytesIO()
    lowered.compiler_ir().operation.write_bytecode(bytecode)  # pyright: ignore
    for content in (lowered.as_text(), bytecode.getvalue()):
        program = read(tmp_path / "step.mlir", content)
        assert "stablehlo.dot_general" in program.as_text()
        assert len(user_program.placement(program)) == used
    with_lines = read(tmp_path / "step.mlir", lowered.as_text(debug_info=True))
    assert __file__ in with_lines.as_text(debug_info=True)


@pytest.mark.parametrize(("shape", "used"), [(X, 1), (spread(), 8)])
def test_what_jax_exports(shape, used, tmp_path):
    pytest.importorskip("flatbuffers")
    exported = jax.export.export(jax.jit(lambda a: a @ a), platforms=["tpu"])(shape)
    portable = read(tmp_path / "step", exported.mlir_module_serialized)
    assert "stablehlo.dot_general" in portable.as_text()
    if used == 1:  # on more devices jax checks their platform when it calls the function
        with pytest.raises(ValueError, match="tpu"):
            read(tmp_path / "step", bytes(exported.serialize()))
    exported = jax.export.export(jax.jit(lambda a: a @ a), platforms=["cpu"])(shape)
    with pytest.raises(ConfigError, match=r"is for cpu: export it with.*platforms=\['tpu'\]"):
        read(tmp_path / "step", bytes(exported.serialize()))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is neither StableHLO"),
        (b"\x08\x00\x00\x00rubbish, not a program", "is neither StableHLO"),
        ("module { func.func @main(%a: tensor<2xf32) }", "is no StableHLO that this jax reads"),
        (b"ML\xefR\x01", "is no StableHLO that this jax reads"),
    ],
)
def test_files_without_a_program(content, words, tmp_path):
    with pytest.raises(ConfigError, match=f"^[^\n]*{words}[^\n]*$") as caught:
        read(tmp_path / "step.mlir", content)
    assert caught.value.code == INVALID


def test_a_program_for_more_devices(tmp_path):
    text = jax.jit(lambda a: a + 1).lower(spread()).as_text()
    with pytest.raises(ConfigError, match="is for 8 devices, the slice has 4"):
        read(tmp_path / "step.mlir", text, DEVICES[:4])


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="step.mlir: No such file"):
        stablehlo.read(str(tmp_path / "step.mlir"), DEVICES)
