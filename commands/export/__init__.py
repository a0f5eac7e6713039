"""--mode=export: writes a trained model for other programs, and checks what it wrote.

Every format is read back and computes the outputs of drawn pictures. An export whose error is too
large is not written.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from etils import epath

from commands.export import classifiers, programs
from commands.export.formats import DEFAULTS, PATHS, files_in
from common.data import storage
from common.errors import ConfigError, OutputError, one_line, parse_json, visible
from common.tensorflow import tensorflow
from engine import environment, locations
from engine.checkpoint import model_source

_LIST = "export.json"  # a folder that has it is an export


def run(
    path: str,
    checkpoint: str,
    formats: str,
    out: str = "",
    allow_mismatch: bool = False,
    accept_other_data: bool = False,
    overwrite: bool = False,
) -> None:
    """Exports the model at `path`, a workdir or WORKDIR/checkpoints/STEP, into the folder `out`.

    The arguments are the values of the flags in main.py. OutputError if what was written computes
    something else.
    """
    jax.config.update("jax_platforms", "cpu")  # a run may have the accelerator, and CPUs are exact
    jax.config.update("jax_traceback_in_locations_limit", 0)  # no paths of this machine
    chosen = choose(formats or ",".join(DEFAULTS))
    model = model_source.load(path, checkpoint)
    model.check_data(accept_other_data)
    out = locations.check_results_folder(out or f"{model.workdir}/export", "--out")
    replaces = _is_taken(out, overwrite)
    locations.check_folder(out, "--out")
    with tempfile.TemporaryDirectory(prefix="export.") as folder:
        if functions := programs.of(model):
            rows, labels = programs.write(model, functions, chosen if formats else (), folder)
        else:
            rows, labels = classifiers.write(model, chosen, allow_mismatch, programs.draw(), folder)
        _list(model, rows, labels, folder)
        _publish(folder, out, replaces)
    print(visible(f"export: {model.source} is in {out}"))


def choose(names: str) -> tuple[str, ...]:
    """The formats of --format, in the order of `PATHS`; ConfigError if one cannot be written."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in PATHS]
    if unknown or not wanted:
        raise ConfigError(f"--format={names}: use one or more of {', '.join(PATHS)}, with commas")
    for name in ("onnx", "ctranslate2"):
        if name in wanted and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--format={name} needs the package {name}, which is not installed: "
                f"pip install {name}"
            )
    return tuple(name for name in PATHS if name in wanted)


def _is_taken(out: str, overwrite: bool) -> bool:
    """Whether a folder holds an export that `overwrite` allows to replace.

    ConfigError if it does not, or if the folder has a file that is not of the export.
    """
    walk = tensorflow().io.gfile.walk(out)
    names = {os.path.relpath(f"{top}/{name}", out) for top, _, names in walk for name in names}
    listed: Iterable[str] = ()
    with contextlib.suppress(Exception):  # each file system raises its own types
        listed = parse_json((epath.Path(out) / _LIST).read_bytes())["files"]
    if others := sorted(names - {_LIST, *listed}):
        raise ConfigError(f"--out={out} has {others[0]}, which no export wrote; give a new folder")
    if names and not overwrite:
        raise ConfigError(
            f"--out={out} has an export: give --overwrite to replace it, or --out=NEW"
        )
    return bool(names)


def _list(
    model: model_source.Model, rows: dict[str, Any], labels: Sequence[str], folder: str
) -> None:
    """Writes the names of the classes, and `_LIST`, which describes the export."""
    if labels:
        lines = [" ".join(name.split()) for name in labels]
        pathlib.Path(folder, "labels.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    facts = {
        "benchmark": model.config.benchmark,
        "step": model.step,
        "weights": "average" if model.config.moving_average_decay else "last",
        "labels": list(labels),
        "formats": rows,
        "files": [os.path.relpath(path, folder) for path in files_in(folder)],
        "versions": environment.versions(),
    }
    pathlib.Path(folder, _LIST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _publish(folder: str, out: str, replaces: bool) -> None:
    """Copies the files of a local folder to `out`; a folder there stays until all are written."""
    gfile, mark = tensorflow().io.gfile, uuid.uuid4().hex[:8]
    out = out.rstrip("/") if "://" in out else os.path.realpath(out)  # a link stays
    new, old = (f"{out}.new-{mark}", f"{out}.old-{mark}") if replaces else (out, "")
    names = [os.path.relpath(path, folder) for path in files_in(folder)]
    try:
        if not replaces:  # an export that is killed can be replaced
            storage.write(f"{new}/{_LIST}", [json.dumps({"files": names}).encode()])
        for name in sorted(names, key=lambda name: name == _LIST):
            storage.write(f"{new}/{name}", [pathlib.Path(folder, name).read_bytes()])
        if replaces:
            gfile.rename(out, old)
            gfile.rename(new, out)
            gfile.rmtree(old)
    except Exception as error:  # each file system raises its own types
        with contextlib.suppress(Exception):
            if replaces and not gfile.exists(out):
                gfile.rename(old, out)
            gfile.rmtree(new)  # nothing else is in it
        raise OutputError(f"cannot write the export to {out}: {one_line(error)}") from error
