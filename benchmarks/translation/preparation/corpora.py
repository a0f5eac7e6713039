"""Reads sentences from files: lines, or pairs in tables, TMX, JSON lines and gettext's .po.

Each file may be local or gs://, a .gz, or a member of a tar or zip. Nothing is unpacked, and no
file is held in memory.
"""

from __future__ import annotations

import collections
import csv
import gzip
import io
import itertools
import os
import posixpath
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from benchmarks.translation.preparation import languages
from common import limits
from common.data.shards import tensorflow
from common.errors import one_line, parse_json
from common.preparation.sources import SourceError
from common.text import is_sgm, limited_lines, sgm_sentences

DAMAGE = (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile)
_BUFFER = 1 << 20  # bytes of a read
_SAMPLE = 50  # rows that tell what the columns and languages are
LETTER = r"[^\W\d_]"
_LINE_ENDS = re.compile(r"\r?\n|\r")
_MESSAGE = re.compile(  # of gettext: S stands for strings, one in a line
    r"(?P<comments>(#.*\n)*)(msgctxt *S)?msgid *(?P<id>S)(msgid_plural *S)?"
    r"msgstr(\[0\])? *(?P<text>S)".replace("S", r'(".*"\n)+')
)
_ESCAPES = {"n": "\n", "t": "\t"}

Count = Callable[[int], Any]  # gets the number of bytes of each read
Row = dict[Any, str]  # texts by the number of a column, from 1, by key, or by language
Reader = Callable[[str, Count], Iterator[tuple[int, Row]]]


def _ignore(size: int) -> None:
    """Counts nothing."""


class Text(NamedTuple):
    """One file of lines; with a `member`, it is in the archive at `path`."""

    path: str
    member: str = ""

    @property
    def name(self) -> str:
        """The file in messages."""
        return f"{self.path}/{self.member}" if self.member else self.path

    def lines(self, count: Count = _ignore) -> Iterator[bytes]:
        r"""Yields the lines without "\n", which alone ends a line; of an .sgm its segments.

        Raises:
            SourceError: the file is damaged, or beyond one of `common.limits`.
            tf.errors.OpError: it cannot be read.
        """
        try:
            with open_file(self.path, count) as raw:
                file = unzipped(self._find_member(raw) if self.member else raw)
                if is_sgm(self.name.removesuffix(".gz")):
                    yield from sgm_sentences(file, self.name, SourceError)
                    return
                for i, line in enumerate(limited_lines(file, self.name, SourceError)):
                    yield line.removeprefix(b"" if i else b"\xef\xbb\xbf").removesuffix(b"\n")
        except DAMAGE as error:
            raise SourceError(f"{self.name} is damaged or cut short: {one_line(error)}") from error

    def decode(self, line: bytes, number: int) -> str:
        """A line as text; SourceError if it is not UTF-8."""
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{self.name}, line {number} is not UTF-8 (byte 0x{line[error.start]:02x} at "
                f"position {error.start}): convert the file, for example with iconv"
            ) from error

    def _find_member(self, raw: Any) -> Any:
        """Opens the member, without unpacking the archive."""
        archive = tarfile.open(fileobj=raw, mode="r|*")  # noqa: SIM115 (its member is read)
        for info in archive:
            if posixpath.normpath(info.name) == self.member and info.isreg():
                return archive.extractfile(info)
        raise SourceError(f"{self.path} holds no file {self.member}")


def open_file(path: str, count: Count = _ignore) -> io.BufferedReader:
    """Opens a local or gs:// file; `count` gets the bytes of each read."""
    limits.check_file(path, SourceError)
    return io.BufferedReader(_File(path, count), _BUFFER)


def unzipped(file: Any) -> Any:
    """What is in a .gz; other files as they are."""
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file


class _File(io.RawIOBase):
    """A local or gs:// file; counts the bytes that are read."""

    def __init__(self, path: str, count: Count):
        self._file, self._count = tensorflow().io.gfile.GFile(path, "rb"), count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._count(len(data))
        return len(data)


class Lines(NamedTuple):
    """Two files, of which line i of one is the translation of line i of the other."""

    source: Text
    target: Text

    def __str__(self) -> str:
        return f"{self.source.name} and {self.target.name}"

    def pairs(self, count: Count = _ignore) -> Iterator[tuple[str, str]]:
        """Yields the pairs of lines.

        Raises:
            SourceError: the numbers of lines differ, or a line is not UTF-8.
        """
        lines = itertools.zip_longest(*(text.lines(count) for text in self))
        for number, pair in enumerate(lines, 1):
            if None in pair:
                total = number + sum(1 for _ in lines)
                counts = [number - 1 if line is None else total for line in pair]
                raise SourceError(
                    f"{self.source.name} has {counts[0]:,} lines and {self.target.name} "
                    f"{counts[1]:,}: line i of one must be the translation of line i of the other"
                )
            yield self.source.decode(pair[0], number), self.target.decode(pair[1], number)


class Corpus(NamedTuple):
    """A file of pairs.

    Attributes:
        path: local or gs://.
        read: its reader, see `FORMS`.
        keys: of source and target in the rows.
        names: of them, for people.
        header: the row of a table that names the columns; {} if there is none.
    """

    path: str
    read: Reader
    keys: Sequence[Any]
    names: tuple[str, ...]
    header: Row

    @classmethod
    def open(
        cls, path: str, columns: Sequence[str] = (), wanted: tuple[str, str] = ("", "")
    ) -> Corpus:
        """Looks at the first rows of a file.

        Args:
            path: of the file.
            columns: source and target, by name or by number from 1; () to guess.
            wanted: languages of source and target; see `languages.choose`.

        Raises:
            SourceError: the file is of another form, or it is not clear what is the source.
        """
        if not tensorflow().io.gfile.exists(path):
            raise SourceError(f"there is no {path}")
        if tensorflow().io.gfile.isdir(path):
            fix = f"give its files, or the folder alone: python -m scripts.prepare {path}"
            raise SourceError(f"{path} is a folder: {fix}")
        if not (read := FORMS.get(ending(path), ("", None))[1]):
            raise SourceError(
                f"{path} is no file of pairs ({', '.join(FORMS)}): rename it; give files of lines "
                "as --train_source and --train_target, tar archives as --train_archives"
            )
        rows = [row for _, row in itertools.islice(read(path, _ignore), _SAMPLE)]
        numbers = {str(key): key for row in rows for key in row}
        header = _header(rows[:4], columns, wanted) if "1" in numbers else {}
        names = {cell.strip(): key for key, cell in header.items()} or numbers
        sides = columns or languages.choose(names, wanted)
        if not sides and not header and "1" in numbers:
            sides = _texts(rows)
        elif not (sides or header or any(wanted)):  # two other keys or languages
            sides = sorted(names, key=lambda name: languages.code(name) != "en")
        keys = [names.get(side, numbers.get(side)) for side in sides]
        if len(keys) != 2 or None in keys:
            few = ", ".join(name[:30] for name in [*names][:20]) or "no text"
            fix = (
                "which two are the source and the target? Give --columns=A,B, names or numbers "
                "from 1, or --source_language and --target_language"
                if len(names) > 1
                else "a pair has two; give files of lines as --train_source and --train_target"
            )
            raise SourceError(f"{path} has {few}: {fix}")
        titles = {key: f"column {key}" for key in keys if isinstance(key, int)} | header
        return cls(path, read, keys, tuple(f"{titles.get(key, key)}" for key in keys), header)

    def __str__(self) -> str:
        return f"{self.path}, {' to '.join(self.names)}"

    def pairs(self, count: Count = _ignore) -> Iterator[tuple[str, str]]:
        """Yields source and target of each row below the header, which may be there again.

        Raises:
            SourceError: the file is damaged; the message names the row.
            tf.errors.OpError: it cannot be read.
        """
        rows = self.read(self.path, count)
        if self.header:
            rows = itertools.dropwhile(lambda row: row[1] != self.header, rows)
        for number, row in rows:
            if self.header and row == self.header:
                continue
            try:
                source, target = (_LINE_ENDS.sub(" ", row[key]) for key in self.keys)
            except KeyError as error:
                fault = f"no text for both {' and '.join(self.names)}: correct or delete it"
                raise SourceError(f"{self.path}, line {number} has {fault}") from error
            yield source, target

    def has_sentences(self) -> bool:
        """Whether the first rows look like text, and not like ratings, titles or labels.

        Raises: see `pairs`.
        """
        is_certain = {*map(languages.code, self.names)} - {"", "source", "target"}
        pattern = LETTER if is_certain else r"[.!?\u2026\u3002\uff01\uff1f\u0964]\W*$"
        sides = [*zip(*itertools.islice(self.pairs(), _SAMPLE), strict=True)]
        return bool(sides) and all(are_mostly(side, pattern) for side in sides)


def _header(rows: Sequence[Row], columns: Sequence[str], wanted: tuple[str, str]) -> Row:
    """The row that has `columns`, or alone has names of two languages; {} if there is none."""
    named = [row for row in rows if len(languages.named(row.values(), wanted)) > 1]
    own = [row for row in rows if columns and {*columns} <= {cell.strip() for cell in row.values()}]
    return (own or (named if len(named) == 1 else []) or [{}])[0]


def _texts(rows: Sequence[Row]) -> list[str]:
    """The first two columns that hold text: no numbers, no codes of languages."""
    cells = {key: [row.get(key, "") for row in rows] for key in itertools.chain(*rows)}
    texts = {key for key in cells if not all(map(languages.code, cells[key]))}
    return [str(key) for key in cells if key in texts and are_mostly(cells[key], LETTER)][:2]


def are_mostly(texts: Sequence[str], pattern: str) -> bool:
    """Whether a half or more of some texts have a regular expression in them."""
    return 2 * sum(bool(re.search(pattern, text)) for text in texts) >= len(texts) > 0


# --- Readers yield the number of each row, from 1, and its texts.


def _decoded(path: str, count: Count) -> Iterator[tuple[int, str]]:
    text = Text(path)
    return ((i, text.decode(line, i)) for i, line in enumerate(text.lines(count), 1))


def _read_tabs(path: str, count: Count) -> Iterator[tuple[int, Row]]:
    """Cells with tabs between them; quotes are a part of the text."""
    for number, line in _decoded(path, count):
        if line.strip():
            yield number, dict(enumerate(line.rstrip("\r").split("\t"), 1))


def _read_csv(path: str, count: Count) -> Iterator[tuple[int, Row]]:
    """Cells that may be quoted; the delimiter cuts all of the first rows into as many."""
    sizes = {}
    for delimiter in ",;\t":
        rows = itertools.islice(_cells(path, delimiter, _ignore), _SAMPLE)
        sizes[delimiter] = {len(row) for _, row in rows}
    fits = [each for each, size in sizes.items() if len(size) == 1 and size != {1}]
    yield from _cells(path, [*fits, ","][0], count)


def _cells(path: str, delimiter: str, count: Count) -> Iterator[tuple[int, Row]]:
    reader = csv.reader((line + "\n" for _, line in _decoded(path, count)), delimiter=delimiter)
    try:
        yield from ((reader.line_num, dict(enumerate(row, 1))) for row in reader if row)
    except csv.Error as error:
        fault = f"{path}, line {reader.line_num}: {one_line(error)}"
        raise SourceError(f"{fault}; is a quote not closed?") from error


def _read_json(path: str, count: Count) -> Iterator[tuple[int, Row]]:
    """Objects, one in a line; those of Hugging Face's datasets have the texts in "translation"."""
    for number, line in _decoded(path, count):
        try:
            row = parse_json(line) if line.strip() else {}
            row = row.get("translation", row)
            row = {key: "" if text is None else text for key, text in row.items()}
        except (ValueError, AttributeError) as error:
            fault = f"{path}, line {number} is no JSON object"
            raise SourceError(f"{fault}: each line must be one, {{...}}") from error
        if row:
            yield number, {key: text for key, text in row.items() if isinstance(text, str)}


def _read_tmx(path: str, count: Count) -> Iterator[tuple[int, Row]]:
    """The texts of each unit by language; "" of a language that it lacks."""
    body, number = None, 0
    try:
        with open_file(path, count) as raw:
            for event, node in ElementTree.iterparse(unzipped(raw), ("start", "end")):
                name = node.tag.rpartition("}")[2]
                if event == "start":
                    body = node if name == "body" else body
                elif name == "tu":
                    number += 1
                    variants = map(_variant, node.findall("{*}tuv"))
                    yield number, collections.defaultdict(str, variants)
                    (node if body is None else body).clear()  # it would fill the memory
    except (ElementTree.ParseError, ValueError, LookupError, *DAMAGE) as error:
        raise SourceError(f"{path} is no TMX, or damaged: {one_line(error)}") from error


def _variant(node: ElementTree.Element) -> tuple[str, str]:
    """The language and the text of a variant in a TMX."""
    code = node.get("{http://www.w3.org/XML/1998/namespace}lang") or node.get("lang") or ""
    segment = node.find("{*}seg")
    return languages.code(code) or code.lower(), "" if segment is None else _content(segment)


def _content(node: ElementTree.Element) -> str:
    """The text of a segment without the codes of its layout; only highlighted text is text."""
    parts = [node.text]
    for child in node:
        parts += [_content(child) if child.tag.endswith("hi") else "", child.tail]
    return "".join(filter(None, parts))


def _read_po(path: str, count: Count) -> Iterator[tuple[int, Row]]:
    """The messages of gettext, of several forms the first; neither fuzzy nor obsolete ones."""
    words = re.findall(r"[A-Za-z]+", path)
    code = next(filter(None, map(languages.code, reversed(words))), "target")
    content = "\n".join(line.strip() for _, line in _decoded(path, count)) + "\n"
    for number, match in enumerate(_MESSAGE.finditer(content), 1):
        parts = ("".join(re.findall(r'"(.*)"', match[side])) for side in ("id", "text"))
        source, target = (re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), p) for p in parts)
        if not source and (header := re.search(r"^Language: *(\w\S*)", target, re.MULTILINE)):
            code = languages.code(header[1]) or header[1]
        elif source and not re.search("^#,.*fuzzy", match["comments"], re.MULTILINE):
            yield number, {"en": source, code: target}


# The form and the reader of a file by the end of its name, behind which .gz may be.
FORMS: dict[str, tuple[str, Reader]] = {
    **dict.fromkeys((".tsv", ".tab", ".txt"), ("tsv", _read_tabs)),
    ".csv": ("pairs", _read_csv),
    ".tmx": ("tmx", _read_tmx),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), ("jsonl", _read_json)),
    ".po": ("po", _read_po),
}


def ending(path: str) -> str:
    """The end of a file's name, such as ".tsv", without .gz."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]
