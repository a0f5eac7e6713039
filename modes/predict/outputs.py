"""Writes results to the standard output or to files, which are complete or not there."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from errors import OutputError, is_of_files, one_line
from modes.predict.request import say
from ops import files


def write(out: str, text: Iterable[str]) -> None:
    """Writes the pieces of a text to the file `out`; "" is the standard output.

    Raises:
      OutputError: the file cannot be written.
    """
    if out:
        save(out, (piece.encode() for piece in text))
        return
    for piece in text:
        sys.stdout.buffer.write(piece.encode())
        sys.stdout.buffer.flush()


def save(path: str, parts: Iterable[bytes], quiet: bool = False) -> None:
    """Writes a file and, unless `quiet`, says so; OutputError if it cannot be written."""
    try:
        files.write(path, parts)
    except Exception as error:
        if not is_of_files(error):
            raise
        raise OutputError(f"cannot write {path}: {one_line(error)}") from error
    if not quiet:
        say(f"wrote {path}")
