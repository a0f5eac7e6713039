"""The formats of classifiers: how each is written, read back and run, and the model card.

The card is card.md, filled in; its front matter is for Hugging Face.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jinja2
import numpy as np
from jax import export

from commands.export import onnx, stablehlo
from common.portable import Portable, TorchForm
from engine import model_source
from engine.report.history import History

_RECIPE = (  # keys of the config that say how a model was trained
    *("train_batch_size", "train_steps", "base_learning_rate", "learning_rate_schedule"),
    *("weight_decay", "label_smoothing", "moving_average_decay", "seed", "init_from"),
)
Compute = Callable[[np.ndarray], np.ndarray]  # uint8[b, s, s, 3] -> float32[b, K]


@dataclasses.dataclass(frozen=True)
class Model:
    """What the formats are written from.

    Attributes:
      trained: the checkpoint.
      portable: its model.
      class_names: of the logits; () are none.
      torch: PyTorch's form where "hf" is wanted.
    """

    trained: model_source.Model
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
    runner: Callable[[Model, str], Compute]
    needs: str = ""


def _write_hf(model: Model, path: str) -> None:
    from safetensors import numpy as safetensors

    form = model.torch
    assert form is not None
    safetensors.save_file(dict(form.arrays), path, {"format": "pt"})
    for name, content in form.files.items():
        with open(f"{os.path.dirname(path)}/{name}", "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _run_hf(model: Model, path: str) -> Compute:
    """The model as an import reads it, by the rules for other libraries' weights."""
    back = model_source.load(path, recipe=model.trained.config, say=lambda line: None)
    portable = back.benchmark.uses.portable(back.params, back.model_state)
    assert portable is not None
    return lambda images: np.asarray(portable.logits(images))


def _write_onnx(model: Model, path: str) -> None:
    spec = json.dumps(model.portable.spec.as_dict())
    names = json.dumps(model.class_names)
    onnx.write_classifier(model.portable.network, {"input_spec": spec, "class_names": names}, path)


def _write_savedmodel(model: Model, path: str) -> None:
    stablehlo.write_classifier(model.exported, model.portable.spec, model.class_names, f"{path}/1")


def _run_savedmodel(_: Model, path: str) -> Compute:
    run = stablehlo.savedmodel_runner(f"{path}/1", "images")
    return lambda images: run({"images": images})["logits"]


def _run_stablehlo(_: Model, path: str) -> Compute:
    run = stablehlo.runner(path)
    return lambda images: np.asarray(run(images))


FORMATS: Mapping[str, Format] = {
    "hf": Format("model.safetensors", _write_hf, _run_hf),
    "onnx": Format("model.onnx", _write_onnx, lambda _, path: onnx.classifier_runner(path), "onnx"),
    "savedmodel": Format("savedmodel", _write_savedmodel, _run_savedmodel),
    "stablehlo": Format(
        "model.stablehlo",
        lambda model, path: stablehlo.write(model.exported, path),
        _run_stablehlo,
    ),
}


# The card.


def card_text(model: Model, rows: dict[str, Any]) -> str:
    """The card of an export; `rows` are the facts about each format."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["safe_text"] = _safe
    trained, config = model.trained, model.trained.config
    scores, evaluated = _measured(trained)
    metrics = [{"type": name, "value": round(value, 6)} for name, value in scores.items()]
    results = {
        "task": {"type": "image-classification"},
        "dataset": {"name": "evaluation split"},
        "metrics": metrics,
    }
    return environment.get_template("card.md").render(
        trained=trained,
        config=config,
        recipe=[key for key in _RECIPE if key in config],
        labels=model.class_names,
        count=len(model.portable.network.steps[-1].arrays["bias"]),
        size=model.portable.spec.size,
        spec=json.dumps(model.portable.spec.as_dict(), indent=2),
        torch=model.torch,
        rows=rows,
        scores=scores,
        evaluated=evaluated,
        metrics=json.dumps(list(scores)),
        index=json.dumps([{"name": str(config.benchmark), "results": [results]}]),
    )


def _measured(trained: model_source.Model) -> tuple[dict[str, float], int]:
    """(accuracies of this checkpoint, number of images), by the run's evaluation or --mode=eval.

    Where there are none, it is ({}, 0).
    """
    for folder in (trained.workdir, f"{trained.workdir}/eval"):
        for row in reversed(History(folder, writes=False).rows):
            scores = {name: value for name, value in row.items() if "accuracy" in name}
            if (row["split"], row["step"]) == ("eval", trained.step) and scores:
                return scores, int(row["examples"])
    return {}, 0


def _safe(value: str) -> str:
    """Text as Markdown shows it, in one line and without effect."""
    line = " ".join(value.split())
    return re.sub(r"([\\`*_{}\[\]<>#|!&~])", r"\\\1", line)
