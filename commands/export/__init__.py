"""--mode=export: writes a trained model for other programs, and checks what it wrote.

Every format is read back and computes the outputs of drawn pictures. An export whose error is too
large is not written. The same checkpoint and versions of libraries give the same bytes.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from commands.export import classifiers, programs
from commands.export.formats import DEFAULTS, PATHS, files_in
from common.data import files
from common.errors import ConfigError, OutputError, one_line, parse_json, visible
from engine import locations, model_source, resuming
from engine import manifest as manifests

_LIST = "export.json"  # a folder that has it is an export


def run(
    path: str,
    checkpoint: str,
    formats: str,
    out: str = "",
    allow_mismatch: bool = False,
    accept_other_data: bool = False,
) -> None:
    """Exports the model at `path`, a workdir or WORKDIR/checkpoints/STEP, into the folder `out`.

    The arguments are the values of the flags in main.py. OutputError if what was written computes
    something else.
    """
    jax.config.update("jax_platforms", "cpu")  # a run may have the accelerator, and CPUs are exact
    chosen = choose(formats or ",".join(DEFAULTS))
    model = model_source.load(path, checkpoint)
    resuming.check_data(model, accept_other_data, print)
    out = locations.check_results_folder(out or f"{model.workdir}/export", "--out")
    earlier = _earlier(out)
    locations.check_folder(out, "--out")
    with tempfile.TemporaryDirectory(prefix="export.") as folder:
        if functions := programs.of(model):
            rows, labels = programs.write(model, functions, chosen if formats else (), folder)
        else:
            rows, labels = classifiers.write(model, chosen, allow_mismatch, programs.draw(), folder)
        _list(model, rows, labels, folder)
        _publish(folder, out, earlier)
    print(visible(f"export: {model.source} is in {out}"))


def choose(names: str) -> tuple[str, ...]:
    """The formats of --format, in the order of `PATHS`; ConfigError if one cannot be written."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in PATHS]
    if unknown or not wanted:
        raise ConfigError(f"--format={names}: use one or more of {', '.join(PATHS)}, with commas")
    if "onnx" in wanted and importlib.util.find_spec("onnx") is None:
        raise ConfigError(
            "--format=onnx needs the package onnx, which is not installed: pip install onnx"
        )
    return tuple(name for name in PATHS if name in wanted)


def _earlier(out: str) -> dict[str, Any]:
    """What `_LIST` says about an earlier export in a folder; {} if the folder is empty or new.

    ConfigError if the folder has something else.
    """
    folder = epath.Path(out)
    with contextlib.suppress(Exception):  # each file system raises its own types
        content = parse_json((folder / _LIST).read_bytes())
        if all(isinstance(content[key], dict) for key in ("formats", "files")):
            return content
    if other := [path.name for path in folder.iterdir()] if folder.is_dir() else []:
        raise ConfigError(f"--out={out} has {other[0]} and is not an export; give a new folder")
    return {}


def _list(
    model: model_source.Model, rows: dict[str, Any], labels: Sequence[str], folder: str
) -> None:
    """Writes the names of the classes, and `_LIST`, which describes the export."""
    if labels:
        lines = [" ".join(name.split()) for name in labels]
        pathlib.Path(folder, "labels.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    listed = {}
    for path in files_in(folder):
        content = pathlib.Path(path).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        listed[os.path.relpath(path, folder)] = {"bytes": len(content), "sha256": digest}
    facts = {
        "benchmark": model.config.benchmark,
        "step": model.step,
        "weights": "average" if model.config.moving_average_decay else "last",
        "labels": list(labels),
        "formats": rows,
        "files": listed,
        "versions": manifests.versions(),
    }
    pathlib.Path(folder, _LIST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _publish(folder: str, out: str, earlier: dict[str, Any]) -> None:
    """Replaces an earlier export by a new one; `_LIST` names no formats until all are written.

    It deletes only the files that the `_LIST` of the earlier export names.
    """
    target, names = epath.Path(out), [os.path.relpath(path, folder) for path in files_in(folder)]
    old = [name for name in earlier.get("files", ()) if name != _LIST]
    if earlier.get("formats"):
        written = ", ".join(earlier["formats"])
        print(visible(f"this replaces the export of step {earlier.get('step')}: {written}"))
    try:
        begun = {"formats": {}, "files": dict.fromkeys(sorted({*old, *names} - {_LIST}))}
        files.write(f"{out}/{_LIST}", [json.dumps(begun).encode()])
        for name in old:
            if os.path.isabs(name) or ".." in name.split("/"):  # a list that another program wrote
                continue
            (target / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder has other files, or is in a bucket
                os.removedirs((target / name).parent)
        for name in sorted(names, key=lambda name: name == _LIST):
            files.write(f"{out}/{name}", [pathlib.Path(folder, name).read_bytes()])
    except Exception as error:  # each file system raises its own types
        raise OutputError(f"cannot write the export to {out}: {one_line(error)}") from error
