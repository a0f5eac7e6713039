"""A classifier in all formats, and the model card beside them.

The card is card.md, filled in; its front matter is for Hugging Face.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from safetensors import numpy as safetensors

from commands.export import formats
from common.errors import CheckpointError, ConfigError, OutputError
from common.exportable import ExportableClassifier, TorchForm
from common.images import input_spec
from common.images.input_spec import prepare_image
from engine.checkpoint import model_source
from engine.report.history import History

FORMATS = ("hf", "onnx", "savedmodel", "stablehlo")
_LIMIT = 1e-5  # the largest error that is accepted, as a share of the largest logit
# Keys of the config that say how a model was trained.
_RECIPE = (
    "train_batch_size",
    "train_steps",
    "base_learning_rate",
    "learning_rate_schedule",
    "weight_decay",
    "label_smoothing",
    "moving_average_decay",
    "seed",
    "init_from",
)
Compute = Callable[[np.ndarray], np.ndarray]  # uint8[b, s, s, 3] -> float32[b, K]


@dataclasses.dataclass(frozen=True)
class Classifier:
    """What the formats are written from, and the logits that they must compute."""

    trained: model_source.Model
    portable: ExportableClassifier
    names: Sequence[str]  # of the classes; () where they have no names
    torch: TorchForm | None  # where "hf" is wanted
    encoded: Sequence[bytes]  # pictures, in the formats of files
    images: np.ndarray  # uint8[n, s, s, 3], their pixels as evaluation and predict.py read them
    logits: np.ndarray  # float32[n, K] of the images, by the model itself

    @functools.cached_property
    def exported(self) -> export.Exported:
        """The function uint8[b, s, s, 3] -> logits of any batch, with its weights."""
        (batch,), size = export.symbolic_shape("batch"), self.portable.spec.size
        pixels = jax.ShapeDtypeStruct((batch, size, size, 3), np.uint8)
        return formats.exported(self.portable.logits, pixels)

    def write(self, name: str, path: str) -> None:
        """Writes a format to a local path."""
        if name == "hf":
            assert self.torch is not None
            safetensors.save_file(dict(self.torch.arrays), path, {"format": "pt"})
            for file, content in self.torch.files.items():
                text = json.dumps(content, indent=2, ensure_ascii=False)
                pathlib.Path(path).with_name(file).write_text(text + "\n", encoding="utf-8")
            return
        spec = self.portable.spec
        described = json.dumps(spec.as_dict())
        facts = {"input_spec": described, "class_names": json.dumps(self.names)}
        program = None if name == "onnx" else self.exported
        facts |= {"labels": "several"} if self.portable.several else {}
        classes = spec, self.names, self.portable.several
        formats.write(name, path, program, self.portable.draw, facts, classes)

    def read(self, name: str, path: str) -> Compute:
        """Reads a format back, "hf" as other libraries' weights; returns what it computes."""
        if name == "hf":
            back = model_source.load(path, recipe=lambda _: self.trained.config, quiet=True)
            portable = back.benchmark.uses.portable(back.params, back.model_state)
            assert portable is not None
            return lambda images: np.asarray(portable.logits(images))
        run = formats.read(name, path, "images")
        if name == "stablehlo":
            return lambda images: np.asarray(run(images))
        return lambda images: run({"images": images})["logits"]

    def error(self, run: Compute) -> float:
        """The largest difference, as a share of the largest logit.

        The pictures are computed all at once, and one alone.
        """
        together, alone = run(self.images), run(self.images[:1])
        wanted = np.concatenate([self.logits, self.logits[:1]])
        distance = np.abs(np.concatenate([together, alone]) - wanted)
        return float(np.max(distance) / max(np.max(np.abs(self.logits)), 1e-6))

    def check_serving(self, path: str) -> dict[str, Any]:
        """Runs a SavedModel on encoded pictures; returns how far its pixels are off.

        OutputError if its probabilities do not follow from its pixels.
        """
        spec = self.portable.spec
        results = formats.read("savedmodel", path)({"image_bytes": list(self.encoded)})
        pixels = [input_spec.evaluated(p, spec, is_portable=True).numpy() for p in self.encoded]
        levels = np.abs(np.stack(pixels).astype(int) - self.images)
        shares = jax.nn.sigmoid if self.portable.several else jax.nn.softmax
        expected = np.asarray(shares(self.portable.logits(np.stack(pixels))))
        error = float(np.max(np.abs(results["probabilities"] - expected)))
        if not error <= 1e-4:
            raise OutputError(f"savedmodel: serving_default is off by {error:.1e} in probability")
        return {
            "pixel_error_levels": {"largest": int(levels.max()), "mean": float(levels.mean())},
            "probability_error": error,
        }


def write(
    model: model_source.Model,
    names: Sequence[str],
    allow_mismatch: bool,
    pictures: Sequence[bytes],
    folder: str,
) -> tuple[dict[str, Any], Sequence[str]]:
    """Writes formats and the card into a local folder, and checks them with encoded `pictures`.

    Returns the facts about each format, and the names of the classes. UserError if the model has no
    such form or no finite logits, or if what was written computes something else.
    """
    portable = model.benchmark.uses.portable(model.params, model.model_state)
    if portable is None:
        raise ConfigError(
            f"{model.source} is a model of the benchmark {model.config.benchmark!r}, which has no "
            "export"
        )
    formats.check(names, FORMATS, model)
    labels = model_source.class_names(model.manifest, portable.classes)
    if not labels:
        print("NOTE the model has no class names: numbers stand for them")
    torch = portable.torch(labels) if "hf" in names else None
    if torch and torch.mismatch and not allow_mismatch:
        raise ConfigError(
            f"--format=hf: {torch.mismatch}. The other formats compute exactly this model; "
            "--allow_mismatch writes PyTorch's form nevertheless, with the size of its error"
        )
    images = np.stack([prepare_image(each, portable.spec) for each in pictures])
    logits = np.asarray(portable.logits(images))
    if not np.isfinite(logits).all():
        raise CheckpointError(
            f"{model.source}: the model's logits are not finite; the run diverged"
        )
    content = Classifier(model, portable, labels, torch, pictures, images, logits)
    rows = {name: _export(name, content, folder) for name in names}
    if "savedmodel" in names:
        rows["savedmodel"] |= content.check_serving(f"{folder}/{formats.PATHS['savedmodel']}")
    spec = json.dumps(portable.spec.as_dict(), indent=2)
    pathlib.Path(folder, "input_spec.json").write_text(spec + "\n", encoding="utf-8")
    pathlib.Path(folder, "README.md").write_text(card_text(content, rows), encoding="utf-8")
    return rows, labels


def _export(name: str, content: Classifier, folder: str) -> dict[str, Any]:
    """Writes one format into a folder, reads it back and runs it; returns the facts about it."""
    path = f"{folder}/{formats.PATHS[name]}"
    content.write(name, path)
    error = content.error(content.read(name, path))
    torch = content.torch if name == "hf" else None
    mismatch = torch.mismatch if torch else ""
    if not error <= _LIMIT and not mismatch:
        raise OutputError(
            f"--format={name}: what was written is off by {error:.1e} of the largest logit, more "
            f"than {_LIMIT:.0e}; nothing is exported"
        )
    facts: dict[str, Any] = {"path": formats.PATHS[name], "error": error}
    text = f"{name}: {formats.megabytes(path):.1f} MB, off by {error:.1e} of the largest logit"
    if note := "; ".join(filter(None, [mismatch, torch.pixels if torch else ""])):
        facts["remark"] = note
        text += f"; {note}"
    print(text)
    return facts


# The card.


def card_text(model: Classifier, rows: dict[str, Any]) -> str:
    """The card of an export; `rows` are the facts about each format."""
    trained, config = model.trained, model.trained.config
    scores, evaluated = _measured(trained)
    metrics = [{"type": name, "value": round(value, 6)} for name, value in scores.items()]
    results = {
        "task": {"type": "image-classification"},
        "dataset": {"name": "evaluation split"},
        "metrics": metrics,
    }
    return formats.filled(
        "card.md",
        trained=trained,
        config=config,
        recipe=[key for key in _RECIPE if key in config],
        labels=model.names,
        count=model.portable.classes,
        several=model.portable.several,
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
    """(scores of this checkpoint, number of images), by the run's evaluation or --mode=eval.

    It is ({}, 0) where the checkpoint was not evaluated.
    """
    for folder in (trained.workdir, f"{trained.workdir}/eval"):
        for row in reversed(History(folder, writes=False).rows):
            scores = {k: row[k] for k in row if "accuracy" in k or k in ("mAP", "macro_f1")}
            if (row["split"], row["step"]) == ("eval", trained.step) and scores:
                return scores, int(row["examples"])
    return {}, 0
