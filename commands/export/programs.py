"""Writes a model that is no classifier as a function, its weights and its search inside.

README.md beside it is program.md, filled in.
"""

import io
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from PIL import Image

from commands.export import formats, translators
from common.errors import OutputError
from common.exportable import Arrays, ExportableProgram
from engine.checkpoint import model_source

FORMATS = (*formats.DEFAULTS, "onnx")
_SHARE = 0.1  # of the values of an output that a SavedModel may reorder
PREDICTED_LIMIT = 1e-3  # of what predict.py says, in score or as a share of the largest side
# The largest difference that is accepted, as a share of the largest value of an output.
_LIMITS = {"savedmodel": 1e-4, "stablehlo": 1e-5, "onnx": PREDICTED_LIMIT}
# The pictures that an export is checked with: drawn, always the same, and of several sizes.
_SHAPES = ((300, 400), (480, 360), (256, 256), (231, 517), (640, 333))
Check = tuple[Arrays, Arrays, Arrays | None]  # inputs, the program's outputs, predict.py's


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


def of(model: model_source.Model) -> Mapping[str, ExportableProgram]:
    """The programs of a model, in float32; {} for classifiers. UserError if a file is missing."""
    uses = model.in_float32().benchmark.uses
    uses.check_files(model.manifest, model.source)
    return uses.programs(model.params, model.model_state)


def write(
    model: model_source.Model,
    programs: Mapping[str, ExportableProgram],
    names: Sequence[str],
    folder: str,
) -> tuple[dict[str, Any], Sequence[str]]:
    """Writes the programs of a model into a local folder, checks them, and describes them.

    `names` are the formats; () means the formats that every such model has. Returns the facts about
    each file, and the names of the classes. UserError if the model does not have a format or finite
    weights, or if what was written computes something else.
    """
    forms = [name for name in FORMATS if name != "onnx" or any(p.draw for p in programs.values())]
    forms += model.benchmark.uses.formats
    formats.check(names, forms, model)
    model.check_finite()
    labels = [name for _, name in model.manifest.get("categories", ())]
    chosen, rows, shown = names or formats.DEFAULTS, {}, []
    for suffix, program in programs.items() if {*chosen} & {*FORMATS} else ():
        exported = _exported(program) if {*chosen} & {*formats.DEFAULTS} else None
        checks, paths = _checks(program), {}
        for name in FORMATS:
            if name in chosen:
                stem, *end = formats.PATHS[name].split(".")
                paths[name] = ".".join([f"{stem}_{suffix}" if suffix else stem, *end])
                path, facts = f"{folder}/{paths[name]}", {"class_names": json.dumps(labels)}
                formats.write(name, path, exported, program.draw, facts)
                row = {"path": paths[name], "error": _check(name, path, program, checks)}
                rows[f"{name}_{suffix}" if suffix else name] = row
        shown.append({"paths": paths, "program": program, "arrays": _arrays(program, checks[0])})
        for file, content in program.files.items():
            pathlib.Path(folder, file).write_bytes(content)
    rows |= {
        name: translators.FORMS[name](model, folder) for name in chosen if name in translators.FORMS
    }
    text = formats.filled("program.md", model=model, programs=shown, rows=rows)
    pathlib.Path(folder, "README.md").write_text(text, encoding="utf-8")
    return rows, labels


def _exported(program: ExportableProgram) -> export.Exported:
    scope = export.SymbolicScope()
    specs = {
        name: jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for name, (shape, dtype) in program.inputs.items()
    }
    return formats.exported(jax.jit(program.compute), specs)


def _checks(program: ExportableProgram) -> list[Check]:
    """The examples; OutputError if the program computes something else than predict.py."""
    compute, checks = jax.jit(program.compute), []
    for inputs, predicted in program.examples(draw()):
        outputs = compute(inputs)
        if program.distance and predicted is not None:
            error = program.distance(predicted, outputs)
            if not error <= PREDICTED_LIMIT:
                raise OutputError(
                    f"the program to export is off by {error:.1e} of what predict.py computes, "
                    f"more than {PREDICTED_LIMIT:.0e}; nothing is exported"
                )
        checks.append((inputs, outputs, predicted))
    return checks


def _check(name: str, path: str, program: ExportableProgram, checks: Sequence[Check]) -> float:
    """Runs what was written, and prints its size and its largest error, which it returns.

    Another compiler rounds in another way, which changes the order of what is nearly equal. So a
    share of a SavedModel's values may be off, and ONNX is compared by the program's distance.
    """
    if name == "savedmodel":
        checks = checks[:2]  # TensorFlow compiles each shape for seconds
    run, limit, share = formats.read(name, path), _LIMITS[name], 0.0
    results = [run(inputs) for inputs, *_ in checks]
    if name == "onnx" and program.distance:
        wanted = [predicted or outputs for _, outputs, predicted in checks]
        error = float(np.max([*map(program.distance, wanted, results)]))
        is_off = not error <= limit
    else:
        error, share = difference(results, [outputs for _, outputs, _ in checks], limit)
        is_off = share > (_SHARE if name == "savedmodel" else 0)
    if is_off:
        raise OutputError(
            f"--format={name}: what was written is off by {error:.1e} of the largest value of an "
            f"output, more than {limit:.0e}; nothing is exported"
        )
    note = f", where rounding changes an order ({share:.1%} of the values)" if share else ""
    size = f"{os.path.basename(path)}, {formats.megabytes(path):.1f} MB"
    print(f"{name}: {size}, off by {error:.1e} of the largest value{note}")
    return error


def difference(
    results: Sequence[Arrays], wanted: Sequence[Arrays], limit: float
) -> tuple[float, float]:
    """(error, share) that say how far `results` are off the `wanted` outputs.

    The error is the largest difference of a value, as a share of the largest value of its output.
    The share counts the values of an output that are off by more than `limit`, in the worst output.
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


def _arrays(program: ExportableProgram, check: Check) -> dict[str, tuple[str, str]]:
    """(dtype, shape) of each input and output; "batch" is the number of examples in `check`."""
    inputs, outputs, _ = check
    is_batched = all(shape.startswith("batch") for shape, _ in program.inputs.values())
    batch = {len(x) for x in inputs.values()} if is_batched else ()
    arrays = {name: (np.dtype(x).name, shape) for name, (shape, x) in program.inputs.items()}
    for name, x in outputs.items():
        sides = ["batch" if i == 0 and side in batch else side for i, side in enumerate(x.shape)]
        arrays[name] = x.dtype.name, ", ".join(map(str, sides))
    return arrays
