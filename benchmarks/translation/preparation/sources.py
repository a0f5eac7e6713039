"""Streams pairs of sentences from parallel text, or from records that are packed (again).

Text is files, .gz, .sgm and members of tar archives, local or gs://. Records are tensor2tensor's,
or MLPerf's reference's.
"""

import argparse
import dataclasses
import gzip
import hashlib
import io
import itertools
import os
import posixpath
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.translation import agreement, rows
from benchmarks.translation.preparation import shards
from benchmarks.translation.vocabulary import Vocabulary
from common import limits
from common.data import files, records
from common.data.shards import record_name, tensorflow
from common.errors import DataError, one_line
from common.preparation.sources import SourceError, read_at
from common.text import is_sgm, limited_lines, sgm_sentences

_ARCHIVES = (".tgz", ".tar.gz", ".tar", ".tar.bz2", ".tar.xz")
_BUFFER = 1 << 20  # bytes of a read
_COUNTED = 1_000_000  # lines that the longer of two files has more, for the message
_RECORD_PATTERNS = {"train": "*-train-*", "eval": "*-dev-*,*-dev"}
_DAMAGE = (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile)

Count = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Text:
    """One file of lines; with a `member`, it is in the archive at `path`."""

    path: str
    member: str = ""

    @property
    def name(self) -> str:
        """The file in messages."""
        return f"{self.path}/{self.member}" if self.member else self.path

    def lines(self, count: Count = lambda size: None) -> Iterator[bytes]:
        r"""Yields the lines without "\n", which alone ends a line; of an .sgm its segments.

        Args:
            count: gets the number of bytes of each read, of the archive or file.

        Raises:
            SourceError: the file is damaged, or beyond one of `common.limits`.
            tf.errors.OpError: it cannot be read.
        """
        try:
            with _open(self.path, count) as raw:
                opened = _member(raw, self) if self.member else raw
                with _unzipped(opened) as file:
                    if is_sgm(self.name.removesuffix(".gz")):
                        yield from sgm_sentences(file, self.name, SourceError)
                    else:
                        yield from self._split(file)
        except _DAMAGE as error:
            raise SourceError(f"{self.name} is damaged or cut short: {one_line(error)}") from error

    def _split(self, file: Any) -> Iterator[bytes]:
        for i, line in enumerate(limited_lines(file, self.name, SourceError)):
            yield line.removeprefix(b"" if i else b"\xef\xbb\xbf").removesuffix(b"\n")


def _open(path: str, count: Count) -> io.BufferedReader:
    return io.BufferedReader(_File(path, count), _BUFFER)


class _File(io.RawIOBase):
    """A local or gs:// file; counts the bytes that are read."""

    def __init__(self, path: str, count: Count):
        limits.check_file(path, SourceError)
        self._file, self._count = tensorflow().io.gfile.GFile(path, "rb"), count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._count(len(data))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _unzipped(file: Any) -> Any:
    """The file itself, or its content if it is a gzip."""
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file


def _member(raw: Any, text: Text) -> Any:
    """Opens a member of an archive, without unpacking the archive."""
    archive = tarfile.open(fileobj=raw, mode="r|*")  # noqa: SIM115 (its file is returned)
    for info in archive:
        if posixpath.normpath(info.name) == text.member and info.isreg():
            file = archive.extractfile(info)
            assert file is not None  # it is a regular file
            return file
    raise SourceError(f"{text.path} holds no file {text.member}")


def _find_texts(argument: str) -> list[Text]:
    """The files of a comma-separated argument: FILE, FILE.gz, or ARCHIVE.tgz/MEMBER.

    Raises:
        SourceError: a file is missing.
    """
    gfile, texts = tensorflow().io.gfile, []
    for path in filter(None, argument.split(",")):
        archive, member = _split_member(path)
        if not gfile.exists(archive):
            raise SourceError(f"there is no {archive}")
        if gfile.isdir(archive):
            raise SourceError(f"{archive} is a folder; give files of text")
        if not member and archive.endswith(_ARCHIVES):
            raise SourceError(
                f"{archive} is an archive: give {archive}/MEMBER, or --train_archives={archive}"
            )
        texts.append(Text(archive, member))
    return texts


def _split_member(path: str) -> tuple[str, str]:
    for suffix in _ARCHIVES:
        archive, slash, member = path.partition(f"{suffix}/")
        if slash and member:
            return archive + suffix, posixpath.normpath(member)
    return path, ""


def pairs_in(archive: str, source: str, target: str) -> list[tuple[Text, Text]]:
    """The pairs of files in an archive whose names differ in the language only.

    NAME.en with NAME.de (each perhaps .gz), and NAME-src.en.sgm with NAME-ref.de.sgm.

    Raises:
        SourceError: the archive is damaged or has no pair.
    """
    if not tensorflow().io.gfile.exists(archive):
        raise SourceError(f"there is no {archive}")
    try:
        with _open(archive, lambda size: None) as raw, tarfile.open(fileobj=raw, mode="r|*") as tar:
            names = [posixpath.normpath(info.name) for info in tar if info.isreg()]
    except _DAMAGE as error:
        fault = one_line(error)
        raise SourceError(f"{archive} is no tar archive, or is damaged: {fault}") from error
    sides: list[dict[str, str]] = []
    for language, role in ((source, "src"), (target, "ref")):
        pattern = rf"(?P<stem>.*?)(-{role}\.{language}\.sgm|\.{language})(\.gz)?"
        matches = {name: re.fullmatch(pattern, name) for name in names if "/._" not in f"/{name}"}
        sides.append({match["stem"]: name for name, match in matches.items() if match})
    stems = [stem for stem in sides[0] if stem in sides[1]]
    if not stems:
        few = ", ".join(names[:4])
        raise SourceError(
            f"{archive} holds no files NAME.{source} and NAME.{target} (it holds {few} ...): set "
            "--source_language and --target_language"
        )
    return [(Text(archive, sides[0][stem]), Text(archive, sides[1][stem])) for stem in stems]


def _stamp_texts(texts: list[Text]) -> str:
    """A digest of the files' names, sizes, times and ends; it changes with the input."""
    digest, gfile = hashlib.sha256(), tensorflow().io.gfile
    for path in dict.fromkeys(text.path for text in texts):
        stat = gfile.stat(path)
        ends = read_at(path, 0, 1 << 16), read_at(path, max(0, stat.length - (1 << 16)), 1 << 16)
        digest.update(repr((path, stat.length, stat.mtime_nsec, *ends)).encode())
    digest.update(repr([text.member for text in texts]).encode())
    return digest.hexdigest()


def _size_of_texts(texts: list[Text]) -> int:
    """The bytes that reading the files takes; an archive counts once for each of its members."""
    gfile = tensorflow().io.gfile
    lengths = {path: gfile.stat(path).length for path in {text.path for text in texts}}
    return sum(lengths[text.path] for text in texts)


@dataclasses.dataclass
class Reading:
    """What one pass over pairs of files has seen: pairs of lines, and those with an empty side."""

    pairs: int = 0
    empty: int = 0


def _read_texts(
    pairs: list[tuple[Text, Text]], reading: Reading, count: Count = lambda size: None
) -> Iterator[tuple[str, str, bytes, bytes]]:
    """Yields (source, target, raw source, raw target) of the pairs that have both sides.

    The texts are without space at their ends, as in tensor2tensor.

    Args:
        pairs: source and target files, which belong together line by line.
        reading: takes the counts.
        count: see `Text.lines`.

    Raises:
        SourceError: the numbers of lines differ, or a line is not UTF-8.
    """
    for texts in pairs:
        lines = itertools.zip_longest(*(text.lines(count) for text in texts))
        for number, (left, right) in enumerate(lines, 1):
            if left is None or right is None:
                raise SourceError(_difference(texts, number, left is None, lines))
            reading.pairs += 1
            source, target = _text(left, texts[0], number), _text(right, texts[1], number)
            if source and target:
                yield source, target, left, right
            else:
                reading.empty += 1


def _text(line: bytes, text: Text, number: int) -> str:
    try:
        return line.decode().strip()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{text.name}, line {number} is not UTF-8 (byte 0x{line[error.start]:02x} at position "
            f"{error.start}): convert the file, for example with iconv"
        ) from error


def _difference(texts: tuple[Text, Text], number: int, first: bool, rest: Iterator) -> str:
    """The message for two files of which the first (or second) has only `number` - 1 lines."""
    more = number + sum(1 for _ in itertools.islice(rest, _COUNTED))
    least = "at least " * (more == number + _COUNTED)
    counts = [f"{number - 1:,}", f"{least}{more:,}"]
    left, right = counts if first else counts[::-1]
    return (
        f"{texts[0].name} has {left} lines and {texts[1].name} {right}: line i of one must be the "
        "translation of line i of the other"
    )


class TextInput:
    """Files of text as an input.

    Attributes:
        is_ids: whether pairs are ids, not text.
        vocabulary: path of a vocabulary to use; "" if it is to be built.
    """

    is_ids = False

    def __init__(self, args: argparse.Namespace):
        self.vocabulary = args.vocabulary
        self.pairs: dict[str, list[tuple[Text, Text]]] = {}
        for split in ("train", "eval"):
            sides = [_find_texts(getattr(args, f"{split}_{s}")) for s in ("source", "target")]
            self.pairs[split] = list(zip(*sides, strict=True))
        for archive in filter(None, args.train_archives.split(",")):
            print(f"listing {archive}", flush=True)
            pairs = pairs_in(archive, args.source_language, args.target_language)
            self.pairs["train"] += pairs
        for source, target in self.pairs["train"]:
            print(f"train: {source.name} and {target.name}", flush=True)

    def stamps(self, split: str) -> dict[str, str]:
        """A digest of each input of "train" or "eval", by its flag."""
        sources, targets = (
            _stamp_texts([pair[side] for pair in self.pairs[split]]) for side in (0, 1)
        )
        vocabulary = _stamp_texts([Text(self.vocabulary)] if self.vocabulary else [])
        return {f"{split}_source": sources, f"{split}_target": targets, "vocabulary": vocabulary}

    def size(self) -> int:
        """The bytes that reading the training pairs takes."""
        return _size_of_texts([text for pair in self.pairs["train"] for text in pair])

    def read(
        self, split: str, reading: Reading, count: Count
    ) -> Iterator[tuple[str, str, bytes, bytes]]:
        """See `_read_texts`."""
        return _read_texts(self.pairs[split], reading, count)

    def use(self, vocabulary: Vocabulary) -> None:
        """Takes the vocabulary, before `read`; any one fits text."""


class RecordInput:
    """A folder of records, each a pair of ids or a packed row of them; see `TextInput`."""

    is_ids = True

    def __init__(self, args: argparse.Namespace):
        """Raises SourceError if the folder lacks a vocabulary, or one complete set of a split."""
        self._folder = args.records
        try:
            self._paths = {
                split: files.find(args.records, patterns, f"{split} records")
                for split, patterns in _RECORD_PATTERNS.items()
            }
            for paths in self._paths.values():
                files.check_complete(paths)
        except DataError as error:
            raise SourceError(str(error)) from error
        for split, paths in self._paths.items():
            if len(sets := files.stems(paths)) > 1:
                names = " and ".join(f"{os.path.basename(stem)}-*" for stem in sets[:2])
                raise SourceError(
                    f"{args.records} holds {len(sets)} sets of {split} records, {names}, and every "
                    "pair would be taken from each: keep one set in the folder"
                )
        self.vocabulary = args.vocabulary or self._own_vocabulary()
        self._size = 0

    def _own_vocabulary(self) -> str:
        names = [name for name in records.list_folder(self._folder) if "vocab" in name]
        if len(names) != 1:
            raise SourceError(
                f"{self._folder} holds {len(names)} files named vocab*: give --vocabulary=FILE"
            )
        return os.path.join(self._folder, names[0])

    def stamps(self, split: str) -> dict[str, str]:
        gfile = tensorflow().io.gfile
        digest = hashlib.sha256()
        for path in self._paths[split]:
            stat = gfile.stat(path)
            digest.update(repr((path, stat.length, stat.mtime_nsec)).encode())
        vocabulary = [Text(self.vocabulary)]
        return {"records": digest.hexdigest(), "vocabulary": _stamp_texts(vocabulary)}

    def size(self) -> int:
        return sum(files.sizes(self._paths["train"]))

    def use(self, vocabulary: Vocabulary) -> None:
        """Raises DataError if the manifest or the ids say that the records have another one."""
        rows.check_vocabulary(self._folder, vocabulary, self.vocabulary)
        for split, paths in self._paths.items():
            fault, is_certain = agreement.fault(vocabulary, paths, split == "eval")
            if is_certain:
                raise DataError(fault)
            if fault:
                print(f"warning: {fault}", flush=True)
        self._vocabulary = vocabulary

    def read(
        self, split: str, reading: Reading, count: Count
    ) -> Iterator[tuple[str, str, bytes, bytes]]:
        """Yields (source, target, ids, ids); the texts only of split "eval".

        Raises:
            DataError: a record is damaged, of another schema, or of another vocabulary.
        """
        for path in self._paths[split]:
            for number, record in enumerate(records.read_shard(path)):
                count(len(record) + 16)
                for pair in _record_pairs(record, record_name(path, number), self._vocabulary.size):
                    reading.pairs += 1
                    texts = ("", "")
                    if split == "eval":
                        texts = tuple(self._vocabulary.decode(ids.tolist()) for ids in pair)
                    left, right = map(shards.as_bytes, pair)
                    yield texts[0], texts[1], left, right


def _record_pairs(record: bytes, name: str, vocab_size: int) -> Iterator[list[np.ndarray]]:
    """The pairs of ids in a record."""
    row = rows.of_record(record, name)
    if fault := rows.any_fault(row, vocab_size):
        raise DataError(f"{name}: {fault}")
    yield from rows.pairs(row)
