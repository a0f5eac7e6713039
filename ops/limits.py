"""Limits of the files that are read, so that none fills the memory or never ends: docs/data.md."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from typing import Any

from errors import DataError, UserError

PIXELS = 178_956_970  # of an image; TensorFlow decodes no JPEG of more (2^29 bytes in RGB)
IMAGE_BYTES = 1 << 30  # of an image's file: so many pixels without compression, 16 bits per channel
ANNOTATION_BYTES = 8 << 30  # of a JSON file of boxes; COCO's has 0.45 GB, Objects365's about 6
SGM_BYTES = 256 << 20  # WMT's sets for tests have about 1 MB
TEXT_BYTES = 64 << 20  # of a file of class names; ImageNet's 50,000 labels have 0.5 MB
LINE_BYTES = 1 << 20  # of a line of text; a sentence has 100 to 1,000
EMPTY_LINES = 1_000_000  # in a row; real text has a few
# A member of an archive may expand without limit up to this size, and beyond it to this multiple
# of its packed size. Images expand by a few percent, JSON about tenfold, zeros a thousandfold.
FREE_BYTES, EXPANSION = 64 << 20, 100
TAR_HEADER_BYTES = 1 << 20  # of a long name or of extended attributes in a tar; a path has 4 KiB

# Without "<" in the tag and without "<seg" in the text, so that the search never starts again.
_SEGMENT = re.compile(rb"<seg\b[^<>]*>((?:[^<]|<(?!/?seg\b))*+)</seg>", re.IGNORECASE)
_SPECIAL = {
    "a pipe": stat.S_ISFIFO,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
    "a socket": stat.S_ISSOCK,
}


def special(path: str) -> str:
    """What a local path is if it is neither a file nor a folder, such as "a pipe"; else ""."""
    if "://" in path:
        return ""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # whoever opens the path reports it
        return ""
    return next((name for name, test in _SPECIAL.items() if test(mode)), "")


def check_file(path: str, kind: type[UserError] = DataError) -> None:
    """Raises `kind` if a local path is a pipe, a device or a socket: reading it might never end."""
    if name := special(path):
        raise kind(f"{path} is {name}, not a file: save its content as a file, and give that file")


def check_size(path: str, size: int, most: int, kind: type[UserError] = DataError) -> None:
    """Raises `kind` if a file of `size` bytes has more than `most`."""
    if size > most:
        raise kind(f"{path} has {size:,} bytes: more than {most:,} are not read; is it that file?")


def expansion(packed: int, size: int) -> str:
    """Why a member of an archive is refused that has `size` bytes and is stored in `packed`.

    "" if it is not.
    """
    if size <= max(FREE_BYTES, EXPANSION * packed):
        return ""
    return (
        f"expands from {packed:,} to {size:,} bytes, more than {EXPANSION}-fold: unpack the "
        "archive and give its content, if it is right"
    )


def text_lines(text: str) -> list[str]:
    r"""The lines of a list of names, stripped; none at its end is empty. "\n" alone ends one."""
    return [line.strip() for line in text.rstrip().split("\n")] if text.strip() else []


def same(name: str) -> str:
    """A name in the form that equals that of all names that look like it."""
    return unicodedata.normalize("NFC", name).strip()


def is_sgm(path: str) -> bool:
    """Whether a file is one of WMT's .sgm by its name."""
    return path.lower().endswith((".sgm", ".sgml"))


def segments(file: Any, name: str, kind: type[UserError] = DataError) -> Iterator[bytes]:
    """The sentences of one of WMT's .sgm, each as a line; the arguments are those of `lines`.

    Raises:
      UserError: `kind`, for a file of more than `SGM_BYTES`, or without a <seg>.
    """
    if len(data := file.read(SGM_BYTES + 1)) > SGM_BYTES:
        raise kind(f"{name} has more than {SGM_BYTES:,} bytes: split it")
    if not _SEGMENT.search(data):
        raise kind(f"{name} has no <seg>: plain text needs another name, such as .txt")
    for match in _SEGMENT.finditer(data):
        yield match[1].strip().replace(b"\n", b" ")


def lines(file: Any, name: str, kind: type[UserError] = DataError) -> Iterator[bytes]:
    r"""The lines of a binary file with the "\n" at their ends, which alone ends a line.

    Args:
      file: has `readline`.
      name: of the file, for messages.
      kind: what is raised.

    Raises:
      UserError: `kind`, for a line of `LINE_BYTES` or `EMPTY_LINES` lines in a row without text.
    """
    number = empty = 0
    while line := file.readline(LINE_BYTES):
        number += 1
        if len(line) == LINE_BYTES and not line.endswith(b"\n"):
            mib = LINE_BYTES / (1 << 20)
            raise kind(f"{name}, line {number} is longer than {mib:g} MiB: split it")
        empty = empty + 1 if line.isspace() else 0
        if empty >= EMPTY_LINES:
            raise kind(
                f"{name}: {empty:,} lines in a row, up to line {number:,}, are empty: "
                "it is no text, or damaged; remove them if they are right"
            )
        yield line
