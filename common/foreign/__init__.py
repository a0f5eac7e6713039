"""Weights of other libraries: .safetensors, PyTorch's .pth, TensorFlow's checkpoints.

Nothing in them runs. `find` says which file a path means, and `fetch` downloads weights by name:

* `hf-hub:OWNER/NAME[@REVISION]` is a model of the Hugging Face hub, with huggingface_hub's cache,
  login and variables.
* `https://.../NAME-HASH.pth`, a name with digits of the SHA-256, is a file on a web server. It goes
  into a folder of that cache.

`files.read` reads a file; it is imported for such a file only.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import shutil
import tempfile
import urllib.error
import urllib.request

from etils import epath

from common.errors import ConfigError, DataError, one_line
from common.foreign import tf_checkpoints

# Published weights that messages and the preparations name; docs/models.md has more.
RESNET = "hf-hub:timm/resnet{depth}.a1_in1k"  # of depth 18, 34, 50, 101 or 152
MASK_RCNN = "https://download.pytorch.org/models/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth"
NAMES = ("hf-hub:", "https://")  # with these begin the names that `fetch` downloads
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".pth.tar")
# The names of files that together are a checkpoint of TensorFlow.
_PART = re.compile(r"\.(index|meta)$|-\d{5}-of-\d{5}$")
PUBLISHED = ("model.safetensors", "pytorch_model.bin")  # a model's weights, by their file names
_BESIDE = ("config.json", "preprocessor_config.json", "input_spec.json", "labels.txt")
_MODEL = re.compile(r"hf-hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_FILE = re.compile(r"https?://.*/([^/]+-([0-9a-f]{8,64})\.(?:pth|pt|bin|safetensors))")


def describe(file: str) -> str:
    """What a file is that `find` returned, in words."""
    if tf_checkpoints.is_v2(file) or tf_checkpoints.is_v1(file):
        return f"a checkpoint of TensorFlow with the arrays {tf_checkpoints.listed(file)}"
    return f"{file} is a file, as other libraries write their weights"


def find(path: str, source: str = "") -> str:
    """The file of weights that a path means, local, gs:// or a name; "" if it is none.

    A file is one whatever its name. A folder is one if it has a file of weights and no folder
    `checkpoints`. Of a checkpoint of TensorFlow it is the prefix. `source` is for `fetch`.

    Raises:
      DataError: a folder has several files of weights, or cannot be listed, or weights cannot be
        downloaded.
    """
    if path.startswith(NAMES):
        return fetch(path, source)[1]
    try:
        folder = epath.Path(path)
        if not folder.is_dir():
            file = path if folder.exists() else ""
            return file if file and not _PART.search(path) else tf_checkpoints.find(path) or file
        if (folder / "checkpoints").exists():
            return ""
        names = sorted(p.name for p in folder.iterdir())
        files = [name for name in names if name.endswith(_SUFFIXES)]
        if not files and any(_PART.search(name) for name in names):
            return tf_checkpoints.newest(folder, names)
    except DataError:
        raise
    except Exception as error:  # gs:// raises TensorFlow's own classes
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    published = [name for name in PUBLISHED if name in files]
    if len(files) > 1 and not published:
        raise DataError(f"{path} has the weights {', '.join(files[:4])}: name one of them")
    return str(folder / (published or files)[0]) if files else ""


def fetch(name: str, source: str = "") -> tuple[str, str]:
    """Downloads weights; returns a name that means the same bytes for ever, and their path here.

    Raises:
      ConfigError: `name`, from the flag or variable `source`, has another form than those above.
      DataError: the weights cannot be downloaded, or are not what the name says.
    """
    import huggingface_hub as hub

    shown = f"{source}={name}".removeprefix("=")
    model = _MODEL.fullmatch(name)
    try:
        if model:
            for weights in PUBLISHED:
                wanted = [*_BESIDE, weights]
                folder = hub.snapshot_download(model[1], revision=model[2], allow_patterns=wanted)
                if (path := pathlib.Path(folder, weights)).exists():
                    return f"hf-hub:{model[1]}@{path.parent.name}", str(path)
            raise ValueError(f"it has neither {' nor '.join(PUBLISHED)}")
        if file := _FILE.fullmatch(name):
            if (path := hub.cached_assets_path("tpu_suite", "weights") / file[1]).exists():
                return name, str(path)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                part = pathlib.Path(folder, file[1])
                with (
                    urllib.request.urlopen(name, timeout=60) as answer,
                    hub.utils.tqdm.wrapattr(answer, "read", answer.length, desc=file[1]) as body,
                    part.open("wb") as to,
                ):
                    shutil.copyfileobj(body, to)
                if not hashlib.sha256(part.read_bytes()).hexdigest().startswith(file[2]):
                    raise ValueError("what came has another SHA-256 than its name says")
                return name, str(part.rename(path))
    except Exception as error:  # of the network, the disk, huggingface_hub
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        reason = " ".join(str(error).split()) or type(error).__name__
        fix = ""
        if not isinstance(error, ValueError):  # perhaps this machine has no network
            command = f"curl -O {name}"
            if model:
                at = f" --revision={model[2]}" if model[2] else ""
                command = f"hf download {model[1]}{at} --local-dir={model[1].split('/')[1]}"
            fix = f"; or `{command}` on another machine, copy that here and give its path"
        raise DataError(f"{shown} cannot be downloaded: {reason.rstrip('.')}{fix}") from error
    raise ConfigError(f"{shown}: give hf-hub:OWNER/NAME[@REVISION] or https://.../NAME-HASH.pth")
