"""Weights by name: a model of the Hugging Face hub, or a file on a web server.

`hf-hub:OWNER/NAME[@REVISION]` is huggingface_hub's, with its cache, login and variables.
`https://.../NAME-HASH.pth`, a name with digits of the SHA-256, goes into a folder of that cache.
"""

import hashlib
import pathlib
import re
import shutil
import tempfile
import urllib.error
import urllib.request

from common.errors import ConfigError, DataError

PUBLISHED = ("model.safetensors", "pytorch_model.bin")  # a model's weights, by their file names
_BESIDE = ("config.json", "preprocessor_config.json", "input_spec.json", "labels.txt")
_MODEL = re.compile(r"hf-hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_FILE = re.compile(r"https?://.*/([^/]+-([0-9a-f]{8,64})\.(?:pth|pt|bin|safetensors))")


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
        remedy = ""
        if not isinstance(error, ValueError):  # perhaps this machine has no network
            command = f"curl -O {name}"
            if model:
                at = f" --revision={model[2]}" if model[2] else ""
                command = f"hf download {model[1]}{at} --local-dir={model[1].split('/')[1]}"
            remedy = f"; or `{command}` on another machine, copy that here and give its path"
        raise DataError(f"{shown} cannot be downloaded: {reason.rstrip('.')}{remedy}") from error
    raise ConfigError(f"{shown}: give hf-hub:OWNER/NAME[@REVISION] or https://.../NAME-HASH.pth")
