"""Writes programs of jax as StableHLO, and as TensorFlow's SavedModels, which run StableHLO.

A StableHLO file is for CPUs, TPUs and GPUs; a newer jax of the next six months reads it as well, an
older one does not. jax writes a newer StableHLO than TensorFlow of the same day reads, but it can
write older ones too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from common.data.shards import tensorflow
from common.errors import ConfigError, one_line
from common.images import input_spec
from common.images.input_spec import InputSpec
from common.portable import Arrays

PLATFORMS = ("cpu", "tpu", "cuda")
_LOCATIONS = "jax_traceback_in_locations_limit"
_VERSION = "1.13.0"  # of StableHLO: what TensorFlow 2.21 reads
_CONVENTION = 9  # how arguments are passed; the one of TensorFlow 2.14 and newer


def exported(compute: Any, specs: Any) -> export.Exported:
    """A function of arrays of these shapes, which may be symbolic, without the paths of our code.

    Args:
      compute: the jitted function.
      specs: of its argument.
    """
    limit = jax.config.values[_LOCATIONS]
    jax.config.update(_LOCATIONS, 0)
    try:
        return export.export(compute, platforms=PLATFORMS)(specs)
    finally:
        jax.config.update(_LOCATIONS, limit)


def write(program: export.Exported, path: str) -> None:
    """Writes a program, with its weights, to a file."""
    with open(path, "wb") as file:
        file.write(program.serialize())


def runner(path: str) -> Callable[[Any], Any]:
    """Loads the function that a file holds."""
    with open(path, "rb") as file:
        return jax.jit(export.deserialize(bytearray(file.read())).call)


def write_savedmodel(program: export.Exported, folder: str) -> None:
    """Writes a function of a dict of arrays to another as the signature serving_default.

    Args:
      program: the function; its dimensions may be symbolic.
      folder: the new folder, such as NAME/1.

    Raises:
      ConfigError: it has operations that TensorFlow's StableHLO does not have.
    """
    tf, call = tensorflow(), _operation(program)
    (inputs,), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    names = sorted(jax.tree.unflatten(program.out_tree, program.out_avals))

    @tf.function(autograph=False)
    def serve(**arrays: Any) -> Any:
        return dict(zip(names, call([arrays[name] for name in sorted(inputs)]), strict=True))

    specs = {name: tf.TensorSpec(_sides(x), x.dtype.name, name) for name, x in inputs.items()}
    _save({"serving_default": serve.get_concrete_function(**specs)}, folder)


def write_classifier(
    program: export.Exported, spec: InputSpec, class_names: Sequence[str], folder: str
) -> None:
    """Writes a classifier with the signatures of TensorFlow Serving's clients.

    Args:
      program: uint8[b, s, s, 3] -> logits float32[b, K].
      spec: how an encoded image becomes pixels.
      class_names: of the logits; () are numbers instead.
      folder: the new folder, such as NAME/1.

    The signatures are:
      serving_default: `image_bytes` string[b], encoded images, -> `classes` int64[b],
        `probabilities` float32[b, K], `top5_names` string[b, 5], `top5_scores` float32[b, 5].
      images: `images` uint8[b, s, s, 3], RGB -> `logits` float32[b, K].

    Raises:
      ConfigError: as `write_savedmodel`.
    """
    tf, call = tensorflow(), _operation(program)
    shape, count = (_sides(x) for x in (program.in_avals[0], program.out_avals[0]))
    names = tf.constant(list(class_names) or [str(i) for i in range(count[1] or 0)])

    # A function of its own, because both signatures would otherwise have a copy of the weights.
    @tf.function(input_signature=[tf.TensorSpec(shape, tf.uint8, "images")], autograph=False)
    def logits(images: Any) -> Any:
        return {"logits": call([images])[0]}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "image_bytes")], autograph=False)
    def classify(image_bytes: Any) -> Any:
        prepared = tf.map_fn(
            lambda image: input_spec.evaluated(image, spec, is_portable=True),
            image_bytes,
            fn_output_signature=tf.TensorSpec(shape[1:], tf.uint8),
        )
        probabilities = tf.nn.softmax(logits(prepared)["logits"])
        scores, indices = tf.math.top_k(probabilities, min(5, len(names)))
        return {
            "classes": tf.argmax(probabilities, axis=-1),
            "probabilities": probabilities,
            "top5_names": tf.gather(names, indices),
            "top5_scores": scores,
        }

    _save({"serving_default": classify, "images": logits}, folder)


def savedmodel_runner(
    folder: str, signature: str = "serving_default"
) -> Callable[[Arrays], Arrays]:
    """Loads a function that a SavedModel serves."""
    tf = tensorflow()
    serve = tf.saved_model.load(folder).signatures[signature]

    def run(inputs: Arrays) -> Arrays:
        results = serve(**{name: tf.constant(x) for name, x in inputs.items()})
        return {name: x.numpy() for name, x in results.items()}

    return run


def _operation(program: export.Exported) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A program as one operation of TensorFlow, from its flat inputs to its flat outputs."""
    tensorflow()
    from tensorflow.compiler.tf2xla.python import xla  # `tf.raw_ops` lacks this operation

    code, outputs = _older(program), program.out_avals
    call: Any = xla.call_module
    return lambda inputs: call(
        inputs,
        version=_CONVENTION,
        module=code,
        Tout=[x.dtype.name for x in outputs],
        Sout=[_sides(x) for x in outputs],
        platforms=[name.upper() for name in program.platforms],
    )


def _older(program: export.Exported) -> bytes:
    """The program's StableHLO of `_VERSION`."""
    context = ir.Context()
    stablehlo.register_dialect(context)
    with context:
        try:
            code = program.mlir_module_serialized
            module = stablehlo.deserialize_portable_artifact(context, code)
            return stablehlo.serialize_portable_artifact(module, _VERSION)
        except Exception as error:  # of MLIR
            raise ConfigError(
                f"--format=savedmodel: StableHLO {_VERSION}, which TensorFlow reads, lacks an "
                f"operation of this model: {one_line(error)}"
            ) from error


def _save(signatures: dict[str, Any], folder: str) -> None:
    tf = tensorflow()
    module = tf.Module()
    module.functions = list(signatures.values())
    tf.saved_model.save(module, folder, signatures=signatures)
    with contextlib.suppress(FileNotFoundError):  # a random number that no reader needs
        os.remove(f"{folder}/fingerprint.pb")


def _sides(array: Any) -> list[int | None]:
    return [side if isinstance(side, int) else None for side in array.shape]
