"""Downloads a file completely or not at all, and checks its SHA-256."""

import contextlib
import gzip
import hashlib
import os
import shutil
import urllib.error
import urllib.request
import uuid
from typing import Any


def fetch(address: str, path: str, digits: str) -> None:
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
