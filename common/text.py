"""Text of users: encodings, lines, the sentences of WMT's .sgm, names that look alike, paths."""

import codecs
import collections
import re
import shlex
import unicodedata
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from common import limits
from common.errors import DataError, UserError

# Without "<" in the tag and without "<seg" in the text, so that the search never starts again.
_SGM_SENTENCE = re.compile(rb"<seg\b[^<>]*>((?:[^<]|<(?!/?seg\b))*+)</seg>", re.IGNORECASE)
_LINE_END = re.compile(r"\r\n?|\n")
# Signs without width that change no letter; U+200C and U+200D, which join or part some, stay.
_NO_WIDTH = re.compile("[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def decoded(data: bytes, name: str, kind: type[UserError] = DataError, line: int = 1) -> str:
    """The text of a user's file, UTF-8 or, as its first bytes may say, UTF-16.

    Other encodings cannot be told apart for sure. `kind` is raised for them, with the `name` of the
    file, the first line that is not UTF-8, and the command that converts the file. `line` is the
    number of the first line of `data`.
    """
    if line == 1 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # of Windows
        encoding, code = "utf-16", "UTF-16"
    else:
        encoding, code = "utf-8-sig", "UTF-8"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        path = shlex.quote(name)
        command = "iconv -f CP1252 -t UTF-8"
        command = f"gzip -dc {path} | {command}" if name.endswith(".gz") else f"{command} {path}"
        raise kind(
            f"{name}, line {line} is not {code} (byte 0x{data[error.start]:02x}): save the file as "
            f"UTF-8, or convert it, with its own encoding for CP1252: {command} > NEW"
        ) from error


def text_lines(text: str) -> list[str]:
    r"""The stripped lines of a list of names, without empty ones at its end.

    Lines end as in files of Unix, Windows and the first Macs: "\n", "\r\n" or "\r".
    """
    return [line.strip() for line in _LINE_END.split(text.rstrip())] if text.strip() else []


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


def path_text(path: str) -> str:
    """A path as text for programs; only bytes that are not UTF-8 are written as \\udcXX."""
    return path.encode(errors="backslashreplace").decode()


def shown(path: str) -> str:
    """A path as text for the user: `path_text` without control characters."""
    text = path_text(path)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def normal_name(name: str) -> str:
    """A name in a normal form, the same for all names that look the same.

    Unicode's forms NFC and NFD of a letter look the same, and so do blanks of all kinds; blanks
    without width are not seen.
    """
    return " ".join(unicodedata.normalize("NFC", _NO_WIDTH.sub("", name)).split())


def aligned(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Rows of equally many cells as lines; columns in `right` are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def alike(names: Iterable[str]) -> list[list[str]]:
    """The groups of different names that people take for one: equal but for blanks and case."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for name in dict.fromkeys(names):
        groups[normal_name(unicodedata.normalize("NFKC", name)).casefold()].append(name)
    return [group for group in groups.values() if len(group) > 1]
