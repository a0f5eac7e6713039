"""Writes results to the standard output or to files, which are complete or not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from errors import ConfigError, OutputError, is_of_files, one_line
from modes.predict.request import say
from ops import files


def check_apart(paths: Sequence[str], written: Iterable[tuple[str, str]]) -> None:
    """Refuses to write over one of the inputs.

    Raises:
      ConfigError: one of (flag, path) of the files to write is one of `paths`.
    """
    places = {_place(path) for path in paths}
    for flag, path in written:
        if path and _place(path) in places:
            raise ConfigError(
                f"--{flag}: {path} is one of the inputs, and would be overwritten; "
                "write to another folder"
            )


def _place(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)


def write(out: str, text: Iterable[str]) -> None:
    """Writes the pieces of a text to the file `out`; "" is the standard output.

    Raises:
      OutputError: the file cannot be written.
      BrokenPipeError: nobody reads the standard output any more.
    """
    if out:
        save(out, (piece.encode() for piece in text))
        return
    for piece in text:
        try:
            sys.stdout.buffer.write(piece.encode())
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"cannot write the standard output: {error.strerror}") from error


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
