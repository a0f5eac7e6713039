"""The model card of an export: card.md, filled in. Its front matter is for Hugging Face."""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

import jinja2

from engine.report.history import History
from modes.export.formats import Model
from modes.trained import Trained

_RECIPE = (  # keys of the config that say how a model was trained
    *("train_batch_size", "train_steps", "base_learning_rate", "learning_rate_schedule"),
    *("weight_decay", "label_smoothing", "moving_average_decay", "seed", "init_from"),
)


def text(model: Model, rows: dict[str, Any]) -> str:
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


def _measured(trained: Trained) -> tuple[dict[str, float], int]:
    """(accuracies of this checkpoint, number of images), by the run's evaluation or --mode=eval.

    Where there are none, it is ({}, 0).
    """
    workdir = os.path.dirname(os.path.dirname(trained.source))
    for folder in (workdir, f"{workdir}/eval"):
        for row in reversed(History(folder, writes=False).rows):
            scores = {name: value for name, value in row.items() if "accuracy" in name}
            if (row["split"], row["step"]) == ("eval", trained.step) and scores:
                return scores, int(row["examples"])
    return {}, 0


def _safe(value: str) -> str:
    """Text as Markdown shows it, in one line and without effect."""
    line = " ".join(value.split())
    return re.sub(r"([\\`*_{}\[\]<>#|!&~])", r"\\\1", line)
