"""--mode=export: writes a trained model for other programs, and checks what it wrote.

Every format is read back and computes the outputs of drawn pictures. An export whose error is too
large is not written. The same checkpoint and versions of libraries give the same bytes. --push
sends an export to a repository of the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Sequence
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
    push: str = "",
    accept_other_data: bool = False,
) -> None:
    """Exports a model.

    Args:
      path: a workdir or WORKDIR/checkpoints/STEP.
      checkpoint: latest, best or a step.
      formats: names in `PATHS`, with commas; "" are `DEFAULTS`.
      out: the folder of the export; "" is WORKDIR/export.
      allow_mismatch: write PyTorch's form of a model that PyTorch computes differently.
      push: OWNER/NAME on the Hugging Face hub that the export is sent to; "" for none.
      accept_other_data: export also where the data have other classes than the model by now.

    Raises:
      UserError: a mistake that the user can fix.
      OutputError: the written model computes something else; it is deleted.
    """
    jax.config.update("jax_platforms", "cpu")  # a run may have the accelerator, and CPUs are exact
    chosen = choose(formats or ",".join(DEFAULTS))
    if push:
        check_hub(push, chosen)
    model = model_source.load(path, checkpoint)
    resuming.check_data(model, accept_other_data, print)
    out = locations.check_results_folder(out or f"{model.workdir}/export", "--out")
    with _checked(out), tempfile.TemporaryDirectory(prefix="export.") as folder:
        if functions := programs.of(model):
            rows, labels = programs.write(model, functions, chosen if formats else (), folder)
        else:
            rows, labels = classifiers.write(model, chosen, allow_mismatch, programs.draw(), folder)
        _list(model, rows, labels, folder)
        _publish(folder, out)
        if push:
            print(f"export: sent to {send_to_hub(folder, push)}")
    print(visible(f"export: {model.source} is in {out}"))


def choose(names: str) -> tuple[str, ...]:
    """The formats of --format, in the order of `PATHS`.

    Raises:
      ConfigError: a name is unknown, or a package is missing.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in PATHS]
    if unknown or not wanted:
        raise ConfigError(f"--format={names}: use one or more of {', '.join(PATHS)}, with commas")
    if "onnx" in wanted and importlib.util.find_spec("onnx") is None:
        raise ConfigError(
            "--format=onnx needs the package onnx, which is not installed: pip install onnx"
        )
    return tuple(name for name in PATHS if name in wanted)


@contextlib.contextmanager
def _checked(out: str) -> Iterator[None]:
    """Refuses a folder with other content than an export; a failure leaves no new empty folder."""
    folder = epath.Path(out)
    existed = folder.exists()
    if existed and not _earlier(out):
        other = next((path.name for path in folder.iterdir()), "") if folder.is_dir() else out
        if other:
            raise ConfigError(f"--out={out} has {other} and is no export; give a new folder")
    locations.check_folder(out, "--out")
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # a folder with files, or in a bucket
            if not existed:
                os.rmdir(out)
        raise


def _earlier(out: str) -> dict[str, Any]:
    """What `_LIST` in a folder says about the export there; {} if there is none."""
    try:
        content = parse_json((epath.Path(out) / _LIST).read_bytes())
        is_one = all(isinstance(content[key], dict) for key in ("formats", "files"))
        return content if is_one else {}
    except Exception:  # each file system raises its own types
        return {}


def _list(
    model: model_source.Model, rows: dict[str, Any], labels: Sequence[str], folder: str
) -> None:
    """Writes the names of the classes and the list of what the export is."""
    if labels:
        lines = [" ".join(name.split()) for name in labels]
        pathlib.Path(folder, "labels.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    facts = {
        "benchmark": model.config.benchmark,
        "step": model.step,
        "weights": "average" if model.config.moving_average_decay else "last",
        "labels": list(labels),
        "formats": rows,
        "files": {os.path.relpath(path, folder): _digest(path) for path in files_in(folder)},
        "versions": manifests.versions(),
    }
    pathlib.Path(folder, _LIST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _digest(path: str) -> dict[str, Any]:
    content = pathlib.Path(path).read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _publish(folder: str, out: str) -> None:
    """Replaces an earlier export by a new one; `_LIST` names no formats until all are written.

    Of the earlier export only the files that its `_LIST` names are deleted.

    Raises:
      OutputError: the folder cannot be written to.
    """
    target, names = epath.Path(out), [os.path.relpath(path, folder) for path in files_in(folder)]
    earlier = _earlier(out)
    old = [name for name in earlier.get("files", ()) if name != _LIST]
    if earlier.get("formats"):
        written = ", ".join(earlier["formats"])
        print(visible(f"this replaces the export of step {earlier.get('step')}: {written}"))
    try:
        begun = {"formats": {}, "files": dict.fromkeys(sorted({*old, *names} - {_LIST}))}
        files.write(f"{out}/{_LIST}", [json.dumps(begun).encode()])
        for name in old:
            _remove(target, name)
        for name in sorted(names, key=lambda name: name == _LIST):
            files.write(f"{out}/{name}", [pathlib.Path(folder, name).read_bytes()])
    except Exception as error:  # each file system raises its own types
        raise OutputError(f"cannot write the export to {out}: {one_line(error)}") from error


def _remove(target: Any, name: str) -> None:
    """Deletes a file of an export, and the folders that become empty."""
    if ".." in name.split("/") or name.startswith("/"):
        return
    (target / name).unlink(missing_ok=True)
    folder = (target / name).parent
    while folder != target and "://" not in str(folder):
        if folder.exists():
            if any(folder.iterdir()):
                break
            folder.rmdir()
        folder = folder.parent


# The Hugging Face hub.


def check_hub(repository: str, formats: tuple[str, ...]) -> None:
    """Refuses, before anything is computed, what cannot be sent, with a ConfigError."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ConfigError(f"--push={repository}: give OWNER/NAME, a model of the Hugging Face hub")
    if "hf" not in formats:
        raise ConfigError(f"--push={repository} sends the format hf: give --format=hf")
    import huggingface_hub as hub

    try:
        hub.HfApi().whoami()
    except Exception as error:  # huggingface_hub's, and those of the libraries below it
        raise ConfigError(
            f"--push={repository}: the hub knows no login here ({one_line(error)}): "
            "`hf auth login`, or set HF_TOKEN"
        ) from error


def send_to_hub(folder: str, repository: str) -> str:
    """Sends a folder to a repository, new or not, as one commit; returns its address."""
    import huggingface_hub as hub

    try:
        address = hub.HfApi().create_repo(repository, exist_ok=True)
        hub.HfApi().upload_folder(
            folder_path=folder, repo_id=repository, commit_message="Export of a trained model"
        )
    except Exception as error:  # as in `check_hub`
        raise OutputError(f"--push={repository}: the hub refuses it: {one_line(error)}") from error
    return str(address)
