"""The model card of an export: a README.md with the front matter that Hugging Face reads."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from engine.report.history import History
from modes.export.formats import Model

_SHOWN = 20  # class names
_RECIPE = (  # keys of the config that say how a model was trained
    *("train_batch_size", "train_steps", "base_learning_rate", "learning_rate_schedule"),
    *("weight_decay", "label_smoothing", "moving_average_decay", "seed", "init_from"),
)
_LOADING = {
    "onnx": """### ONNX

```python
import onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(None, {"images": pixels})  # uint8 [b, SIZE, SIZE, 3], RGB
```
""",
    "savedmodel": """### TensorFlow, TensorFlow Serving

```python
import tensorflow as tf
model = tf.saved_model.load("savedmodel/1")
encoded = tf.io.read_file("photo.jpg")
model.signatures["serving_default"](image_bytes=encoded[tf.newaxis])["top5_names"]
model.signatures["images"](images=pixels)["logits"]  # uint8 [b, SIZE, SIZE, 3], RGB
```

TensorFlow Serving takes `savedmodel` as the base path of a model. The request is
`{"instances": [{"b64": "..."}]}`.
""",
    "stablehlo": """### jax

```python
import jax
model = jax.export.deserialize(bytearray(open("model.stablehlo", "rb").read()))
logits = model.call(pixels)  # uint8 [b, SIZE, SIZE, 3], RGB; on CPU, TPU or GPU
```

It needs the jax of `export.json`, or one that is newer by up to six months.
""",
    "tflite": """### TensorFlow Lite

`model.tflite` takes one image, uint8 [1, SIZE, SIZE, 3], RGB, and returns logits.
""",
    "int8": """### ONNX with 8-bit integers

`model_int8.onnx` has the input and the output of `model.onnx`, and about a quarter of its size.
""",
}
_TIMM = """### PyTorch

```python
import timm
model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()

from transformers import AutoModelForImageClassification  # needs timm
model = AutoModelForImageClassification.from_pretrained("FOLDER")
```
"""
_TORCHVISION = """
```python
import torchvision
from safetensors.torch import load_file
model = torchvision.models.ARCHITECTURE(num_classes=CLASSES).eval()
model.load_state_dict(load_file("FOLDER/model.safetensors"))
```
"""
_NATIVE = """### PyTorch

```python
from transformers import AutoImageProcessor, AutoModelForImageClassification
processor = AutoImageProcessor.from_pretrained("FOLDER")
model = AutoModelForImageClassification.from_pretrained("FOLDER")
```
"""


def text(model: Model, rows: dict[str, Any]) -> str:
    """The card of an export; `rows` are the facts about each format."""
    parts = [_front_matter(model), _model(model), _scores(model), _pixels(model), _errors(rows)]
    return "\n".join([*parts, _loading(model, rows), _limits()])


def _front_matter(model: Model) -> str:
    library = model.torch.library if model.torch else "tensorflow"
    lines = [
        "license: other  # yours to choose",
        f"library_name: {library}",
        "pipeline_tag: image-classification",
        "tags: [image-classification, jax, resnet]",
    ]
    scores, _ = _measured(model)
    if scores:
        metrics = [{"type": name, "value": round(value, 6)} for name, value in scores.items()]
        task = {"type": "image-classification"}
        results = [{"task": task, "dataset": {"name": "evaluation split"}, "metrics": metrics}]
        index = [{"name": str(model.trained.config.benchmark), "results": results}]
        lines += [f"metrics: {json.dumps(list(scores))}", f"model-index: {json.dumps(index)}"]
    return "\n".join(["---", *lines, "---", ""])  # JSON is YAML


def _measured(model: Model) -> tuple[dict[str, float], int]:
    """The accuracies of this checkpoint in the run's own evaluation or that of --mode=eval.

    They come with the number of images. Where there are none, it is ({}, 0).
    """
    workdir = os.path.dirname(os.path.dirname(model.trained.source))
    for folder in (workdir, f"{workdir}/eval"):
        for row in reversed(History(folder, writes=False).rows):
            scores = {name: value for name, value in row.items() if "accuracy" in name}
            if (row["split"], row["step"]) == ("eval", model.trained.step) and scores:
                return scores, int(row["examples"])
    return {}, 0


def _model(model: Model) -> str:
    trained, config = model.trained, model.trained.config
    count = len(model.network.steps[-1].arrays["bias"])
    shown = ", ".join(map(_safe, model.class_names[:_SHOWN]))
    more = f" and {count - _SHOWN:,} more" if count > _SHOWN and shown else ""
    facts = [f"It tells {count:,} classes apart" + (f": {shown}{more}." if shown else ".")]
    average = "the average of the weights over" if config.moving_average_decay else "the weights at"
    facts.append(f"It has {average} step {trained.step:,}.")
    if (images := trained.manifest.get("num_train_examples")) and trained.step:
        facts.append(f"It was trained on {images:,} images.")
    recipe = [f"* `{key}`: {_safe(str(config[key]))}" for key in _RECIPE if key in config]
    title = f"# {_safe(str(config.benchmark))}, depth {config.resnet_depth}"
    return "\n".join([title, "", *facts, "", "Recipe:", "", *recipe, ""])


def _scores(model: Model) -> str:
    scores, count = _measured(model)
    if not scores:
        return "## Scores\n\nThis checkpoint was not evaluated.\n"
    lines = [f"| {_safe(name)} | {value:.4f} |" for name, value in scores.items()]
    return "\n".join(
        [
            f"## Scores on {count:,} images of the evaluation split",
            "",
            "| metric | value |",
            "|---|--:|",
            *lines,
            "",
        ]
    )


def _pixels(model: Model) -> str:
    spec = json.dumps(model.portable.spec.as_dict(), indent=2)
    return (
        "## Input\n\nImages become pixels by this rule (`resize` 0: the central window is cropped "
        f"first and then resized to `size`):\n\n```json\n{spec}\n```\n"
    )


def _errors(rows: dict[str, Any]) -> str:
    lines = [
        f"| {name} | `{row['path']}` | {row['error']:.1e} | {_safe(row.get('remark', ''))} |"
        for name, row in rows.items()
    ]
    return "\n".join(
        [
            "## Files",
            "",
            "The error is the largest difference from the trained model's logits, as a share of "
            "the largest logit.",
            "",
            "| format | file | error | remark |",
            "|---|---|--:|---|",
            *lines,
            "",
        ]
    )


def _loading(model: Model, rows: dict[str, Any]) -> str:
    parts = []
    if form := model.torch:
        is_timm = form.library == "timm"
        parts.append(_TIMM if is_timm else _NATIVE)
        if re.fullmatch(r"resnet(18|34|50|101|152)", form.architecture):
            parts[0] += _TORCHVISION
        parts[0] = parts[0].replace("ARCHITECTURE", form.architecture)
    parts += [_LOADING[name] for name in rows if name in _LOADING]
    count = len(model.network.steps[-1].arrays["bias"])
    loading = "\n".join(["## Loading", "", *parts])
    return loading.replace("SIZE", str(model.network.size)).replace("CLASSES", str(count))


def _limits() -> str:
    return (
        "## Limits\n\nThe scores hold for pictures like those of the evaluation split. What the "
        "model does with other pictures was not examined.\n"
    )


def _safe(value: str) -> str:
    """Text as Markdown shows it, in one line and without effect."""
    line = " ".join(value.split())
    return re.sub(r"([\\`*_{}\[\]<>#|!&~])", r"\\\1", line)
