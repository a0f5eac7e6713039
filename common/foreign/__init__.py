"""Weights of other libraries: .safetensors, PyTorch's .pth, TensorFlow's checkpoints.

Nothing in them runs. `find` says which file a path means, and `fetch` downloads weights by name:

* `hf-hub:OWNER/NAME[@REVISION]` is a model of the Hugging Face hub, with huggingface_hub's cache,
  login and variables.
* `https://.../NAME-HASH.pth`, a name with digits of the SHA-256, is a file on a web server. It goes
  into a folder of that cache.

`files.read` reads a file; it is imported for such a file only.
"""

import contextlib
import gzip
import hashlib
import os
import pathlib
import re
import shutil
import urllib.error
import urllib.request
import uuid
from typing import Any

from etils import epath

from common.errors import ConfigError, DataError, one_line
from common.foreign import tf_checkpoints

# Published weights that messages and the preparations name; docs/resnet.md has more.
RESNET = "hf-hub:timm/resnet{depth}.a1_in1k"  # of depth 18, 34, 50, 101 or 152
MASK_RCNN = "https://download.pytorch.org/models/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth"
NAMES = ("hf-hub:", "https://")  # with these begin the names that `fetch` downloads
PUBLISHED = ("model.safetensors", "pytorch_model.bin")  # a model's weights, by their file names
BESIDE = ("config.json", "preprocessor_config.json", "input_spec.json")
TRANSLATOR = ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json")  # of Marian
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".pth.tar")
_MODEL = re.compile(r"hf-hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_FILE = re.compile(r"https?://.*/([^/]+-([0-9a-f]{8,64})\.(?:pth|pt|bin|safetensors))")


def describe(file: str) -> str:
    """Describes a file that `find` returned."""
    if tf_checkpoints.is_one(file):
        return f"a checkpoint of TensorFlow with the arrays {tf_checkpoints.listed(file)}"
    return f"{file} is a file, as other libraries write their weights"


def find(path: str, source: str = "") -> str:
    """The file of weights that a path means, local, gs:// or a name; "" if it means no weights.

    A file may have any name. A folder means its file of weights, unless it has a folder
    `checkpoints`. For a checkpoint of TensorFlow the result is its prefix. `source` is the flag or
    variable that names a download, for messages.
    """
    if path.startswith(NAMES):
        return fetch(path, source)[1]
    try:
        folder = epath.Path(path)
        if not folder.is_dir():
            return tf_checkpoints.find(path) or (path if folder.exists() else "")
        names = sorted(p.name for p in folder.iterdir())
        if "checkpoints" in names:
            return ""
        files = [name for name in names if name.endswith(_SUFFIXES)]
        if not files:
            return tf_checkpoints.newest(folder, names)
    except DataError:
        raise
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    published = [name for name in PUBLISHED if name in files]
    if len(files) > 1 and not published:
        raise DataError(f"{path} has the weights {', '.join(files[:4])}: name one of them")
    return str(folder / (published or files)[0])


def vocabulary_folder(file: str) -> str:
    """The folder of a file of weights, if the vocabulary of a translator is in it; else ""."""
    folder = epath.Path(file).parent
    return str(folder) if file and (folder / TRANSLATOR[2]).exists() else ""


def fetch(name: str, source: str = "") -> tuple[str, str]:
    """Downloads weights; returns a name that means the same bytes for ever, and their path here.

    `source` is the flag or variable that has the name, for messages.
    """
    import huggingface_hub as hub

    shown = f"{source}={name}".removeprefix("=")
    model, file = _MODEL.fullmatch(name), _FILE.fullmatch(name)
    if not model and not file:
        fix = "give hf-hub:OWNER/NAME[@REVISION] or https://.../NAME-HASH.pth"
        raise ConfigError(f"{shown}: {fix}")
    try:
        if file:
            path = hub.cached_assets_path("tpu_suite", "weights") / file[1]
            download(name, str(path), file[2])
            return name, str(path)
        assert model is not None
        for weights in PUBLISHED:
            wanted = [*BESIDE, *TRANSLATOR, "labels.txt", weights]
            folder = hub.snapshot_download(model[1], revision=model[2], allow_patterns=wanted)
            if (path := pathlib.Path(folder, weights)).exists():
                return f"hf-hub:{model[1]}@{path.parent.name}", str(path)
        raise ValueError(f"it has neither {' nor '.join(PUBLISHED)}")
    except Exception as error:  # of the network, the disk, huggingface_hub
        reason = " ".join(str(error).split()) or type(error).__name__
        command = f"curl -LO {name}"
        if model:
            revision = f" --revision={model[2]}" if model[2] else ""
            command = f"hf download {model[1]}{revision} --local-dir={model[1].split('/')[1]}"
        raise DataError(
            f"{shown} cannot be downloaded: {reason.rstrip('.')}; without a network type {command} "
            "on another machine, and give the path of a copy here"
        ) from error


def download(address: str, path: str, digits: str) -> None:
    """Downloads a file unless it exists, and unpacks a .gz; only a complete file has its name.

    ValueError if its SHA-256 does not begin with `digits`; a failed download raises what urllib or
    gzip raises.
    """
    if os.path.exists(path):
        return _check(path, digits, path, "delete it, and the same command downloads it again")
    folder, name = os.path.split(path)
    # Hidden, so that no reader takes it.
    part = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:8]}")
    try:
        _download(address, part)
        _check(part, digits, address, "it is damaged, or another version")
        os.replace(part, path)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)


def _check(path: str, digits: str, source: str, fix: str) -> None:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(digits):
        raise ValueError(f"{source} has another SHA-256, {digest}, than {digits}: {fix}")


def _download(address: str, path: str) -> None:
    """Writes the content of an address, a .gz unpacked, with a progress bar."""
    from huggingface_hub.utils import tqdm

    with (
        urllib.request.urlopen(address, timeout=60) as answer,
        tqdm.wrapattr(
            answer, "read", getattr(answer, "length", None), desc=os.path.basename(address)
        ) as body,
        open(path, "wb") as file,
    ):
        source: Any = body
        if address.endswith(".gz"):
            source = gzip.GzipFile(fileobj=source)
        shutil.copyfileobj(source, file)
        if left := getattr(answer, "length", None):
            raise OSError(f"the connection ended {left:,} bytes too early")
