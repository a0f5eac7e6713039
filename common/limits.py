"""Limits of the files that are read, so that none fills the memory or never ends: docs/data.md."""

from __future__ import annotations

import os
import re
import stat

from common.errors import DataError, UserError

PIXELS = 178_956_970  # of an image; TensorFlow decodes no JPEG of more (2^29 bytes in RGB)
IMAGE_BYTES = 1 << 30  # of an image's file: so many pixels without compression, 16 bits per channel
ANNOTATION_BYTES = 8 << 30  # of a JSON file of boxes; COCO's has 0.45 GB, Objects365's about 6
SGM_BYTES = 256 << 20  # WMT's sets for tests have about 1 MB
TEXT_BYTES = 64 << 20  # of a file of class names; ImageNet's 50,000 labels have 0.5 MB
LINE_BYTES = 1 << 20  # of a line of text; a sentence has 100 to 1,000
EMPTY_LINES = 1_000_000  # in a row; real text has a few

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


def too_large(error: Exception) -> str:
    """The message for an image of more pixels than `PIXELS`, which is Pillow's limit."""
    number = re.search(r"\d+", str(error))
    size = int(number[0]) if number else 0
    return f"{size:,} pixels, more than the {PIXELS:,} that are decoded: shrink the image"
