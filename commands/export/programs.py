"""Writes a model that is no classifier as a function, its weights and its search inside."""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from PIL import Image

from commands.export import onnx, stablehlo
from common.errors import ConfigError, OutputError
from common.portable import Arrays, Program
from engine import model_source


@dataclasses.dataclass(frozen=True)
class _Format:
    """One format.

    Attributes:
      path: the file or folder; "{}" is the program's name.
      write: writes it to a local path.
      runner: reads it back; returns the function that it computes.
      code: lines of Python that run it, of its path and the program's arguments.
      limit: the largest difference that is accepted, as a share of the largest value of an output.
      share: of an output, how many values may be off by more: another compiler rounds in another
        way, which changes the order of what is nearly equal.
      checks: how many examples are computed; each shape is compiled, in TensorFlow for seconds.
    """

    path: str
    write: Callable[[export.Exported, str], None]
    runner: Callable[[str], Callable[[Arrays], Arrays]]
    code: str
    limit: float
    share: float = 0.0
    checks: int | None = None


FORMATS: Mapping[str, _Format] = {
    "savedmodel": _Format(
        path="savedmodel{}",
        write=lambda exported, path: stablehlo.write_savedmodel(exported, f"{path}/1"),
        runner=lambda path: stablehlo.savedmodel_runner(f"{path}/1"),
        code="""import tensorflow as tf  # 2.21 or newer
model = tf.saved_model.load("{path}/1")
outputs = model.signatures["serving_default"]({keywords})
""",
        limit=1e-4,
        share=0.1,
        checks=2,
    ),
    "stablehlo": _Format(
        path="model{}.stablehlo",
        write=stablehlo.write,
        runner=stablehlo.runner,
        code="""import jax
data = open("{path}", "rb").read()
model = jax.export.deserialize(bytearray(data))
outputs = jax.jit(model.call)({entries})  # on CPU, TPU or GPU
""",
        limit=1e-5,
    ),
}


# The pictures that an export is checked with: drawn, always the same, and of several sizes.
_SHAPES = ((300, 400), (480, 360), (256, 256), (231, 517), (640, 333))


def draw() -> list[bytes]:
    """Five encoded pictures, JPEG and PNG: waves, gradients, edges and a little noise."""
    return [_draw(i, *shape, "PNG" if i == 2 else "JPEG") for i, shape in enumerate(_SHAPES)]


def _draw(number: int, height: int, width: int, form: str) -> bytes:
    noise = np.random.default_rng(number).normal(0, 8, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    waves = 127 + 90 * np.sin(x / (7 + 5 * number)) * np.cos(y / (11 + 3 * number))
    planes = np.stack([waves, 255 * x / width, 255 * y / height], axis=-1)
    inside = (x - width / 2) ** 2 + (y - height / 2) ** 2 < (min(height, width) / 3) ** 2
    planes[inside] = 255 - planes[inside][:, [(number + k) % 3 for k in range(3)]]
    file = io.BytesIO()
    Image.fromarray((planes + noise).clip(0, 255).astype(np.uint8)).save(file, form, quality=90)
    return file.getvalue()


def of(model: model_source.Model) -> Mapping[str, Program]:
    """The programs of a model, in float32; {} if it has none. UserError if a file is missing."""
    uses = model.in_float32().benchmark.uses
    uses.check_files(model.manifest, model.source)
    return uses.programs(model.params, model.model_state)


def choose(names: Sequence[str], model: model_source.Model) -> Sequence[str]:
    """The formats to write: `names`, or without any those of every such model.

    Raises:
      ConfigError: the model does not have one of `names`.
    """
    known = tuple(FORMATS)
    if model.benchmark.uses.single_shot(model.params, model.model_state):
        known = (*known, "onnx")
    if other := [name for name in names if name not in known]:
        raise ConfigError(
            f"--format={','.join(other)}: {model.source} is a model of the benchmark "
            f"{model.config.benchmark!r}, which is exported as {', '.join(known)}"
        )
    return names or tuple(FORMATS)


def write(
    model: model_source.Model, programs: Mapping[str, Program], folder: str, formats: Sequence[str]
) -> tuple[dict[str, Any], Sequence[str]]:
    """Writes the programs, checks them, and describes them in README.md.

    Args:
      model: the checkpoint.
      programs: of it, see `of`.
      folder: local.
      formats: names that `choose` returns.

    Returns:
      The facts about each file, and the names of the classes.

    Raises:
      OutputError: what was written computes something else.
      CheckpointError: the weights are not finite.
    """
    model.check_finite()
    rows, parts = {}, [f"# {model.config.benchmark}, step {model.step:,}", ""]
    for name, program in programs.items():
        suffix, exported = f"_{name}" if name else "", _exported(program)
        examples = program.examples(draw())
        wanted = [jax.jit(program.compute)(inputs) for inputs in examples]
        codes = {}
        for key, form in FORMATS.items():
            if key in formats:
                path = form.path.format(suffix)
                form.write(exported, f"{folder}/{path}")
                error = _check(key, f"{folder}/{path}", examples, wanted)
                rows[key + suffix] = {"path": path, "error": error}
                codes[path] = _filled(form, path, program)
        if "onnx" in formats:
            rows["onnx"] = onnx.export_detector(model, program, examples, folder)
            codes[onnx.PATH] = onnx.DETECTOR_CODE
        parts += _described(program, codes, examples[0])
        for file, content in program.files.items():
            with open(f"{folder}/{file}", "wb") as out:
                out.write(content)
    with open(f"{folder}/README.md", "w", encoding="utf-8") as file:
        file.write("\n".join(parts))
    return rows, [name for _, name in model.manifest.get("categories", ())]


def _exported(program: Program) -> export.Exported:
    scope = export.SymbolicScope()
    specs = {
        name: jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for name, (shape, dtype) in program.inputs.items()
    }
    return stablehlo.exported(jax.jit(program.compute), specs)


def _check(key: str, path: str, examples: Sequence[Arrays], wanted: Sequence[Arrays]) -> float:
    """Runs what was written, and prints its size and its largest error, which it returns.

    Raises:
      OutputError: the error is too large.
    """
    form = FORMATS[key]
    run, examples = form.runner(path), examples[: form.checks]
    error, share = difference([run(inputs) for inputs in examples], wanted, form.limit)
    if share > form.share:
        raise OutputError(
            f"--format={key}: what was written is off by {error:.1e} of the largest value of an "
            f"output, more than {form.limit:.0e}; nothing is exported"
        )
    remark = f", where rounding changes an order ({share:.1%} of the values)" if share else ""
    size = f"{os.path.basename(path)}, {_megabytes(path):.1f} MB"
    print(f"{key}: {size}, off by {error:.1e} of the largest value{remark}")
    return error


def difference(
    results: Sequence[Arrays], wanted: Sequence[Arrays], limit: float
) -> tuple[float, float]:
    """Compares outputs with the model's.

    Returns:
      The largest difference of a value, as a share of the largest value of its output, and the
      largest share of the values of an output that are off by more than `limit`.
    """
    errors, shares = [0.0], [0.0]
    for others, outputs in zip(results, wanted, strict=False):
        for name, x in outputs.items():
            x, other = (np.asarray(each).astype(np.float64) for each in (x, others[name]))
            differs = (x != other) & ~(np.isnan(x) & np.isnan(other))  # -inf - -inf is NaN
            largest = np.abs(x[np.isfinite(x)]).max(initial=1e-6)
            distance = np.abs(np.where(differs, other, 0) - np.where(differs, x, 0)) / largest
            errors.append(float(distance.max()))
            shares.append(float(np.mean(~(distance <= limit))))
    return float(np.max(errors)), max(shares)  # NaN if one is


def _described(program: Program, codes: Mapping[str, Sequence[str]], inputs: Arrays) -> list[str]:
    """The part of README.md about one program: its arrays, and the code that runs each file."""
    outputs: Any = jax.eval_shape(program.compute, inputs)
    batch = {len(x) for x in inputs.values()} if _is_batched(program) else ()
    shapes = {name: (shape, np.dtype(x).name) for name, (shape, x) in program.inputs.items()}
    for name, x in outputs.items():
        sides = ["batch" if i == 0 and side in batch else side for i, side in enumerate(x.shape)]
        shapes[name] = ", ".join(map(str, sides)), x.dtype.name
    table = [
        f"| `{name}` | {dtype}[{shape}] | {program.meaning[name]} |"
        for name, (shape, dtype) in shapes.items()
    ]
    lines = [f"## {', '.join(codes)}", "", f"It {program.task}.", ""]
    lines += ["| name | array | meaning |", "|---|---|---|", *table, ""]
    for code in codes.values():
        lines += ["```python", *code, "```", ""]
    return lines


def _is_batched(program: Program) -> bool:
    return all(shape.startswith("batch") for shape, _ in program.inputs.values())


def _filled(form: _Format, path: str, program: Program) -> list[str]:
    """The lines of Python that run a format of a program."""
    entries = ", ".join(f'"{name}": {name}' for name in program.inputs)
    keywords = ", ".join(f"{name}=tf.constant({name})" for name in program.inputs)
    code = form.code.replace("{path}", path).replace("{entries}", f"{{{entries}}}")
    return code.replace("{keywords}", keywords).rstrip().split("\n")


def _megabytes(path: str) -> float:
    """The size of a file, or of all files in a folder."""
    paths = [pathlib.Path(path), *pathlib.Path(path).rglob("*")]
    return sum(each.stat().st_size for each in paths if each.is_file()) / 1e6
