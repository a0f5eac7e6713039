"""Reads lines of text: of files, of the standard input, or given on the command line."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from commands.predict.outputs import path_text, shown
from commands.predict.sources import refusing
from common import limits
from common.data.shards import tensorflow
from common.errors import DataError
from common.images import photos
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
    """The sources that are files, local or gs://; "-" is none.

    Args:
      sources: files, "-", and texts if `what` is not empty.
      what: what a source may be besides a file, for the message; "" for nothing.

    Raises:
      DataError: a file does not exist, is empty, or is a folder, a device, a picture or XML.
      ConfigError: a source is neither local nor gs://.
    """
    names: list[str] = []
    for source in filter(lambda source: source != "-", sources):
        with refusing(f"cannot read {shown(source)}"):
            exists, size = _size(source)
        if exists and source.lower().endswith((".xml", ".html", ".tmx")):
            raise DataError(
                f"{shown(source)} is markup: give its sentences, one on each line; sacrebleu -t "
                "wmt22 -l en-de --echo src prints those of a set of WMT"
            )
        if exists and not size:
            raise DataError(f"{shown(source)} is empty: there is no line in it")
        if exists:
            names.append(source)
        elif not what or _LIKE_A_PATH.fullmatch(source):
            hint = f"; {what} without a blank can come on stdin" if what else ""
            raise DataError(f"{shown(source)}: there is no such file{hint}")
    return names


def _size(source: str) -> tuple[bool, int]:
    """Whether it exists, and its bytes; 1 of a pipe."""
    if "://" in source and _LIKE_A_PATH.fullmatch(source):
        gfile = tensorflow().io.gfile
        if not gfile.exists(locations.check_path(source, "SOURCE")):
            return False, 0
        is_folder, size = gfile.isdir(source), gfile.stat(source).length
    elif not os.path.exists(source):
        return False, 0
    else:
        is_folder, size = os.path.isdir(source), os.path.getsize(source)
    if is_folder:
        raise DataError(f"{shown(source)} is a folder: name the files in it")
    if (special := limits.special(source)) == "a pipe":
        return True, 1
    if not special and "://" not in source:
        with open(source, "rb") as file:
            head = file.read(photos.HEAD)
        is_binary = b"\0" in head or head[:1] > b"\x7f"  # "BM" may begin a text, too
        special = "a picture" if is_binary and photos.looks_like_image(head) else ""
    if special:
        raise DataError(f"{shown(source)} is {special}, not a file of text")
    return True, size


def lines(sources: Sequence[str], names: Sequence[str]) -> Iterator[Line]:
    """The lines of all sources in their order; "-" is the standard input.

    Args:
      sources: as those of `files`.
      names: what `files` returned.

    Raises:
      DataError: a file cannot be read.
    """
    for source in sources:
        if source == "-":
            yield from _read(sys.stdin.buffer, "> " if sys.stdin.isatty() else "")
        elif source not in names:
            yield parse(os.fsencode(source))
        else:
            with refusing(f"cannot read {shown(source)}"), _open(source) as file:
                if is_sgm(source):
                    yield from map(parse, sgm_sentences(file, shown(source)))
                else:
                    yield from _read(file, "")


def _open(path: str) -> Any:
    if "://" in path:  # gfile's lines have no greatest length
        with tensorflow().io.gfile.GFile(path, "rb") as file:
            return io.BytesIO(file.read())
    return open(path, "rb")


def _read(file: Any, prompt: str) -> Iterator[Line]:
    r"""The lines of a binary file; only "\n" ends one."""
    while True:
        if prompt:
            print(prompt, end="", file=sys.stderr, flush=True)
        data = file.readline(limits.LINE_BYTES)
        if not data:
            return
        if len(data) < limits.LINE_BYTES or data.endswith(b"\n"):
            yield parse(data)
            continue
        mib = limits.LINE_BYTES / (1 << 20)
        yield Line(_beginning(data), f"longer than {mib:g} MiB: split it into sentences")
        while data and not data.endswith(b"\n"):
            data = file.readline(limits.LINE_BYTES)


def parse(data: bytes) -> Line:
    """The text in the bytes of a line."""
    try:
        text = data.decode().strip().removeprefix("\ufeff")  # as in training
    except UnicodeDecodeError as error:
        fault = f"not UTF-8: byte 0x{data[error.start]:02x} at position {error.start + 1}"
        return Line(_beginning(data), fault)
    if "\0" in text:
        return Line(_beginning(data), "no text: it has zero bytes; UTF-16 must become UTF-8")
    return Line(text)


def _beginning(data: bytes) -> str:
    text = shown(path_text(os.fsdecode(data[:_SHOWN].strip())))
    return f"{text}…" if len(data) > _SHOWN else text
