"""Reads the formats of parallel text: two files of lines, tables, JSON Lines, TMX, XLIFF, .po.

To add a format of one file, write a reader like `_read_tmx` and name it in `FORMATS`. Each file may
be local or gs://, and a .gz.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import csv
import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.translation.preparation import languages
from common import limits, translator_files
from common.errors import one_line, parse_json
from common.preparation.sources import SourceError
from common.tensorflow import tensorflow
from common.text import decoded, is_sgm, limited_lines, sgm_sentences

_SAMPLE = 50  # rows that tell what the columns and languages are
_LINE_ENDS = re.compile(r"\r?\n|\r")
_END = r"[.!?\u2026\u3002\uff01\uff1f\u0964]\W*$"  # of a sentence
# Columns and keys that say whether a translation is final, and "name=cell" of one that is not.
_STATE = re.compile("fuzzy|approved|(translation[ _-]?)?(state|status)")
# Columns and keys that say which languages a row has.
_TAG = re.compile(r"((source|src|target|tgt|trg)[ _-]?)?(lang(uage)?|locale)([ _-]?(code|pair))?")
_UNFINISHED = re.compile(
    "fuzzy=(true|1|yes|x|fuzzy)|approved=(false|0|no)|.*(state|status)=(fuzzy|new|initial|draft|"
    "rejected.*|untranslated|unapproved|needs?[ _-].*)"
)

Row = dict[Any, str]  # texts by the number of a column, from 1, or by key
Reader = Callable[[str], Iterator[tuple[int, Row]]]  # yields the number of each row, from 1, and it


class Question(SourceError):
    """The input is text, but not clear, not as asked for, or to be converted: the user decides."""


def lines(path: str) -> Iterator[str]:
    r"""Yields a file's lines without "\n", which alone ends a line; of an .sgm its segments."""
    read = sgm_sentences if is_sgm(path.removesuffix(".gz")) else limited_lines
    with _opened(path) as file:
        head = file.peek(1 << 12)
        if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            file = io.BytesIO(decoded(file.read(), path, SourceError).encode())
        for number, line in enumerate(read(file, path, SourceError), 1):
            yield decoded(line.removesuffix(b"\n"), path, SourceError, number)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    """The bytes of a file, unpacked if it is a .gz."""
    limits.check_file(path, SourceError)
    try:
        with io.BufferedReader(_File(path), 1 << 20) as raw:
            yield gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise SourceError(f"{path} is damaged or cut short: {one_line(error)}") from error


class _File(io.RawIOBase):
    """A local or gs:// file with the interface of Python's own files."""

    def __init__(self, path: str):
        self._file = tensorflow().io.gfile.GFile(path, "rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Lines(NamedTuple):
    """Two files, of which line i of one is the translation of line i of the other."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} and {self.target}"

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yields the pairs of lines; SourceError if the files differ in their numbers of lines."""
        both = itertools.zip_longest(lines(self.source), lines(self.target))
        for number, (source, target) in enumerate(both, 1):
            if source is None or target is None:
                total = number + sum(1 for _ in both)
                counts = [number - 1 if line is None else total for line in (source, target)]
                raise SourceError(
                    f"{self.source} has {counts[0]:,} lines and {self.target} {counts[1]:,}: "
                    "line i of one must be the translation of line i of the other"
                )
            yield source, target


class Corpus(NamedTuple):
    """A file of pairs."""

    path: str  # local or gs://
    read: Reader
    keys: Sequence[Any]  # of source and target in the rows
    names: tuple[str, ...]  # of source and target, in messages
    has_header: bool  # whether the first row of a table names the columns
    states: Mapping[str, Any]  # names and keys of what says whether a row is final
    tags: Sequence[Any]  # keys of the languages of a row, where the names say none
    left_out: collections.Counter[str]  # rows that `pairs` left out last, by reason

    @classmethod
    def open(
        cls, path: str, columns: Sequence[str] = (), wanted: tuple[str, str] = ("", "")
    ) -> Corpus:
        """Looks at the first rows of a file.

        `columns` are source and target, by name or by number from 1. Without them the languages
        that are `wanted`, of which each may be "", and the names in the file decide.
        """
        if not tensorflow().io.gfile.exists(path):
            raise SourceError(f"there is no {path}")
        if tensorflow().io.gfile.isdir(path):
            fix = f"give its files, or the folder alone: python -m scripts.prepare {path}"
            raise SourceError(f"{path} is a folder: {fix}")
        if not (read := FORMATS.get(ending(path), ("", None))[1]):
            raise SourceError(
                f"{path} is not a file of pairs ({', '.join(FORMATS)}): give files of lines as "
                "--train_source and --train_target, and export others as one of these"
            )
        rows = [row for _, row in itertools.islice(read(path), _SAMPLE)]
        numbers = {str(key): key for row in rows for key in row}
        is_table = "1" in numbers
        header = rows[0] if is_table and languages.have_header(rows, columns, wanted) else {}
        titles: dict[Any, str] = {key: cell.strip() for key, cell in header.items()}
        if is_table and not header:
            texts = languages.text_columns(rows)
            tags = languages.pair_of(path) if len(texts) == 2 else ()
            titles = dict(zip(texts, tags or [f"column {key}" for key in texts], strict=True))
        names = {title: key for key, title in titles.items()} if is_table else numbers
        states = {name: key for name, key in names.items() if _STATE.fullmatch(name.lower())}
        tags = [key for name, key in names.items() if _TAG.fullmatch(name.lower())]
        names = {name: key for name, key in names.items() if name not in states}
        sides = columns or languages.choose(names, wanted)
        if not (sides or any(wanted)):  # two other keys, languages or columns
            sides = sorted(names, key=lambda name: languages.code(name) != "en")
        keys = [names.get(side, numbers.get(side)) for side in sides]
        if len(keys) != 2 or None in keys:
            raise _choice(path, [*names], wanted)
        sides = (titles.get(key, f"column {key}" if is_table else str(key)) for key in keys)
        left_out, sides = collections.Counter[str](), tuple(sides)
        tags = [] if _languages(sides) else tags
        return cls(path, read, keys, sides, bool(header), states, tags, left_out)

    def __str__(self) -> str:
        return f"{self.path}, {' to '.join(self.names)}"

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yields source and target of each final row; SourceError, with the row, if one lacks."""
        self.left_out.clear()
        seen: list[str] = []
        for number, row in itertools.islice(self.read(self.path), int(self.has_header), None):
            states = (f"{name}={row.get(key)}".lower() for name, key in self.states.items())
            if any(map(_UNFINISHED.fullmatch, states)):
                self.left_out["fuzzy"] += 1
                continue
            try:
                source, target = (_LINE_ENDS.sub(" ", row[key]) for key in self.keys)
            except KeyError as error:
                fault = f"no text for both {' and '.join(self.names)}: correct or delete it"
                raise SourceError(f"{self.path}, line {number} has {fault}") from error
            said = [row.get(key, "") for key in self.tags]
            if said != (seen := seen or said):
                fault = f"is {' to '.join(said)}, and rows before are {' to '.join(seen)}"
                fix = "write the rows of each pair of languages into a file of its own"
                raise Question(f"{self.path}, line {number} {fault}: {fix}")
            yield source, target

    def has_sentences(self) -> bool:
        """Whether the first pairs look like text, and not like ratings, titles or labels."""
        pattern = languages.LETTER if self.tags or _languages(self.names) else _END
        pairs = (pair for pair in self.pairs() if all(map(str.strip, pair)))
        sides = [*zip(*itertools.islice(pairs, _SAMPLE), strict=True)]
        return bool(sides) and all(languages.are_mostly(side, pattern) for side in sides)


def _languages(names: Sequence[str]) -> set[str]:
    """The tags of the languages that names say, not only source and target."""
    return {*map(languages.code, names)} - {"", "source", "target"}


def _choice(path: str, names: Sequence[str], wanted: tuple[str, str]) -> SourceError:
    """The error where the source and the target are not clear among some names."""
    few = ", ".join(name[:30] for name in names[:20]) or "no text"
    is_text = len(languages.named(names, wanted)) > 1 or (any(wanted) and len(names) == 2)
    error = Question if is_text else SourceError
    flags = zip(("source", "target"), wanted, strict=True)
    if asked := " and ".join(f"--{side}_language={tag}" for side, tag in flags if tag):
        few += f", and {asked} names none of them, or several"
    if len(names) > 1:
        fix = "which two are the source and the target? Give --columns=A,B, names or numbers from 1"
        return error(f"{path} has {few}: {fix}, or --source_language and --target_language")
    fix = "a pair has two; give files of lines as --train_source and --train_target"
    return error(f"{path} has {few}: {fix}")


def _read_tabs(path: str) -> Iterator[tuple[int, Row]]:
    """Cells with tabs between them; quotes are a part of the text."""
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            yield number, dict(enumerate(line.rstrip("\r").split("\t"), 1))


def _read_csv(path: str) -> Iterator[tuple[int, Row]]:
    """Cells that may be quoted; the delimiter cuts all of the first rows into as many."""
    fits = []
    for delimiter in ",;\t":
        sizes = {len(row) for _, row in itertools.islice(_cells(path, delimiter), _SAMPLE)}
        if len(sizes) == 1 and sizes != {1}:
            fits.append(delimiter)
    yield from _cells(path, [*fits, ","][0])


def _cells(path: str, delimiter: str) -> Iterator[tuple[int, Row]]:
    reader = csv.reader((line + "\n" for line in lines(path)), delimiter=delimiter)
    try:
        for row in reader:
            if row:
                yield reader.line_num, dict(enumerate(row, 1))
    except csv.Error as error:
        fault = f"{path}, line {reader.line_num}: {one_line(error)}"
        raise SourceError(f"{fault}; is a quote not closed?") from error


def _read_json(path: str) -> Iterator[tuple[int, Row]]:
    """Objects, one in a line; Hugging Face's datasets have the texts in "translation"."""
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            row = row.get("translation", row)
            row = {key: "" if text is None else text for key, text in row.items()}
        except (ValueError, AttributeError) as error:
            fault = f"{path}, line {number} is not a JSON object"
            raise SourceError(f"{fault}: each line must be one, {{...}}") from error
        row = {key: str(text) if _STATE.fullmatch(key) else text for key, text in row.items()}
        yield number, {key: text for key, text in row.items() if isinstance(text, str)}


def _read_tmx(path: str) -> Iterator[tuple[int, Row]]:
    """The texts of each unit by language; "" of a language that it lacks."""
    with _opened(path) as file:
        units = translator_files.elements(file, ("tu",), path, SourceError)
        for number, unit in enumerate(units, 1):
            sides = ((translator_files.language(side), side) for side in unit.iterfind("{*}tuv"))
            texts = ((_tag(word), _text(side.find("{*}seg"))) for word, side in sides)
            yield number, collections.defaultdict(str, texts)


def _read_xliff(path: str) -> Iterator[tuple[int, Row]]:
    """Source and target of each unit of XLIFF 1.2, or segment of XLIFF 2, with its state."""
    with _opened(path) as file:
        tags = "trans-unit", "segment"
        for number, unit in enumerate(translator_files.elements(file, tags, path, SourceError), 1):
            target = unit.find("{*}target")
            words = translator_files.xliff_languages(unit)
            source, other = _tag(words[0]) or "source", _tag(words[1]) or "target"
            row = {source: _text(unit.find("{*}source")), other: _text(target)}
            state = unit.get("state") or ("" if target is None else target.get("state", ""))
            yield number, {**row, "state": state, "approved": unit.get("approved", "")}


def _tag(word: str) -> str:
    return languages.code(word) or word.lower().replace("_", "-")


def _text(segment: Any) -> str:
    """The text of a segment without the codes of its layout; highlighted text is text, too."""
    if segment is None:
        return ""
    return "".join(each for each in translator_files.pieces(segment) if isinstance(each, str))


def _read_po(path: str) -> Iterator[tuple[int, Row]]:
    """The messages of gettext, of several forms the first; not obsolete ones."""
    with _opened(path) as file:
        catalog, _ = translator_files.catalog(file.read(limits.TEXT_BYTES + 1), path, SourceError)
    word = catalog.metadata.get("Language", "")
    tag = _tag(word) or languages.of_path(path) or "target"
    for entry in catalog:
        if entry.msgid and not entry.obsolete:
            target = entry.msgstr or entry.msgstr_plural.get(0, "")
            fuzzy = "x" if entry.fuzzy else ""
            yield entry.linenum, {"en": entry.msgid, tag: target, "fuzzy": fuzzy}


# Of each end of a file's name, behind which .gz may be: the format, for --as, and its reader.
FORMATS: dict[str, tuple[str, Reader]] = {
    ".tsv": ("tsv", _read_tabs),
    ".tab": ("tsv", _read_tabs),
    ".txt": ("tsv", _read_tabs),
    ".csv": ("pairs", _read_csv),
    ".jsonl": ("jsonl", _read_json),
    ".ndjson": ("jsonl", _read_json),
    ".json": ("jsonl", _read_json),
    ".tmx": ("tmx", _read_tmx),
    ".xlf": ("xliff", _read_xliff),
    ".xliff": ("xliff", _read_xliff),
    ".po": ("po", _read_po),
}


def ending(path: str) -> str:
    """The end of a file's name, such as ".tsv", without .gz."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]
