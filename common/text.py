"""Text in files: its lines, the sentences of .sgm, similar names, shares, and tables as CSV."""

import csv
import io
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from common import limits
from common.errors import DataError, UserError

# Without "<" in the tag and without "<seg" in the text, so that the search never starts again.
_SGM_SENTENCE = re.compile(rb"<seg\b[^<>]*>((?:[^<]|<(?!/?seg\b))*+)</seg>", re.IGNORECASE)


def text_lines(text: str) -> list[str]:
    r"""The stripped lines of a list of names, without empty ones at its end; "\n" ends a line."""
    return [line.strip() for line in text.rstrip().split("\n")] if text.strip() else []


def normal_name(name: str) -> str:
    """A name in a normal form, the same for all names that look alike."""
    return unicodedata.normalize("NFC", name).strip()


def is_sgm(path: str) -> bool:
    """Whether a file is one of WMT's .sgm by its name."""
    return path.lower().endswith((".sgm", ".sgml"))


def sgm_sentences(file: Any, name: str, kind: type[UserError] = DataError) -> Iterator[bytes]:
    """The sentences of one of WMT's .sgm, each as a line.

    `kind` is raised, with the `name` of the file, for more than `limits.SGM_BYTES` or no <seg>.
    """
    if len(data := file.read(limits.SGM_BYTES + 1)) > limits.SGM_BYTES:
        raise kind(f"{name} has more than {limits.SGM_BYTES:,} bytes: split it")
    if not _SGM_SENTENCE.search(data):
        raise kind(f"{name} has no <seg>: plain text needs another name, such as .txt")
    for match in _SGM_SENTENCE.finditer(data):
        yield match[1].strip().replace(b"\n", b" ")


def limited_lines(file: Any, name: str, kind: type[UserError] = DataError) -> Iterator[bytes]:
    r"""The lines of a binary file with the "\n" at their ends, which alone ends a line.

    `kind` is raised, with the `name` of the file, for a line of more than `limits.LINE_BYTES`.
    """
    number = 0
    while line := file.readline(limits.LINE_BYTES):
        number += 1
        if len(line) == limits.LINE_BYTES and not line.endswith(b"\n"):
            mib = limits.LINE_BYTES / (1 << 20)
            raise kind(f"{name}, line {number} is longer than {mib:g} MiB: split it")
        yield line


def percent(share: float) -> str:
    """A share in per cent with one decimal; a dash for nan."""
    return "–" if math.isnan(share) else f"{100 * share:.1f}\u00a0%"


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The lines of rows of cells."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
