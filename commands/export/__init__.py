"""--mode=export: writes a trained model for other programs, and checks what it wrote.

Every format is read back and computes the outputs of drawn pictures. An export whose error is too
large is not written. The same checkpoint and versions of libraries give the same bytes. --push
sends an export to a repository of the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from commands.export import programs, stablehlo
from commands.export.formats import FORMATS, Format, Model, card_text
from common.data import files
from common.errors import CheckpointError, ConfigError, OutputError, one_line, parse_json, visible
from common.images import input_spec
from common.images.input_spec import prepare_image
from engine import locations, model_source, resuming
from engine import manifest as manifests

_LIST = "export.json"  # a folder that has it is an export
_DEFAULT = "savedmodel,stablehlo"  # of classifiers
_LIMIT = 1e-5  # the largest error that is accepted, as a share of the largest logit


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
      formats: names in `FORMATS`, with commas; "" are those that the model has by default.
      out: the folder of the export; "" is WORKDIR/export.
      allow_mismatch: write PyTorch's form of a model that PyTorch computes differently.
      push: OWNER/NAME on the Hugging Face hub that the export is sent to; "" for none.
      accept_other_data: export also where the data have other classes than the model by now.

    Raises:
      UserError: a mistake that the user can fix; before the model is computed.
      OutputError: the written model computes something else; it is deleted.
    """
    jax.config.update("jax_platforms", "cpu")  # a run may have the accelerator, and CPUs are exact
    chosen = choose(formats or _DEFAULT)
    if push:
        check_hub(push, chosen)
    model = model_source.load(path, checkpoint)
    resuming.check_data(model, accept_other_data, print)
    out = locations.check_results_folder(out or f"{model.workdir}/export", "--out")
    with _checked(out), tempfile.TemporaryDirectory(prefix="export.") as folder:
        if functions := programs.of(model):
            wanted = programs.choose(choose(formats) if formats else (), model)
            rows, labels = programs.write(model, functions, folder, wanted)
        else:
            rows, labels = _classifier(model, chosen, allow_mismatch, folder)
        _list(model, rows, labels, folder)
        _publish(folder, out)
        if push:
            print(f"export: sent to {send_to_hub(folder, push)}")
    print(visible(f"export: {model.source} is in {out}"))


def _classifier(
    model: model_source.Model, chosen: Sequence[str], allow_mismatch: bool, folder: str
) -> tuple[dict[str, Any], Sequence[str]]:
    """Writes a classifier and its card; returns the facts about each format, and the labels."""
    content = _prepare(model, chosen, allow_mismatch)
    reference = Reference.make(content, programs.draw())
    rows = {name: _export(name, content, folder, reference) for name in chosen}
    if "savedmodel" in chosen:
        rows["savedmodel"] |= reference.check_serving(content, folder)
    spec = content.portable.spec.as_dict()
    _write(f"{folder}/input_spec.json", json.dumps(spec, indent=2) + "\n")
    _write(f"{folder}/README.md", card_text(content, rows))
    return rows, content.class_names


def choose(names: str) -> tuple[str, ...]:
    """The formats of --format, in the order of `FORMATS`.

    Raises:
      ConfigError: a name is unknown, or a package is missing.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in FORMATS]
    if unknown or not wanted:
        raise ConfigError(f"--format={names}: use one or more of {', '.join(FORMATS)}, with commas")
    for name in wanted:
        package = FORMATS[name].needs
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--format={name} needs the package {package}, which is not installed: "
                f"pip install {package}"
            )
    return tuple(name for name in FORMATS if name in wanted)


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


def _prepare(model: model_source.Model, chosen: Sequence[str], allow_mismatch: bool) -> Model:
    """The model in its portable forms, checked."""
    portable = model.benchmark.uses.portable(model.params, model.model_state)
    if portable is None:
        raise ConfigError(
            f"{model.source} is a model of the benchmark {model.config.benchmark!r}, which has no "
            "export"
        )
    names = model_source.class_names(model.manifest, len(portable.network.steps[-1].arrays["bias"]))
    if not names:
        print("NOTE the model has no class names: numbers stand for them")
    torch = portable.torch(names) if "hf" in chosen else None
    if torch and torch.mismatch and not allow_mismatch:
        raise ConfigError(
            f"--format=hf: {torch.mismatch}. The other formats compute exactly this model; "
            "--allow_mismatch writes PyTorch's form nevertheless, with the size of its error"
        )
    return Model(model, portable, names, torch)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The logits that every format must compute.

    Attributes:
      encoded: pictures, in the formats of files.
      images: uint8[n, s, s, 3], their pixels.
      logits: float32[n, K], by the model itself.
    """

    encoded: Sequence[bytes]
    images: np.ndarray
    logits: np.ndarray

    @classmethod
    def make(cls, content: Model, encoded: list[bytes]) -> Reference:
        """Computes the logits of encoded pictures.

        Raises:
          CheckpointError: the logits are not numbers.
        """
        spec = content.portable.spec
        images = np.stack([prepare_image(picture, spec) for picture in encoded])
        values = np.asarray(content.portable.logits(images))
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{content.trained.source}: the model's logits are not finite; the run diverged"
            )
        return cls(encoded, images, values)

    def error(self, run: Callable[[np.ndarray], np.ndarray]) -> float:
        """The largest difference, as a share of the largest logit.

        The pictures are computed all at once, and one alone.
        """
        together, alone = run(self.images), run(self.images[:1])
        distance = np.abs(
            np.concatenate([together, alone]) - np.concatenate([self.logits, self.logits[:1]])
        )
        return float(np.max(distance) / max(np.max(np.abs(self.logits)), 1e-6))

    def check_serving(self, content: Model, folder: str) -> dict[str, Any]:
        """Runs a SavedModel on encoded pictures; returns how far its pixels are off.

        Raises:
          OutputError: its probabilities are not those of its pixels.
        """
        spec = content.portable.spec
        serve = stablehlo.savedmodel_runner(f"{folder}/savedmodel/1")
        results = serve({"image_bytes": list(self.encoded)})
        pixels = [input_spec.evaluated(p, spec, is_portable=True).numpy() for p in self.encoded]
        levels = np.abs(np.stack(pixels).astype(int) - self.images)
        expected = np.asarray(jax.nn.softmax(content.portable.logits(np.stack(pixels))))
        error = float(np.max(np.abs(results["probabilities"] - expected)))
        if not error <= 1e-4:
            raise OutputError(f"savedmodel: serving_default is off by {error:.1e} in probability")
        return {
            "pixel_error_levels": {"largest": int(levels.max()), "mean": float(levels.mean())},
            "probability_error": error,
        }


def _export(name: str, content: Model, folder: str, reference: Reference) -> dict[str, Any]:
    """Writes one format into a folder, reads it back and runs it; returns what is known of it.

    Raises:
      OutputError: it cannot be written, or computes something else.
    """
    form: Format = FORMATS[name]
    form.write(content, f"{folder}/{form.path}")
    error = reference.error(form.runner(content, f"{folder}/{form.path}"))
    torch = content.torch if name == "hf" else None
    mismatch = torch.mismatch if torch else ""
    if not error <= _LIMIT and not mismatch:
        raise OutputError(
            f"--format={name}: what was written is off by {error:.1e} of the largest logit, more "
            f"than {_LIMIT:.0e}; nothing is exported"
        )
    size = sum(map(os.path.getsize, _tree(f"{folder}/{form.path}")))
    remark = "; ".join(filter(None, [mismatch, torch.pixels if torch else ""]))
    text = f"; {remark}" if remark else ""
    print(f"{name}: {size / 1e6:.1f} MB, off by {error:.1e} of the largest logit{text}")
    return {"path": form.path, "error": error} | ({"remark": remark} if remark else {})


def _list(
    model: model_source.Model, rows: dict[str, Any], labels: Sequence[str], folder: str
) -> None:
    """Writes the names of the classes and the list of what the export is."""
    lines = [" ".join(name.split()) for name in labels]
    if lines:
        _write(f"{folder}/labels.txt", "\n".join([*lines, ""]))
    facts = {
        "benchmark": model.config.benchmark,
        "step": model.step,
        "weights": "average" if model.config.moving_average_decay else "last",
        "labels": list(labels),
        "formats": rows,
        "files": {
            os.path.relpath(path, folder): {"bytes": os.path.getsize(path), "sha256": _sha(path)}
            for path in _tree(folder)
        },
        "versions": manifests.versions(),
    }
    _write(f"{folder}/{_LIST}", json.dumps(facts, indent=2) + "\n")


def _publish(folder: str, out: str) -> None:
    """Replaces an earlier export by a new one; `_LIST` names no formats until all are written.

    Of the earlier export only the files that its `_LIST` names are deleted.

    Raises:
      OutputError: the folder cannot be written to.
    """
    target, names = epath.Path(out), [os.path.relpath(path, folder) for path in _tree(folder)]
    earlier = _earlier(out)
    old = [name for name in earlier.get("files", ()) if name != _LIST]
    if earlier.get("formats"):
        written = ", ".join(earlier["formats"])
        print(visible(f"this replaces the export of step {earlier.get('step')}: {written}"))
    try:
        everything = sorted({*old, *names} - {_LIST})
        begun = {"formats": {}, "files": dict.fromkeys(everything)}
        files.write(f"{out}/{_LIST}", [json.dumps(begun).encode()])
        for name in old:
            _remove(target, name)
        for name in sorted(names, key=lambda name: name == _LIST):
            with open(f"{folder}/{name}", "rb") as file:
                files.write(f"{out}/{name}", iter(lambda: file.read(1 << 24), b""))
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


def _tree(path: str) -> list[str]:
    """A file, or all files in a folder, sorted."""
    if os.path.isfile(path):
        return [path]
    return sorted(f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names)


def _sha(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


# The Hugging Face hub.


def check_hub(repository: str, formats: tuple[str, ...]) -> None:
    """Refuses, before anything is computed, what cannot be sent.

    Raises:
      ConfigError: `repository` is not OWNER/NAME, the hub knows no login here, or the export has
        no form that the hub's users load.
    """
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
    """Makes the repository if it is new, and sends a folder with its card as one commit.

    Returns:
      Its address.

    Raises:
      OutputError: the hub does not take it.
    """
    import huggingface_hub as hub

    try:
        address = hub.HfApi().create_repo(repository, exist_ok=True)
        hub.HfApi().upload_folder(
            folder_path=folder, repo_id=repository, commit_message="Export of a trained model"
        )
    except Exception as error:  # as in `check_hub`
        raise OutputError(f"--push={repository}: the hub refuses it: {one_line(error)}") from error
    return str(address)
