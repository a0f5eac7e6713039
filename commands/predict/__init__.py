"""Uses a trained model: what predict.py does.

A kind of answers is a module of this folder, named as `Uses.answers` of the benchmarks that give
it. It has `Options`, the flags of predict.py that only some models have, and
`run(request, options, model, stdin)`, which returns the exit code.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from commands.predict import boxes, classes, items, sentences
from commands.predict.model import Request, choose_precision
from commands.predict.outputs import FORMATS, say
from common.errors import ConfigError
from common.images import photos
from engine import compiler, environment, locations, model_source, resuming
from engine import mesh as meshes

KINDS = {"classes": classes, "boxes": boxes, "sentences": sentences, "items": items}
# The end of the name of --out that stands for each format; the first that fits counts.
ENDS = {"coco": ".coco.json", **{form: f".{form}" for form in FORMATS}, "text": ".txt"}


def run(request: Request, stdin: Iterable[str]) -> int:
    """Writes an answer for each input; returns the exit code: 1 if an input has none.

    `stdin` are the lines that the source "-" stands for.

    Raises:
      UserError: a mistake that the user can fix; before any input is read.
    """
    photos.quiet()
    environment.show_log(sys.stderr)
    if request.out:
        _check_output(request.out, "out")
    model = model_source.load(
        request.model,
        request.checkpoint,
        "--workdir" if request.recipe is None else "--model",
        request.recipe,
        request.keys,
        say,
    )
    uses = model.benchmark.uses
    if not uses.answers:
        raise ConfigError(
            f"{model.source} is a model of the benchmark {model.config.benchmark!r}, which "
            f"predict.py cannot use; {uses.hint}"
        )
    kind: Any = KINDS[uses.answers]
    options = _options(kind.Options, request.options, model)
    form = _format(request.format, request.out, kind.Options.formats)
    for field in dataclasses.fields(options):
        path, end = getattr(options, field.name), field.metadata["end"]
        if end and path:
            if not path.lower().endswith(end):
                raise ConfigError(f"--{field.name}={path}: must end with {end}")
            _check_output(path, field.name)
    if not getattr(options, "labels", ""):
        resuming.check_data(model, request.accept_other_data, say)
    request = dataclasses.replace(request, format=form)
    meshes.check_platform()
    compiler.use_cache(model.config.compilation_cache)
    return kind.run(request, options, choose_precision(model), stdin)


def _options(known: Any, given: Mapping[str, Any], model: model_source.Model) -> Any:
    """The flags of one kind of answers; ConfigError for a flag of another kind."""
    names = [field.name for field in dataclasses.fields(known)]
    for flag, value in given.items():
        if flag not in names:
            raise ConfigError(
                f"--{flag}={value}: {model.source} is a model of the benchmark "
                f"{model.config.benchmark!r}, which has no such flag; it has "
                f"{', '.join(f'--{name}' for name in names)}"
            )
    return known(**given)


def _format(given: str, out: str, formats: tuple[str, ...]) -> str:
    """The format of the results: `given`, else by the name of `out`, which may be any for text.

    Without both it is text, or else "table" on a terminal and "csv" elsewhere.
    """
    other = "text" if "text" in formats else ""
    form = given or next((form for form, end in ENDS.items() if out.lower().endswith(end)), other)
    if (given or out) and form not in formats:
        ends = ", ".join(ENDS[form] for form in formats)
        flag = f"--format={given}" if given else f"--out={out}"
        raise ConfigError(f"{flag}: this model's results are files named {ends}")
    return form or ("table" if sys.stdout.isatty() else "csv")


def _check_output(path: str, flag: str) -> None:
    """Refuses a file that cannot be written, before anything is computed."""
    locations.check_path(path, f"--{flag}")
    if epath.Path(path).is_dir():
        raise ConfigError(f"--{flag}={path} is a folder; name a file in it")
    locations.check_folder(os.path.dirname(path) or ".", f"--{flag}")
