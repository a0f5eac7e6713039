"""Streams pairs of sentences from parallel text, or from records that are packed (again).

Text is files, .gz, .sgm and members of tar archives, local or gs://. Records are tensor2tensor's,
or MLPerf's reference's.
"""

import argparse
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
from typing import Any, NamedTuple

from benchmarks.translation import agreement, rows
from benchmarks.translation.vocabulary import Vocabulary, Words, load_vocabulary
from common import limits
from common.data import files, records
from common.data.shards import record_name, tensorflow
from common.errors import DataError, one_line
from common.preparation.sources import SourceError, read_at
from common.text import is_sgm, limited_lines, sgm_sentences

_ARCHIVE = r"(.+?\.(?:tgz|tar|tar\.gz|tar\.bz2|tar\.xz))"
_BUFFER = 1 << 20  # bytes of a read
_RECORD_PATTERNS = {"train": "*-train-*", "eval": "*-dev-*,*-dev"}
_DAMAGE = (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile)

Count = Callable[[int], Any]  # gets the number of bytes of each read
Side = str | list[int]  # of a pair: its text, or its ids with EOS


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
            with _open(self.path, count) as raw:
                file = self._find_member(raw) if self.member else raw
                if file.peek(2)[:2] == b"\x1f\x8b":
                    file = gzip.GzipFile(fileobj=file)
                if is_sgm(self.name.removesuffix(".gz")):
                    yield from sgm_sentences(file, self.name, SourceError)
                    return
                for i, line in enumerate(limited_lines(file, self.name, SourceError)):
                    yield line.removeprefix(b"" if i else b"\xef\xbb\xbf").removesuffix(b"\n")
        except _DAMAGE as error:
            raise SourceError(f"{self.name} is damaged or cut short: {one_line(error)}") from error

    def _find_member(self, raw: Any) -> Any:
        """Opens the member, without unpacking the archive."""
        archive = tarfile.open(fileobj=raw, mode="r|*")  # noqa: SIM115 (its member is read)
        for info in archive:
            if posixpath.normpath(info.name) == self.member and info.isreg():
                return archive.extractfile(info)
        raise SourceError(f"{self.path} holds no file {self.member}")


def _open(path: str, count: Count) -> io.BufferedReader:
    limits.check_file(path, SourceError)
    return io.BufferedReader(_File(path, count), _BUFFER)


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


def _find_texts(argument: str) -> list[Text]:
    """The files of a comma-separated argument: FILE, FILE.gz, or ARCHIVE.tgz/MEMBER.

    Raises:
        SourceError: a file is missing.
    """
    gfile, texts = tensorflow().io.gfile, []
    for path in filter(None, argument.split(",")):
        match = re.fullmatch(f"{_ARCHIVE}/(.+)", path)
        text = Text(match[1], posixpath.normpath(match[2])) if match else Text(path)
        if not gfile.exists(text.path):
            raise SourceError(f"there is no {text.path}")
        if gfile.isdir(text.path):
            raise SourceError(f"{text.path} is a folder; give files of text")
        if not match and re.fullmatch(_ARCHIVE, path):
            raise SourceError(
                f"{path} is an archive: give {path}/MEMBER, or --train_archives={path}"
            )
        texts.append(text)
    return texts


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


def _stamp(texts: list[Text]) -> str:
    """A digest of the files' names, sizes, times and ends; it changes with the input."""
    digest, gfile = hashlib.sha256(), tensorflow().io.gfile
    for path in dict.fromkeys(text.path for text in texts):
        stat = gfile.stat(path)
        ends = read_at(path, 0, 1 << 16), read_at(path, max(0, stat.length - (1 << 16)), 1 << 16)
        digest.update(repr((path, stat.length, stat.mtime_nsec, *ends)).encode())
    digest.update(repr([text.member for text in texts]).encode())
    return digest.hexdigest()


def _load(path: str) -> Vocabulary:
    """A vocabulary for plain text, from a file; DataError if it is none."""
    vocabulary = load_vocabulary(path)
    if isinstance(vocabulary, Words):
        raise DataError(
            f"{path} is a vocabulary of tokenized text, which the benchmark gnmt reads as it is; "
            "to prepare plain text, give subwords of tensor2tensor or a sentencepiece model"
        )
    return vocabulary


class TextInput:
    """Files of text as an input.

    Attributes:
        vocabulary: the one to use; None if it is to be built.
        size: bytes that reading the training pairs takes; archives count for each member.
    """

    def __init__(self, args: argparse.Namespace):
        self._pairs: dict[str, list[tuple[Text, Text]]] = {}
        for split in ("train", "eval"):
            sides = [_find_texts(getattr(args, f"{split}_{s}")) for s in ("source", "target")]
            self._pairs[split] = list(zip(*sides, strict=True))
        train = self._pairs["train"]
        for archive in filter(None, args.train_archives.split(",")):
            print(f"listing {archive}", flush=True)
            train += pairs_in(archive, args.source_language, args.target_language)
        for source, target in train:
            print(f"train: {source.name} and {target.name}", flush=True)
        self._own = [Text(args.vocabulary)] if args.vocabulary else []
        self.vocabulary = _load(args.vocabulary) if args.vocabulary else None
        self.size = sum(files.sizes([text.path for pair in train for text in pair]))

    def stamps(self) -> dict[str, str]:
        """A digest of each input of the training rows, by its flag."""
        sides = zip(*self._pairs["train"], strict=True)
        sources, targets = (_stamp([*side]) for side in sides)
        return {"train_source": sources, "train_target": targets, "vocabulary": _stamp(self._own)}

    def read(
        self, split: str, count: Count = lambda size: None
    ) -> Iterator[tuple[str, str] | None]:
        """Yields the pairs of a split, or None for one with an empty side.

        Those to train on are without space at their ends, as in tensor2tensor.

        Raises:
            SourceError: the numbers of lines differ, or a line is not UTF-8.
        """
        for texts in self._pairs[split]:
            lines = itertools.zip_longest(*(text.lines(count) for text in texts))
            for number, pair in enumerate(lines, 1):
                if None in pair:
                    total = number + sum(1 for _ in lines)
                    counts = [number - 1 if line is None else total for line in pair]
                    raise SourceError(
                        f"{texts[0].name} has {counts[0]:,} lines and {texts[1].name} "
                        f"{counts[1]:,}: line i of one must be the translation of line i of the "
                        "other"
                    )
                raw = [_decode(*side, number) for side in zip(pair, texts, strict=True)]
                source, target = map(str.strip, raw)
                if not (source and target):
                    yield None
                else:
                    yield (source, target) if split == "train" else (raw[0], raw[1])


def _decode(line: bytes, text: Text, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{text.name}, line {number} is not UTF-8 (byte 0x{line[error.start]:02x} at position "
            f"{error.start}): convert the file, for example with iconv"
        ) from error


class RecordInput:
    """A folder of records, each a pair of ids or a packed row of them; see `TextInput`."""

    def __init__(self, args: argparse.Namespace):
        folder, self._paths = args.records, {}
        for split, patterns in _RECORD_PATTERNS.items():
            try:
                paths = self._paths[split] = files.find(folder, patterns, f"{split} records")
                files.check_complete(paths)
            except DataError as error:
                raise SourceError(str(error)) from error
            if len(sets := files.stems(paths)) > 1:
                names = " and ".join(f"{os.path.basename(stem)}-*" for stem in sets[:2])
                raise SourceError(
                    f"{folder} holds {len(sets)} sets of {split} records, {names}, and every pair "
                    "would be taken from each: keep one set in the folder"
                )
        self._own = args.vocabulary
        if not self._own:
            names = [name for name in records.list_folder(folder) if "vocab" in name]
            if len(names) != 1:
                raise SourceError(
                    f"{folder} holds {len(names)} files named vocab*: give --vocabulary=FILE"
                )
            self._own = os.path.join(folder, names[0])
        self.vocabulary = _load(self._own)
        rows.check_vocabulary(folder, self.vocabulary, self._own)
        for split, paths in self._paths.items():
            fault, is_certain = agreement.fault(self.vocabulary, paths, split == "eval")
            if is_certain:
                raise DataError(fault)
            if fault:
                print(f"warning: {fault}", flush=True)
        self.size = sum(files.sizes(self._paths["train"]))

    def stamps(self) -> dict[str, str]:
        digest = hashlib.sha256()
        for path in self._paths["train"]:
            stat = tensorflow().io.gfile.stat(path)
            digest.update(repr((path, stat.length, stat.mtime_nsec)).encode())
        return {"records": digest.hexdigest(), "vocabulary": _stamp([Text(self._own)])}

    def read(self, split: str, count: Count = lambda size: None) -> Iterator[list[list[int]]]:
        """Yields the ids of both sides, with EOS, of each pair.

        Raises:
            DataError: a record is damaged, of another schema, or of another vocabulary.
        """
        for path in self._paths[split]:
            try:
                for number, record in enumerate(records.read_shard(path)):
                    count(len(record) + 16)
                    name = record_name(path, number)
                    row = rows.of_record(record, name)
                    if fault := rows.any_fault(row, self.vocabulary.size):
                        raise DataError(f"{name}: {fault}")
                    for pair in rows.pairs(row):
                        yield [ids.tolist() for ids in pair]
            except tensorflow().errors.DataLossError as error:
                raise DataError(f"{path} is damaged: {one_line(error)}") from error
