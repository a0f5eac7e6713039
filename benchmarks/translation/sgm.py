"""Reads the .sgm files of WMT, in which each sentence is a <seg>."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from errors import DataError, UserError
from ops import limits

# Without "<" in the tag and without "<seg" in the text, so that the search never starts again.
_SEGMENT = re.compile(rb"<seg\b[^<>]*>((?:[^<]|<(?!/?seg\b))*+)</seg>", re.IGNORECASE)


def is_name(path: str) -> bool:
    """Whether a file is one of these, by its name."""
    return path.lower().endswith((".sgm", ".sgml"))


def segments(file: Any, name: str, kind: type[UserError] = DataError) -> Iterator[bytes]:
    """The sentences of a binary file, each as a line.

    Raises:
      UserError: `kind`, with the name of the file, if it is too large or has no sentence.
    """
    if len(data := file.read(limits.SGM_BYTES + 1)) > limits.SGM_BYTES:
        raise kind(f"{name} has more than {limits.SGM_BYTES:,} bytes: split it")
    if not _SEGMENT.search(data):
        raise kind(f"{name} has no <seg>: plain text needs another name, such as .txt")
    for match in _SEGMENT.finditer(data):
        yield match[1].strip().replace(b"\n", b" ")
