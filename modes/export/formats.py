"""The formats of classifiers: how each is written, and how it is read back and run."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping

import jax
import ml_collections
import numpy as np
from jax import export

import benchmarks
from benchmarks import settling
from modes.export import onnx_graph, stablehlo
from modes.trained import Trained
from ops.portable import Portable, TorchForm

Run = Callable[[np.ndarray], np.ndarray]  # uint8[b, s, s, 3] -> float32[b, K]


@dataclasses.dataclass(frozen=True)
class Model:
    """What the formats are written from.

    Attributes:
      trained: the checkpoint.
      portable: its model.
      class_names: of the logits; () are none.
      torch: PyTorch's form where "hf" is wanted.
    """

    trained: Trained
    portable: Portable
    class_names: tuple[str, ...]
    torch: TorchForm | None

    @functools.cached_property
    def exported(self) -> export.Exported:
        """The function uint8[b, s, s, 3] -> logits of any batch, with its weights."""
        (batch,), size = export.symbolic_shape("batch"), self.portable.spec.size
        pixels = jax.ShapeDtypeStruct((batch, size, size, 3), np.uint8)
        return stablehlo.exported(self.portable.logits, pixels)


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
      path: the file or folder that it has in the export.
      write: writes it to a local path.
      runner: reads it back; returns the function that it computes.
      needs: a package that not everyone has, or "".
    """

    path: str
    write: Callable[[Model, str], None]
    runner: Callable[[Model, str], Run]
    needs: str = ""


def _write_hf(model: Model, path: str) -> None:
    from safetensors import numpy as safetensors

    form = model.torch
    assert form is not None
    safetensors.save_file(dict(form.arrays), path, {"format": "pt"})
    for name, content in form.files.items():
        with open(f"{os.path.dirname(path)}/{name}", "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _run_hf(model: Model, path: str) -> Run:
    """The model as an import reads it, by the rules for other libraries' weights."""
    folder = os.path.dirname(path)
    config = ml_collections.ConfigDict(model.trained.config.to_dict())
    settling.settle(config, folder, (), whole=True)
    uses = benchmarks.load(config.lock(), "").uses
    imported = uses.read_foreign(folder)
    assert imported is not None
    portable = uses.portable(imported.params, imported.model_state)
    assert portable is not None
    return lambda images: np.asarray(portable.logits(images))


def _write_onnx(model: Model, path: str) -> None:
    spec = json.dumps(model.portable.spec.as_dict())
    names = json.dumps(model.class_names)
    onnx_graph.write(model.portable.network, {"input_spec": spec, "class_names": names}, path)


def _write_savedmodel(model: Model, path: str) -> None:
    stablehlo.write_classifier(model.exported, model.portable.spec, model.class_names, f"{path}/1")


def _run_savedmodel(_: Model, path: str) -> Run:
    run = stablehlo.savedmodel_runner(f"{path}/1", "images")
    return lambda images: run({"images": images})["logits"]


def _run_stablehlo(_: Model, path: str) -> Run:
    run = stablehlo.runner(path)
    return lambda images: np.asarray(run(images))


FORMATS: Mapping[str, Format] = {
    "hf": Format("model.safetensors", _write_hf, _run_hf),
    "onnx": Format("model.onnx", _write_onnx, lambda _, path: onnx_graph.runner(path), "onnx"),
    "savedmodel": Format("savedmodel", _write_savedmodel, _run_savedmodel),
    "stablehlo": Format(
        "model.stablehlo",
        lambda model, path: stablehlo.write(model.exported, path),
        _run_stablehlo,
    ),
}
