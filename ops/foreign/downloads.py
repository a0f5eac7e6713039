"""Weights by name: a model of the Hugging Face hub, or a file on a web server.

`hf-hub:OWNER/NAME` or `hf-hub:OWNER/NAME@REVISION` goes through huggingface_hub, with its cache,
its login and its variables (HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN). `https://.../NAME-HASH.pth` is
a file whose name carries the first digits of its SHA-256, as torchvision's do.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

from errors import ConfigError, DataError, UserError, one_line

_HUB = re.compile(r"hf-hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_HASHED = re.compile(r".+-([0-9a-f]{8,64})\.(?:pth|pt|bin|safetensors)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The weights come last: where they are, an interrupted download has left nothing out.
_DESCRIPTIONS = ("config.json", "preprocessor_config.json", "input_spec.json", "labels.txt")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SECONDS = 60  # without an answer
_CHUNK = 1 << 20


class Download(NamedTuple):
    """Weights on this machine.

    Attributes:
      name: names the same bytes for ever: of the hub with the commit.
      path: the file.
    """

    name: str
    path: str


def fetch(name: str, source: str = "") -> Download:
    """Downloads weights, unless the cache of this machine has them.

    Args:
      name: for which `ops.foreign.is_name` is true.
      source: the flag, config key or variable that it is from, for messages.

    Raises:
      ConfigError: `name` has another form than those above.
      DataError: the weights cannot be downloaded, or are not what the name says.
    """
    shown = f"{source}={name}" if source else name
    try:
        return _from_hub(name, shown) if name.startswith("hf-hub:") else _from_web(name, shown)
    except UserError:
        raise
    except Exception as error:  # of the network, the disk, huggingface_hub and its libraries
        raise DataError(f"{shown} cannot be downloaded: {one_line(error)}") from error


def _from_hub(name: str, shown: str) -> Download:
    parts = _HUB.fullmatch(name)
    if not parts:
        raise ConfigError(f"{shown}: a model of the hub is hf-hub:OWNER/NAME[@REVISION]")
    try:
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise ConfigError(
            f"{shown} needs the package huggingface_hub: pip install -r requirements.txt"
        ) from error

    repository, revision = parts[1], parts[2] or "main"
    hub = constants.ENDPOINT
    try:
        path = _files(repository, revision)
    except errors.GatedRepoError as error:
        raise DataError(
            f"{shown} is a gated model: accept its terms at {hub}/{repository}, then log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"{shown}: {hub} has no model {repository}, or it is private: check the name, or log "
            "in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{shown}: {repository} has no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        reason = f"{hub} does not answer"
        if constants.is_offline_mode():
            reason = "HF_HUB_OFFLINE is set"
        raise DataError(f"{shown} is not in this machine's cache, and {reason}") from error
    if not path:
        raise DataError(f"{shown} has neither {' nor '.join(_WEIGHTS)}")
    return Download(f"hf-hub:{repository}@{pathlib.Path(path).parent.name}", path)


def _files(repository: str, revision: str) -> str:
    """The path of a model's weights, with their descriptions beside it; "" if it has none.

    Without network, and for a commit whose weights are there, the cache has to do.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    if "HF_HUB_VERBOSITY" not in os.environ:
        hub.logging.set_verbosity_error()  # a failure is one line, and ours
    is_local, commit = constants.is_offline_mode(), revision
    if not is_local and _COMMIT.fullmatch(revision):
        weights = (
            hub.try_to_load_from_cache(repository, name, revision=revision) for name in _WEIGHTS
        )
        is_local = any(isinstance(path, str) for path in weights)
    if not is_local:
        try:
            info = hub.HfApi().model_info(repository, revision=revision, timeout=_SECONDS)
            commit = info.sha or revision
        except errors.HfHubHTTPError:
            raise
        except Exception:  # no network; the library has its own classes for that
            is_local = True
    missing: Exception | None = None
    for i, name in enumerate((*_DESCRIPTIONS, *_WEIGHTS)):
        try:
            path = hub.hf_hub_download(
                repository,
                name,
                revision=commit if i else revision,  # so that the cache knows the name's commit
                local_files_only=is_local,
            )
        except errors.LocalEntryNotFoundError as error:
            missing = error
        except errors.EntryNotFoundError:
            continue
        else:
            if name in _WEIGHTS:
                return path
    if missing:
        raise missing
    return ""


def _from_web(url: str, shown: str) -> Download:
    name = urllib.parse.urlsplit(url).path.rpartition("/")[2]
    parts = _HASHED.fullmatch(name)
    if not parts:
        raise ConfigError(
            f"{shown}: the name of a file to download carries its hash, as resnet50-0676ba61.pth "
            "does; download it yourself, and give its path"
        )
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = pathlib.Path(cache).expanduser() / "tpu_suite" / "weights"
    path = folder / name
    if path.exists() and _sha256(path).startswith(parts[1]):
        return Download(url, str(path))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"downloading {url}", flush=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest = _receive(url, shown, file)
        if not digest.startswith(parts[1]):
            raise DataError(
                f"{shown}: the file has the SHA-256 {digest}, its name says {parts[1]}: the server "
                "sent something else"
            )
        os.replace(temporary, path)
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)
    return Download(url, str(path))


def _receive(url: str, shown: str, file: Any) -> str:
    """Writes what a web server sends; returns its SHA-256."""
    digest, size = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            expected = answer.headers.get("Content-Length")
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
    except urllib.error.HTTPError as error:
        with error:  # which closes the connection
            raise DataError(f"{shown}: the server answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DataError(f"{shown} cannot be downloaded: {error.reason}") from error
    if expected and size != int(expected):
        raise DataError(f"{shown}: the download ended after {size:,} of {int(expected):,} bytes")
    return digest.hexdigest()


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
