"""Reads sentences from files: lines, or pairs in tables, TMX, JSON lines and gettext's .po.

Each file may be local or gs://, a .gz, or a member of a tar or zip. Nothing is unpacked, and no
file is held in memory.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import io
import itertools
import json
import os
import posixpath
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from benchmarks.translation.preparation import languages
from common import limits
from common.data.shards import tensorflow
from common.errors import one_line
from common.preparation.sources import SourceError
from common.text import is_sgm, limited_lines, sgm_sentences

DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile)
FORMS = {  # by the ends of names, behind which .gz may be
    **dict.fromkeys((".tsv", ".tab", ".txt"), "tsv"),
    ".csv": "pairs",
    ".tmx": "tmx",
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".po": "po",
}
_BUFFER = 1 << 20  # bytes of a read
_SAMPLE = 50  # rows that tell what the columns and languages are
_LINE_ENDS = re.compile(r"\r?\n|\r")

Count = Callable[[int], Any]  # gets the number of bytes of each read
Lines = Iterable[tuple[int, str]]  # with their numbers, from 1


class Text(NamedTuple):
    """One file of lines; with a `member`, it is in the archive at `path`."""

    path: str
    member: str = ""

    @property
    def name(self) -> str:
        """The file in messages."""
        return f"{self.path}/{self.member}" if self.member else self.path

    def lines(self, count: Count = lambda size: None) -> Iterator[bytes]:
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
        for name, extract in members(raw):
            if name == self.member:
                return extract()
        raise SourceError(f"{self.path} holds no file {self.member}")


def open_file(path: str, count: Count = lambda size: None) -> io.BufferedReader:
    """Opens a local or gs:// file; `count` gets the bytes of each read."""
    limits.check_file(path, SourceError)
    return io.BufferedReader(_File(path, count), _BUFFER)


def unzipped(file: Any) -> Any:
    """What is in a .gz; other files as they are."""
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file


def members(file: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of each file in a tar or a zip that `open_file` opened, and what opens it."""
    if file.peek(2)[:2] == b"PK":
        errors = tensorflow().errors
        try:
            archive = zipfile.ZipFile(file.raw.file)
        except (errors.OutOfRangeError, errors.InvalidArgumentError) as error:
            raise zipfile.BadZipFile("it has no end") from error
        for info in archive.infolist():
            if not info.is_dir():
                yield posixpath.normpath(info.filename), functools.partial(archive.open, info)
        return
    tar = tarfile.open(fileobj=file, mode="r|*")  # noqa: SIM115 (its members are read)
    for info in tar:
        if info.isreg():
            yield posixpath.normpath(info.name), functools.partial(tar.extractfile, info)


class _File(io.RawIOBase):
    """A local or gs:// file; counts the bytes that are read."""

    def __init__(self, path: str, count: Count):
        self.file, self._count = tensorflow().io.gfile.GFile(path, "rb"), count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        self._count(len(data))
        return len(data)


def form(path: str) -> str:
    """The form of a file by its name, a value of `FORMS`, or ""."""
    return FORMS.get(os.path.splitext(path.lower().removesuffix(".gz"))[1], "")


class Corpus(NamedTuple):
    """A file of pairs.

    Attributes:
        path: local or gs://.
        form: see `FORMS`.
        places: of source and target: columns of a table, from 0; else keys or languages.
        names: of the places, for people.
        header: the first row of a table, if it names the columns.
        delimiter: of the columns of a table.
    """

    path: str
    form: str
    places: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    delimiter: str = "\t"

    @classmethod
    def open(
        cls, path: str, columns: Sequence[str] = (), wanted: tuple[str, str] = ("", "")
    ) -> Corpus:
        """Looks at the first rows of a file.

        Args:
            path: of the file.
            columns: those of source and target, by name or by number from 1; () to guess.
            wanted: languages of source and target; see `languages.choose`.

        Raises:
            SourceError: the file is of another form, or it is not clear what is the source.
        """
        if not tensorflow().io.gfile.exists(path):
            raise SourceError(f"there is no {path}")
        if tensorflow().io.gfile.isdir(path):
            fix = f"give its files, or the folder alone: python -m scripts.prepare {path}"
            raise SourceError(f"{path} is a folder: {fix}")
        corpus = cls(path, form(path) or "tsv")
        if corpus.form == "pairs":  # the one that cuts all of the first rows into as many columns
            tables = [corpus._replace(delimiter=delimiter) for delimiter in ",;\t"]
            sizes = [{len(row) for row in table._sample()} for table in tables]
            fits = [len(size) == 1 and size != {1} for size in sizes]
            corpus = tables[fits.index(True) if any(fits) else 0]
        rows = corpus._sample()
        is_table = corpus.form in ("tsv", "pairs")
        names = [*rows[0]] if rows and is_table else [*dict.fromkeys(itertools.chain(*rows))]
        choices = [languages.choose(row, wanted) for row in (rows[:4] if is_table else [names])]
        places, is_header = choices[0] if choices else (), any(choices[:1])
        if columns:
            lower = [name.strip().lower() for name in names]
            is_header |= not all(map(str.isdigit, columns))
            with contextlib.suppress(ValueError):
                places = [int(c) - 1 if c.isdigit() else lower.index(c.lower()) for c in columns]
        elif any(choices[1:]) and not is_header:
            raise SourceError(f"{path} has a header, but not in line 1: delete the lines before it")
        elif corpus.form in ("tmx", "po") and len(names) == 2 and not (places or any(wanted)):
            names.sort(key=lambda name: name != "en")
            places = 0, 1  # of languages that `languages` does not know
        elif rows and is_table and not is_header and sum(map(bool, map(languages.code, names))) < 3:
            places = _text_columns(rows)
        if len(places) != 2 or not 0 <= min(places) <= max(places) < len(names):
            few = ", ".join(name[:30] for name in names[:20])
            if len(names) < 2:
                fix = "pairs need two; give files of lines as --train_source and --train_target"
                raise SourceError(f"{path} has one column or language, {few or 'no text'}: {fix}")
            raise SourceError(
                f"{path} has {few}: which two are the source and the target? Give --columns=A,B, "
                "names or numbers from 1, or --source_language and --target_language"
            )
        if not is_table:
            chosen = tuple(names[i] for i in places)
            return corpus._replace(places=chosen, names=chosen)
        is_header |= all(languages.code(names[i]) for i in places)
        labels = tuple(names[i] if is_header else f"column {i + 1}" for i in places)
        header = tuple(names) if is_header else ()
        return corpus._replace(places=tuple(places), names=labels, header=header)

    def pairs(self, count: Count = lambda size: None) -> Iterator[tuple[str, str]]:
        """Yields source and target of each row; both are "" where a unit of TMX lacks one.

        Raises:
            SourceError: the file is damaged; the message names the row.
            tf.errors.OpError: it cannot be read.
        """
        for i, (number, row) in enumerate(self.rows(count)):
            if self.header and tuple(row) == self.header:
                if i:
                    raise SourceError(f"{self.path}, line {number} is the header again: delete it")
                continue
            try:
                source, target = (row[place] for place in self.places)
            except (IndexError, KeyError) as error:
                if self.form in ("tmx", "po"):
                    yield "", ""
                    continue
                raise SourceError(
                    f"{self.path}, line {number} has {len(row)} of the columns, and not both "
                    f"{' and '.join(self.names)}: correct or delete it"
                ) from error
            if not (isinstance(source, str) and isinstance(target, str)):
                names = " and ".join(self.names)
                raise SourceError(f"{self.path}, line {number}: {names} are not both text")
            yield _LINE_ENDS.sub(" ", source), _LINE_ENDS.sub(" ", target)

    def has_sentences(self) -> bool:
        """Whether the first rows look like text, and not like ratings, titles or labels.

        Raises: see `pairs`.
        """
        if self.form in ("tmx", "po"):
            return True
        is_certain = {*map(languages.code, self.names)} - {"", "source", "target"}
        pattern = r"[^\W\d_]" if is_certain else r"[.!?\u2026\u3002\uff01\uff1f\u0964]\W*$"
        sides = [*zip(*itertools.islice(self.pairs(), _SAMPLE), strict=True)]
        return bool(sides) and all(
            2 * sum(bool(re.search(pattern, text)) for text in side) >= len(side) for side in sides
        )

    def rows(self, count: Count = lambda size: None) -> Iterator[tuple[int, Any]]:
        """Yields the number of each row, from 1, and its cells, or its texts by key or language."""
        if self.form == "tmx":
            return enumerate(self._units(count), 1)
        text = Text(self.path)
        lines = ((i, text.decode(line, i)) for i, line in enumerate(text.lines(count), 1))
        read = {"tsv": _cells, "pairs": self._quoted, "jsonl": self._objects, "po": self._messages}
        return read[self.form](lines)

    def _sample(self) -> list[Any]:
        return [row for _, row in itertools.islice(self.rows(), _SAMPLE)]

    def _quoted(self, lines: Lines) -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader((line + "\n" for _, line in lines), delimiter=self.delimiter)
        try:
            yield from ((reader.line_num, row) for row in reader if row)
        except csv.Error as error:
            fault = f"{self.path}, line {reader.line_num}: {one_line(error)}"
            raise SourceError(f"{fault}; is a quote not closed?") from error

    def _objects(self, lines: Lines) -> Iterator[tuple[int, dict[str, Any]]]:
        """Objects of JSON; those of Hugging Face's datasets have the texts in "translation"."""
        for number, line in lines:
            try:
                row = json.loads(line) if line.strip() else {}
                row = row.get("translation", row)
                if row:
                    yield number, {key: "" if row[key] is None else row[key] for key in row}
            except (ValueError, AttributeError, TypeError, RecursionError) as error:
                fault = f"{self.path}, line {number} is no JSON object"
                raise SourceError(f"{fault}: each line must be one, {{...}}") from error

    def _units(self, count: Count) -> Iterator[dict[str, str]]:
        """The texts of each unit of a TMX by language."""
        body = None
        try:
            with open_file(self.path, count) as raw:
                for event, node in ElementTree.iterparse(unzipped(raw), ("start", "end")):
                    name = node.tag.rpartition("}")[2]
                    if event == "start":
                        body = node if name == "body" else body
                    elif name == "tu":
                        yield dict(map(_variant, node.findall("{*}tuv")))
                        (node if body is None else body).clear()  # it would fill the memory
        except (ElementTree.ParseError, ValueError, LookupError, *DAMAGE) as error:
            raise SourceError(f"{self.path} is no TMX, or damaged: {one_line(error)}") from error

    def _messages(self, lines: Lines) -> Iterator[tuple[int, dict[str, str]]]:
        """The messages of a .po, of several forms the first; neither fuzzy nor obsolete ones."""
        words = re.findall(r"[A-Za-z]+", self.path)
        code = next(filter(None, map(languages.code, reversed(words))), "target")
        parts, part, is_fuzzy = {}, "", False
        for number, raw in itertools.chain(lines, [(0, "")]):
            line = raw.strip()
            match = re.fullmatch(r'(?:(msg[a-z_]+(?:\[\d+\])?)\s*)?"(.*)"', line)
            if not match and line[:1] not in ("", "#"):
                raise SourceError(f"{self.path}, line {number} is no gettext: {line[:40]!r}")
            begins = match[1] in ("msgctxt", "msgid") if match else True
            if begins and "msgstr" in parts:
                if parts.get("msgid") and not is_fuzzy:
                    yield number, {"en": parts["msgid"], code: parts["msgstr"]}
                elif header := re.search(r"^Language: *(\w\S*)", parts["msgstr"], re.MULTILINE):
                    code = code if parts.get("msgid") else languages.code(header[1]) or header[1]
                parts, is_fuzzy = {}, False
            if match:
                part = (match[1] or part).replace("msgstr[0]", "msgstr")
                text = re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), match[2])
                parts[part] = parts.get(part, "") + text
            is_fuzzy |= line.startswith("#,") and "fuzzy" in line


def _cells(lines: Lines) -> Iterator[tuple[int, list[str]]]:
    """Cells with tabs between them; quotes are a part of the text."""
    return ((number, line.rstrip("\r").split("\t")) for number, line in lines if line.strip())


def _text_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The first two columns that hold text: no numbers, no codes of languages."""
    chosen = []
    for i in range(len(rows[0]) if rows else 0):
        cells = [row[i] for row in rows if i < len(row)]
        texts = [c for c in cells if re.search(r"[^\W\d_]", c) and not languages.code(c)]
        chosen += [i] if 2 * len(texts) > len(cells) else []
    return chosen[:2]


def _variant(node: ElementTree.Element) -> tuple[str, str]:
    """The language and the text of a variant in a TMX."""
    code = node.get("{http://www.w3.org/XML/1998/namespace}lang") or node.get("lang") or ""
    segment = node.find("{*}seg")
    return languages.code(code) or code.lower(), "" if segment is None else _content(segment)


def _content(node: ElementTree.Element) -> str:
    """The text of a segment without the codes of its layout; only highlighted text is text."""
    parts = [node.text or ""]
    for child in node:
        is_text = child.tag.rpartition("}")[2] in ("hi", "mrk")
        parts += [_content(child) if is_text else "", child.tail or ""]
    return "".join(parts)
