"""Streams parallel text: files, .gz, .sgm and members of tar archives, local or gs://."""

import argparse
import dataclasses
import gzip
import hashlib
import io
import itertools
import posixpath
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.translation.vocabulary import Vocabulary
from errors import one_line
from ops import limits
from ops.preparation import tars
from ops.preparation.sources import SourceError, read_at
from ops.shards import tensorflow

_ARCHIVES = (".tgz", ".tar.gz", ".tar", ".tar.bz2", ".tar.xz")
_BUFFER = 1 << 20  # bytes of a read
_COUNTED = 1_000_000  # lines that the longer of two files has more, for the message
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
            SourceError: the file is damaged, or beyond one of `ops.limits`.
            tf.errors.OpError: it cannot be read.
        """
        try:
            with _open(self.path, count) as raw:
                opened = _member(raw, self) if self.member else raw
                with _unzipped(opened) as file:
                    if limits.is_sgm(self.name.removesuffix(".gz")):
                        yield from limits.segments(file, self.name, SourceError)
                    else:
                        yield from self._split(file)
        except _DAMAGE as error:
            raise SourceError(f"{self.name} is damaged or cut short: {one_line(error)}") from error

    def _split(self, file: Any) -> Iterator[bytes]:
        for i, line in enumerate(limits.lines(file, self.name, SourceError)):
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
    archive = tars.opened(raw, "r|*")
    for info in tars.members(archive):
        if posixpath.normpath(info.name) == text.member and info.isreg():
            file = archive.extractfile(info)
            assert file is not None  # it is a regular file
            return file
    raise SourceError(f"{text.path} holds no file {text.member}")


def find(argument: str) -> list[Text]:
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
        with _open(archive, lambda size: None) as raw, tars.opened(raw, "r|*") as tar:
            names = [posixpath.normpath(info.name) for info in tars.members(tar) if info.isreg()]
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


def stamp(texts: list[Text]) -> str:
    """A digest of the files' names, sizes, times and ends; it changes with the input."""
    digest, gfile = hashlib.sha256(), tensorflow().io.gfile
    for path in dict.fromkeys(text.path for text in texts):
        stat = gfile.stat(path)
        ends = read_at(path, 0, 1 << 16), read_at(path, max(0, stat.length - (1 << 16)), 1 << 16)
        digest.update(repr((path, stat.length, stat.mtime_nsec, *ends)).encode())
    digest.update(repr([text.member for text in texts]).encode())
    return digest.hexdigest()


def size(texts: list[Text]) -> int:
    """The bytes that reading the files takes; an archive counts once for each of its members."""
    gfile = tensorflow().io.gfile
    lengths = {path: gfile.stat(path).length for path in {text.path for text in texts}}
    return sum(lengths[text.path] for text in texts)


@dataclasses.dataclass
class Reading:
    """What one pass over pairs of files has seen: pairs of lines, and those with an empty side."""

    pairs: int = 0
    empty: int = 0


def read(
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


class Input:
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
            sides = [find(getattr(args, f"{split}_{s}")) for s in ("source", "target")]
            self.pairs[split] = list(zip(*sides, strict=True))
        for archive in filter(None, args.train_archives.split(",")):
            print(f"listing {archive}", flush=True)
            pairs = pairs_in(archive, args.source_language, args.target_language)
            self.pairs["train"] += pairs
        for source, target in self.pairs["train"]:
            print(f"train: {source.name} and {target.name}", flush=True)

    def stamps(self, split: str) -> dict[str, str]:
        """A digest of each input of "train" or "eval", by its flag."""
        sources, targets = (stamp([pair[side] for pair in self.pairs[split]]) for side in (0, 1))
        vocabulary = stamp([Text(self.vocabulary)] if self.vocabulary else [])
        return {f"{split}_source": sources, f"{split}_target": targets, "vocabulary": vocabulary}

    def size(self) -> int:
        """The bytes that reading the training pairs takes."""
        return size([text for pair in self.pairs["train"] for text in pair])

    def read(
        self, split: str, reading: Reading, count: Count
    ) -> Iterator[tuple[str, str, bytes, bytes]]:
        """See `read`."""
        return read(self.pairs[split], reading, count)

    def use(self, vocabulary: Vocabulary) -> None:
        """Takes the vocabulary, before `read`; any one fits text."""
