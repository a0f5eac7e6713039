"""Programs in files: StableHLO as text or bytecode, and what `jax.export` serialises."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from common.errors import INVALID, ConfigError, one_line

_BYTECODE = b"ML\xefR"
_PORTABLE = b"StableHLO_v"  # the producer of bytecode that other versions read, too


def read(path: str, devices: Sequence[Any]) -> Any:
    """Opens a program for the first devices of a slice; it is like a `jax.stages.Lowered`.

    ConfigError if the file has no program, or one for more devices or another platform.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", INVALID) from error
    if data.startswith(_BYTECODE) or b"func.func" in data:
        return Module(path, data, devices)
    neither = f"{path} is neither StableHLO (lowered.as_text() or its bytecode) nor of jax.export"
    if data.isascii():
        raise ConfigError(neither, INVALID)
    try:
        exported = jax.export.deserialize(bytearray(data))
    except Exception as error:
        raise ConfigError(f"{neither}: {one_line(error)}", INVALID) from error
    if "tpu" not in exported.platforms:
        raise ConfigError(
            f"{path} is for {', '.join(exported.platforms)}: export it with "
            "jax.export.export(function, platforms=['tpu'])",
            INVALID,
        )
    _check(path, exported.nr_devices, devices)
    named = next(filter(None, getattr(exported, "_in_named_shardings", ())), None)
    sizes = named.mesh.axis_sizes if named else (exported.nr_devices,)
    names = named.mesh.axis_names if named else ("devices",)
    grid = np.array(devices[: exported.nr_devices]).reshape(sizes)
    shardings = exported.in_shardings_jax(jax.sharding.Mesh(grid, names))
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    arguments, named = jax.tree.unflatten(exported.in_tree, shapes)
    with jax.default_device(devices[0]):
        return jax.jit(exported.call).lower(*arguments, **named)


def _check(path: str, count: int, devices: Sequence[Any]) -> None:
    if count > len(devices):
        raise ConfigError(f"{path} is for {count} devices, the slice has {len(devices)}", INVALID)


class Module:
    """A StableHLO module, with the methods of `jax.stages.Lowered` that a forecast needs."""

    def __init__(self, path: str, data: bytes, devices: Sequence[Any]):
        try:
            with mlir.make_ir_context() as context:
                if _PORTABLE in data[:64]:
                    self._module = stablehlo.deserialize_portable_artifact(context, data)
                else:
                    self._module = ir.Module.parse(data)
                attributes = self._module.operation.attributes
                counts = [
                    ir.IntegerAttr(attributes[f"mhlo.num_{name}"]).value
                    if f"mhlo.num_{name}" in attributes
                    else 1
                    for name in ("replicas", "partitions")
                ]
        except (ir.MLIRError, ValueError) as error:
            line = str(error).strip().splitlines()
            raise ConfigError(
                f"{path} is no StableHLO that this jax reads: {' '.join(line[:2])[:300]}", INVALID
            ) from error
        self._replicas, self._partitions = counts
        count = self._replicas * self._partitions
        _check(path, count, devices)
        self._device_list = tuple(devices[:count])
        self._lowering = self  # where jax's has the devices

    @property
    def args_info(self) -> Any:
        """(name, bytes) are not known without jax's trees."""
        return ()

    def as_text(self, debug_info: bool = False) -> str:
        """The module as text, with the lines of source code if `debug_info`."""
        return mlir.module_to_string(self._module, debug_info)

    def compile(self, compiler_options: Mapping[str, Any]) -> Any:
        """Compiles it for its devices."""
        options = xla_client.CompileOptions()
        options.env_option_overrides = list(compiler_options.items())
        options.num_replicas, options.num_partitions = self._replicas, self._partitions
        build = options.executable_build_options
        build.num_replicas, build.num_partitions = self._replicas, self._partitions
        build.use_spmd_partitioning = True
        build.use_shardy_partitioner = "sdy." in self.as_text()
        ids = np.array([device.id for device in self._device_list])
        grid = ids.reshape(self._replicas, self._partitions)
        options.device_assignment = xla_client.DeviceAssignment.create(grid)
        devices = xla_client.DeviceList(self._device_list)
        return _Executable(self._device_list[0].client.compile(self._module, devices, options))


class _Executable:
    """A compiled module, with the methods of `jax.stages.Compiled`."""

    def __init__(self, executable: Any):
        self._executable = executable

    def as_text(self) -> str:
        return "\n\n".join(module.to_string() for module in self._executable.hlo_modules())

    def memory_analysis(self) -> Any:
        return self._executable.get_compiled_memory_stats()
