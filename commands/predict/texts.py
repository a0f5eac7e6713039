"""Reads lines of text: of files, of the standard input, or given on the command line."""

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from etils import epath

from commands.predict.outputs import path_text, shown
from commands.predict.sources import refusing
from common.errors import DataError
from common.text import is_sgm, sgm_sentences
from engine import locations

# A word with a slash, or with an ending such as .txt, is meant as a file.
_LIKE_A_PATH = re.compile(r"\S*(/|\\|\.[A-Za-z][A-Za-z0-9]{0,4}$)\S*")
_SHOWN = 100  # characters of a line that cannot be read


class Line(NamedTuple):
    """A line without the white space around it, or the reason why it cannot be used."""

    text: str
    error: str = ""


def files(sources: Sequence[str], what: str) -> list[str]:
    """The sources that are files, local or gs://; DataError if one is a folder or is missing.

    `what`, for the message, says what a source may be besides a file or "-"; "" for nothing.
    """
    names: list[str] = []
    for source in sources:
        is_path = bool(_LIKE_A_PATH.fullmatch(source))
        if source == "-" or ("://" in source and not is_path):
            continue
        if "://" in source:
            locations.check_path(source, "SOURCE")
        with refusing(f"cannot read {shown(source)}"):
            path = epath.Path(source)
            if path.is_dir():
                raise DataError(f"{shown(source)} is a folder: name the files in it")
            if path.exists():
                names.append(source)
            elif is_path or not what:
                hint = f"; {what} without a blank can come on stdin" if what else ""
                raise DataError(f"{shown(source)}: there is no such file{hint}")
    return names


def lines(sources: Sequence[str], names: Sequence[str]) -> Iterator[Line]:
    """The lines of all sources in their order: of the files `names`, of stdin for "-", or texts."""
    for source in sources:
        if source == "-":
            yield from map(parse, _typed() if sys.stdin.isatty() else sys.stdin.buffer)
        elif source not in names:
            yield parse(os.fsencode(source))
        else:
            with refusing(f"cannot read {shown(source)}"), _open(source) as file:
                is_set = is_sgm(source)  # else only "\n" ends a line
                yield from map(parse, sgm_sentences(file, shown(source)) if is_set else file)


def _open(path: str) -> Any:
    return io.BytesIO(epath.Path(path).read_bytes()) if "://" in path else open(path, "rb")


def _typed() -> Iterator[bytes]:
    """The lines that the user types, each after a prompt."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        data = sys.stdin.buffer.readline()
        if not data:
            return
        yield data


def parse(data: bytes) -> Line:
    """The text in the bytes of a line."""
    try:
        text = data.decode().strip().removeprefix("\ufeff")  # as in training
        if "\0" not in text:
            return Line(text)
        reason = "not UTF-8 but UTF-16, or no text: it has zero bytes"
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{data[error.start]:02x} at position {error.start + 1}"
    return Line(shown(path_text(os.fsdecode(data[:_SHOWN].strip()))), reason)
