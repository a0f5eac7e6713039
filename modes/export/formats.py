"""The formats of --mode=export: how each is written, and how it is read back and run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

import ml_collections
import numpy as np

import benchmarks
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
      write: writes it, into a local folder.
      runner: the function of what was written into a folder.
      limit: the largest error that is accepted, as a share of the largest logit.
      needs: packages that not everyone has.
    """

    path: str
    write: Callable[[Model, str], None]
    runner: Callable[[Model, str], Run]
    limit: float = 1e-5
    needs: tuple[str, ...] = ()


def _write_hf(model: Model, folder: str) -> None:
    from safetensors import numpy as safetensors

    form = model.torch
    assert form is not None
    safetensors.save_file(dict(form.arrays), f"{folder}/model.safetensors", {"format": "pt"})
    for name, content in form.files.items():
        with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _run_hf(model: Model, folder: str) -> Run:
    """The model as an import reads it, by the rules for other libraries' weights."""
    config = ml_collections.ConfigDict(model.trained.config.to_dict())
    benchmarks.settle(config, folder, (), whole=True)
    benchmark = benchmarks.load(config.lock(), "")
    imported = benchmark.uses.read_foreign(folder)
    assert imported is not None
    portable = benchmark.uses.portable(imported.params, imported.model_state)
    assert portable is not None
    return lambda images: np.asarray(portable.logits(images))


def _write_onnx(model: Model, folder: str) -> None:
    facts = {
        "input_spec": json.dumps(model.portable.spec.as_dict()),
        "class_names": json.dumps(model.class_names),
    }
    with open(f"{folder}/model.onnx", "wb") as file:
        file.write(onnx_graph.model_bytes(model.network, facts))


def _write_savedmodel(model: Model, folder: str) -> None:
    spec, names = model.portable.spec, model.class_names
    savedmodel.write(model.network, spec, names, f"{folder}/savedmodel/1")


def _write_stablehlo(model: Model, folder: str) -> None:
    with open(f"{folder}/model.stablehlo", "wb") as file:
        file.write(stablehlo.model_bytes(model.portable.logits, model.network.size))


def _write_tflite(model: Model, folder: str) -> None:
    with open(f"{folder}/model.tflite", "wb") as file:
        file.write(quantised.tflite_bytes(model.network))


def _write_int8(model: Model, folder: str) -> None:
    assert model.pictures is not None
    quantised.write_int8(model.network, model.pictures, f"{folder}/model_int8.onnx")


FORMATS: Mapping[str, Format] = {
    "hf": Format("model.safetensors", _write_hf, _run_hf),
    "onnx": Format(
        "model.onnx",
        _write_onnx,
        lambda _, folder: onnx_graph.runner(f"{folder}/model.onnx"),
        needs=("onnx",),
    ),
    "savedmodel": Format(
        "savedmodel",
        _write_savedmodel,
        lambda _, folder: savedmodel.runner(f"{folder}/savedmodel/1"),
    ),
    "stablehlo": Format(
        "model.stablehlo",
        _write_stablehlo,
        lambda _, folder: stablehlo.runner(f"{folder}/model.stablehlo"),
    ),
    "tflite": Format(
        "model.tflite",
        _write_tflite,
        lambda _, folder: quantised.tflite_runner(f"{folder}/model.tflite"),
    ),
    "int8": Format(
        "model_int8.onnx",
        _write_int8,
        lambda _, folder: onnx_graph.runner(f"{folder}/model_int8.onnx"),
        limit=0.2,
        needs=("onnx", "onnxruntime"),
    ),
}
