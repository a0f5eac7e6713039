"""Uses a trained model: what predict.py does.

`Uses.answers` of a benchmark names one of `KINDS`, the modules that answer. Such a module has
`Options`, the flags of predict.py for its models, `FORMATS`, and `run(request, options, model)`,
which returns the exit code.
"""

import dataclasses
import sys
from typing import Any

from commands.predict import boxes, classes, items, sentences
from commands.predict.model import Request, prepare
from commands.predict.outputs import check_output, say
from common.errors import ConfigError
from engine import environment
from engine.checkpoint import model_source

KINDS: dict[str, Any] = {
    "classes": classes,
    "boxes": boxes,
    "sentences": sentences,
    "items": items,
}
# The end of the name of --out that stands for each format; the first that fits counts.
ENDS = {"coco": ".coco.json", "csv": ".csv", "json": ".json", "jsonl": ".jsonl", "text": ".txt"}


def run(request: Request) -> int:
    """Writes an answer for each input; returns the exit code: 1 if an input has no answer."""
    environment.show_log(sys.stderr)
    if request.out:
        check_output(request.out, "out")
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
    kind = KINDS[uses.answers]
    known = [field.name for field in dataclasses.fields(kind.Options)]
    for flag, value in request.options.items():
        if flag not in known:
            raise ConfigError(
                f"--{flag}={value}: {model.source} is a model of the benchmark "
                f"{model.config.benchmark!r}, which has no such flag; it has "
                f"{', '.join(f'--{name}' for name in known)}"
            )
    options = kind.Options(**request.options)
    form = _format(request.format, request.out, kind.FORMATS)
    checks = not getattr(options, "labels", "")
    model = prepare(model, request.accept_other_data, checks)
    return kind.run(dataclasses.replace(request, format=form), options, model)


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
