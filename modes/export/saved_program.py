"""Writes a program of jax as TensorFlow's SavedModel: one operation that runs its StableHLO.

jax writes a newer StableHLO than TensorFlow of the same day reads. It can write older ones too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
from jax import export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from errors import ConfigError, one_line
from ops.portable import Arrays
from ops.shards import tensorflow

_VERSION = "1.13.0"  # of StableHLO: what TensorFlow 2.21 reads
_CONVENTION = 9  # how arguments are passed; the one of TensorFlow 2.14 and newer


def write(exported: export.Exported, folder: str) -> None:
    """Writes a function of a dict of arrays to another as the signature serving_default.

    Args:
      exported: the function; its dimensions may be symbolic.
      folder: the new folder, such as NAME/1.

    Raises:
      ConfigError: it has operations that TensorFlow's StableHLO does not have.
    """
    tf, xla = tensorflow(), _xla()
    module = tf.Module()
    (inputs,), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    names, code = sorted(outputs), _older(exported)

    @tf.function(autograph=False)
    def serve(**arrays: Any) -> Any:
        values = xla.call_module(
            [arrays[name] for name in sorted(inputs)],
            version=_CONVENTION,
            module=code,
            Tout=[outputs[name].dtype.name for name in names],
            Sout=[_sides(outputs[name]) for name in names],
            platforms=[name.upper() for name in exported.platforms],
        )
        return dict(zip(names, values, strict=True))

    specs = {name: tf.TensorSpec(_sides(x), x.dtype.name, name) for name, x in inputs.items()}
    module.serve = serve.get_concrete_function(**specs)
    tf.saved_model.save(module, folder, signatures=module.serve)
    with contextlib.suppress(FileNotFoundError):  # a random number that no reader needs
        os.remove(f"{folder}/fingerprint.pb")


def runner(folder: str) -> Callable[[Arrays], Arrays]:
    """Loads the function that a SavedModel serves."""
    tf = tensorflow()
    serve = tf.saved_model.load(folder).signatures["serving_default"]

    def run(inputs: Arrays) -> Arrays:
        results = serve(**{name: tf.constant(x) for name, x in inputs.items()})
        return {name: x.numpy() for name, x in results.items()}

    return run


def _xla() -> Any:
    """The functions of TensorFlow's XLA; `tf.raw_ops` lacks this operation."""
    tensorflow()
    from tensorflow.compiler.tf2xla.python import xla

    return xla


def _older(exported: export.Exported) -> bytes:
    """The function's StableHLO of `_VERSION`."""
    context = ir.Context()
    stablehlo.register_dialect(context)
    with context:
        try:
            code = exported.mlir_module_serialized
            module = stablehlo.deserialize_portable_artifact(context, code)
            return stablehlo.serialize_portable_artifact(module, _VERSION)
        except Exception as error:  # of MLIR
            raise ConfigError(
                f"--format=savedmodel: StableHLO {_VERSION}, which TensorFlow reads, lacks an "
                f"operation of this model: {one_line(error)}"
            ) from error


def _sides(array: Any) -> list[int | None]:
    return [side if isinstance(side, int) else None for side in array.shape]
