"""Uses a trained model: what predict.py does."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from benchmarks.uses import Boxes, Classes, Items, Sentences, Uses
from commands.predict import boxes, classes, items, sentences
from commands.predict.model import Request
from common import foreign
from common.errors import ConfigError
from common.images import photos
from engine import compiler, devices, environment, locations
from engine.checkpoint import model_source
from engine.checkpoint.model_source import Model


class Kind(NamedTuple):
    """How predict.py answers with one kind of models."""

    options: type  # the flags for such models, a dataclass
    formats: tuple[str, ...]  # of the results
    run: Callable[[Request, Any, Model], int]  # of the request, `options`, the model; the exit code


KINDS: dict[type[Uses], Kind] = {
    Classes: Kind(classes.Options, classes.FORMATS, classes.run),
    Boxes: Kind(boxes.Options, boxes.FORMATS, boxes.run),
    Sentences: Kind(sentences.Options, sentences.FORMATS, sentences.run),
    Items: Kind(items.Options, items.FORMATS, items.run),
}
_KEYS = {"data_dir": "data_dir", "beams": "beam_size"}  # of the config, by the flag that sets them
# The end of the name of --out that stands for each format; the first that fits counts.
ENDS = {"coco": ".coco.json", "csv": ".csv", "json": ".json", "jsonl": ".jsonl", "text": ".txt"}


def run(request: Request) -> int:
    """Writes an answer for each input; returns the exit code: 1 if an input has no answer."""
    environment.show_log(sys.stderr)
    if request.out:
        locations.check_file(request.out, "--out")
    flag, names = ("--workdir", ()) if request.recipe is None else ("--model", foreign.NAMES)
    path = locations.check_path(request.model, flag, names)
    values = {key: value for name, key in _KEYS.items() if (value := request.options.get(name))}
    if "data_dir" in values:
        values["data_dir"] = locations.check_path(values["data_dir"], "--data_dir")
    model = model_source.load(path, request.checkpoint, flag, request.recipe, request.keys)
    uses = model.benchmark.uses
    kind = next((kind for use, kind in KINDS.items() if isinstance(uses, use)), None)
    if kind is None:
        raise ConfigError(
            f"{model.source} is a model of the benchmark {model.config.benchmark!r}, which "
            f"predict.py cannot use; {uses.hint}"
        )
    flags = [field.name for field in dataclasses.fields(kind.options)]
    for name, value in request.options.items():
        if name not in flags:
            raise ConfigError(
                f"--{name}={value}: {model.source} is a model of the benchmark "
                f"{model.config.benchmark!r}, which has no such flag; it has "
                f"{', '.join(f'--{flag}' for flag in flags)}"
            )
    if absent := [name for name, key in _KEYS.items() if key in values and key not in model.config]:
        raise ConfigError(
            f"--{absent[0]}: the recipe of {model.source} has no config.{_KEYS[absent[0]]}"
        )
    form = _format(request.format, request.out, kind.formats)
    model = prepare(model, request.accept_other_data, not request.options.get("labels"), **values)
    options = kind.options(**request.options)
    return kind.run(dataclasses.replace(request, format=form), options, model)


def prepare(model: Model, accept_other_data: bool, checks_data: bool = True, **keys: Any) -> Model:
    """The model that answers: with `keys` of its config, in float32 on CPUs, where that is as fast.

    With `checks_data` it refuses a model whose data have other classes by now, unless
    `accept_other_data` is True.
    """
    photos.quiet()
    model = model.changed(**keys) if keys else model
    if checks_data:
        model.check_data(accept_other_data)
    devices.check_platform()
    compiler.use_cache(model.config.compilation_cache)
    return model.in_float32() if jax.default_backend() == "cpu" else model


def _format(given: str, out: str, formats: tuple[str, ...]) -> str:
    """The format of the results: `given`, else the one that the name of `out` ends with.

    Text may have any name. Without both arguments the format is text, for models that have it, or
    else "table" on a terminal and "csv" elsewhere.
    """
    other = "text" if "text" in formats else ""
    form = given or next((form for form, end in ENDS.items() if out.lower().endswith(end)), other)
    if (given or out) and form not in formats:
        ends = ", ".join(ENDS[form] for form in formats)
        flag = f"--format={given}" if given else f"--out={out}"
        raise ConfigError(f"{flag}: this model's results are files named {ends}")
    return form or ("table" if sys.stdout.isatty() else "csv")
