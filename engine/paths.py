"""Checks the paths that a person types: local ones, and gs://BUCKET/FOLDER."""

from __future__ import annotations

import os
import re

from errors import ConfigError

_PARTS = re.compile(r"(?:(\w[\w+.-]*):)?(/*)(.*)", re.S)  # scheme, slashes, rest
# TensorStore turns a backslash into a slash, and Orbax reads * ? [] as a pattern: checkpoints
# would seem complete and hold no arrays, or another folder's. Control characters break lines of
# logs.
_UNSAFE = re.compile(r"[\\\[\]*?\x00-\x1f\x7f]")


def check(path: str, source: str) -> str:
    """Returns a path as the libraries take it: gs:// unchanged, a local one with "~" expanded.

    Args:
      path: as a person typed it.
      source: the flag, config key or variable that it is from, for the message.

    Raises:
      ConfigError: it has another scheme than gs://, or is gs:/ with one slash.
    """
    parts = _PARTS.match(path)
    assert parts is not None  # every text has these parts
    scheme, slashes, rest = parts.groups("")
    if scheme == "gs" and slashes == "//" and rest:
        return path
    if scheme == "gs":
        bucket = rest.strip("/") or "BUCKET/FOLDER"
        raise ConfigError(f"{source}={path}: a bucket has two slashes: gs://{bucket}")
    if scheme and slashes.startswith("//"):
        raise ConfigError(
            f"{source}={path}: {scheme}:// is not supported; use a local folder or "
            "gs://BUCKET/FOLDER"
        )
    return os.path.expanduser(path)


def check_writable(path: str, source: str) -> str:
    """Returns the folder for results as `check` does, a local one as an absolute path.

    Raises:
      ConfigError: what `check` refuses; or a character that would keep checkpoints from being
        restored.
    """
    folder = check(path, source)
    if is_local := "://" not in folder:
        folder = os.path.abspath(folder)
    if unsafe := _UNSAFE.search(folder):
        raise ConfigError(
            f"{source}={path}: a folder for results cannot have {unsafe[0]!r} in its path, "
            "because checkpoints there could not be restored; choose another name"
        )
    if is_local and any(part.endswith(":") for part in folder.split("/")):
        raise ConfigError(
            f"{source}={path}: a local folder cannot end with ':'; choose another name"
        )
    return folder
