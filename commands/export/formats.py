"""Writes programs of jax as StableHLO and as TensorFlow's SavedModels, and graphs as ONNX.

All of them are read back by the programs that users have. A SavedModel runs StableHLO.

A StableHLO file is for CPUs, TPUs and GPUs; a newer jax of the next six months reads it as well, an
older one does not. jax writes a newer StableHLO than TensorFlow of the same day reads, but it can
write older ones too.
"""

import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jinja2
from jax import export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from common.errors import ConfigError, one_line
from common.exportable import Arrays
from common.images import input_spec
from common.images.input_spec import InputSpec
from common.onnx_graph import Ends, Graph
from common.tensorflow import tensorflow
from engine.checkpoint import model_source

DEFAULTS = ("savedmodel", "stablehlo")
PATHS = {  # the file or folder that a format has in an export, in the order of the formats
    "hf": "model.safetensors",
    "onnx": "model.onnx",
    "savedmodel": "savedmodel",
    "stablehlo": "model.stablehlo",
    "ctranslate2": "ctranslate2",
}
Draw = Callable[[Graph], tuple[Ends, Ends]]
_PLATFORMS = ("cpu", "tpu", "cuda")
_VERSION = "1.13.0"  # of StableHLO: what TensorFlow 2.21 reads
_CONVENTION = 9  # the calling convention of TensorFlow 2.14 and newer


def write(
    name: str,
    path: str,
    program: export.Exported | None,
    draw: Draw | None,
    facts: Mapping[str, str],
    classes: tuple[InputSpec, Sequence[str], bool] | None = None,
) -> None:
    """Writes a model in the format `name`, "onnx", "savedmodel" or "stablehlo", to a new path.

    Args:
      program: the model as jax exports it, not for ONNX; its dimensions may be symbolic.
      draw: adds the model to a graph of ONNX, and returns its inputs and outputs.
      facts: the metadata of ONNX.
      classes: for a classifier, how an encoded image becomes pixels, the names of the classes (()
        for numbers), and whether an image has any of them.
    """
    if name == "savedmodel":
        assert program is not None
        signatures = _classify(program, *classes) if classes else _serve(program)
        tf = tensorflow()
        module = tf.Module()
        module.functions = list(signatures.values())
        tf.saved_model.save(module, f"{path}/1", signatures=signatures)
        return
    if name == "onnx":
        assert draw is not None
        graph = Graph()
        content = graph.encode(*draw(graph), facts)
    else:
        assert program is not None
        content = program.serialize()
    pathlib.Path(path).write_bytes(content)


def read(name: str, path: str, signature: str = "serving_default") -> Callable[[Any], Any]:
    """Loads the function that `write` wrote; a SavedModel has one for each `signature`."""
    if name == "onnx":
        return _read_onnx(path)
    if name == "stablehlo":
        return jax.jit(export.deserialize(bytearray(pathlib.Path(path).read_bytes())).call)
    tf = tensorflow()
    serve = tf.saved_model.load(f"{path}/1").signatures[signature]

    def run(inputs: Arrays) -> Arrays:
        results = serve(**{name: tf.constant(x) for name, x in inputs.items()})
        return {name: x.numpy() for name, x in results.items()}

    return run


def exported(compute: Any, specs: Any) -> export.Exported:
    """A jitted function of `specs`, whose shapes may be symbolic."""
    return export.export(compute, platforms=_PLATFORMS)(specs)


def _serve(program: export.Exported) -> dict[str, Any]:
    """A function of a dict of arrays to another as the signature serving_default."""
    tf, call = tensorflow(), _operation(program)
    (inputs,), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    names = sorted(jax.tree.unflatten(program.out_tree, program.out_avals))

    @tf.function(autograph=False)
    def serve(**arrays: Any) -> Any:
        return dict(zip(names, call([arrays[name] for name in sorted(inputs)]), strict=True))

    specs = {name: tf.TensorSpec(_sides(x), x.dtype.name, name) for name, x in inputs.items()}
    return {"serving_default": serve.get_concrete_function(**specs)}


def _classify(
    program: export.Exported, spec: InputSpec, labels: Sequence[str], several: bool
) -> dict[str, Any]:
    """A function uint8[b, s, s, 3] -> float32[b, K] as TensorFlow Serving's clients call it.

    The signatures are:
      serving_default: `image_bytes` string[b], encoded images, -> `classes` int64[b],
        `probabilities` float32[b, K], `top5_names` string[b, 5], `top5_scores` float32[b, 5]; where
        an image has several labels, without `classes`.
      images: `images` uint8[b, s, s, 3], RGB -> `logits` float32[b, K].
    """
    tf, call = tensorflow(), _operation(program)
    shape, count = (_sides(x) for x in (program.in_avals[0], program.out_avals[0]))
    names = tf.constant(list(labels) or [str(i) for i in range(count[1] or 0)])

    # A separate function: otherwise each signature would have a copy of the weights.
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
        found = logits(prepared)["logits"]
        probabilities = tf.math.sigmoid(found) if several else tf.nn.softmax(found)
        scores, indices = tf.math.top_k(probabilities, min(5, len(names)))
        best = {} if several else {"classes": tf.argmax(probabilities, axis=-1)}
        return best | {
            "probabilities": probabilities,
            "top5_names": tf.gather(names, indices),
            "top5_scores": scores,
        }

    return {"serving_default": classify, "images": logits}


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


def _read_onnx(path: str) -> Callable[[Arrays], Arrays]:
    """Loads the function that a file holds.

    onnxruntime computes where it is installed; else the reference implementation of `onnx`.
    """
    session: Any
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(path)
        names = session.output_names
    else:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))


def check(names: Sequence[str], forms: Sequence[str], model: model_source.Model) -> None:
    """Raises ConfigError if the `model` has only the formats `forms`, and `names` has another."""
    if other := [name for name in names if name not in forms]:
        raise ConfigError(
            f"--format={','.join(other)}: {model.source} is a model of the benchmark "
            f"{model.config.benchmark!r}, which is exported as {', '.join(forms)}"
        )


def files_in(path: str) -> list[str]:
    """A file, or all files in a folder, sorted."""
    if os.path.isfile(path):
        return [path]
    return sorted(f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names)


def megabytes(path: str) -> float:
    """The size of a file, or of all files in a folder."""
    return sum(map(os.path.getsize, files_in(path))) / 1e6


def filled(name: str, **values: Any) -> str:
    """A template of this folder with its values; the filter `safe_text` is for texts of users."""

    def safe(value: str) -> str:
        """Text as Markdown shows it, in one line and without effect."""
        line = " ".join(value.split())
        return re.sub(r"([\\`*_{}\[\]<>#|!&~])", r"\\\1", line)

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["safe_text"] = safe
    return environment.get_template(name).render(values)


def _sides(array: Any) -> list[int | None]:
    return [side if isinstance(side, int) else None for side in array.shape]
