"""The formats of --mode=export: how each is written, and how it is read back and run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping

import ml_collections
import numpy as np

import benchmarks
from benchmarks import settling
from modes.export import onnx_graph, quantised, savedmodel, stablehlo
from modes.trained import Trained
from ops.network import Network
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
      pictures: uint8[n, s, s, 3] to calibrate on, where "int8" is wanted; else None.
      held_out: other such pictures, to check the calibration with.
    """

    trained: Trained
    portable: Portable
    class_names: tuple[str, ...]
    torch: TorchForm | None
    pictures: np.ndarray | None = None
    held_out: np.ndarray | None = None

    @property
    def network(self) -> Network:
        return self.portable.network


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
      path: the file or folder that it has in the export.
      write: writes it to a local path.
      runner: reads it back; returns the function that it computes.
      limit: the largest error that is accepted, as a share of the largest logit.
      needs: packages that not everyone has.
    """

    path: str
    write: Callable[[Model, str], None]
    runner: Callable[[Model, str], Run]
    limit: float = 1e-5
    needs: tuple[str, ...] = ()


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
    onnx_graph.write(model.network, {"input_spec": spec, "class_names": names}, path)


def _write_savedmodel(model: Model, path: str) -> None:
    savedmodel.write(model.network, model.portable.spec, model.class_names, f"{path}/1")


def _write_int8(model: Model, path: str) -> None:
    assert model.pictures is not None
    quantised.write_int8(model.network, model.pictures, path)


FORMATS: Mapping[str, Format] = {
    "hf": Format("model.safetensors", _write_hf, _run_hf),
    "onnx": Format(
        "model.onnx", _write_onnx, lambda _, path: onnx_graph.runner(path), needs=("onnx",)
    ),
    "savedmodel": Format(
        "savedmodel", _write_savedmodel, lambda _, path: savedmodel.runner(f"{path}/1")
    ),
    "stablehlo": Format(
        "model.stablehlo",
        lambda model, path: stablehlo.write(model.portable.logits, model.network.size, path),
        lambda _, path: stablehlo.runner(path),
    ),
    "tflite": Format(
        "model.tflite",
        lambda model, path: quantised.write_tflite(model.network, path),
        lambda _, path: quantised.tflite_runner(path),
    ),
    "int8": Format(
        "model_int8.onnx",
        _write_int8,
        lambda _, path: onnx_graph.runner(path),
        limit=0.2,
        needs=("onnx", "onnxruntime"),
    ),
}
