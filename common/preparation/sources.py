"""Where images come from: a folder, a tar (of tars) or a zip, local or gs://, read file by file.

Nothing is unpacked. A tar stores its members as they are, an inner tar's members too, so that one
pass over the headers gives the offset of each; a zip has the offsets in its directory. Then each
file is one ranged read, in any order.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

from common import cli, limits, pools
from common.errors import INVALID, UserError, one_line
from common.images import photos
from common.progress import ProgressBar
from common.tensorflow import tensorflow

SUFFIXES = (".jpeg", ".jpg", ".png")


class SourceError(UserError):
    """The input cannot be used; the message names the file and the fix."""

    def __init__(self, message: str):
        super().__init__(message, code=INVALID)


class File(NamedTuple):
    """A file of a source."""

    name: str
    size: int
    place: Any = None  # its offset in a tar, or its entry in a zip


@dataclasses.dataclass(frozen=True)
class Source:
    """An archive or a folder."""

    path: str  # local or gs://
    files: list[File]  # sorted; their names are 'class/file', or 'file' without classes
    stamp: str = ""  # a digest of names, sizes and times of modification
    archive: bool = False
    folders: tuple[str, ...] = ()  # the names of the folders at the top, empty ones too
    skipped: tuple[tuple[str, str], ...] = ()  # (name, reason) of the files that are no images
    # Of each file, where a table has them; else the folders are the classes.
    classes: Sequence[tuple[str, ...]] = ()
    several: bool = False  # whether a file may have several classes, or none

    def class_names(self, i: int) -> tuple[str, ...]:
        """Returns the classes of the i-th image, () where it has none."""
        if self.classes:
            return self.classes[i]
        folder, slash, _ = self.files[i].name.partition("/")
        return (folder,) if slash else ()

    def read(self, i: int, most: int = limits.IMAGE_BYTES) -> bytes:
        """Reads the i-th file; any thread may call it.

        photos.BadImage if the file has more than `most` bytes; UserError if its length has changed
        since it was listed, or a zip is damaged.
        """
        name, size, place = self.files[i]
        if size > most:
            raise photos.BadImage(f"the file has {size:,} bytes, an image at most {most:,}")
        if isinstance(place, zipfile.ZipInfo):
            return self._unzip(place)
        if place is None:
            data = read_at(os.path.join(self.path, name), 0, size + 1)
        else:
            path, offset = place if isinstance(place, tuple) else (self.path, place)
            data = read_at(path, offset, size)
        if len(data) != size:
            raise UserError(f"{self.path} changed while it was read: {name}; start again")
        return data

    def _unzip(self, info: zipfile.ZipInfo) -> bytes:
        tf = tensorflow()
        try:
            with tf.io.gfile.GFile(self.path, "rb") as file:
                file.seek(info.header_offset)
                sizes = struct.unpack("<26x2H", file.read(30))  # of the name and of more fields
                file.seek(info.header_offset + 30 + sum(sizes))
                data = file.read(info.compress_size)
            if info.compress_type == zipfile.ZIP_DEFLATED:
                data = zlib.decompress(data, -15)
            if zlib.crc32(data) == info.CRC:
                return data
        except (zlib.error, struct.error, tf.errors.OutOfRangeError):
            pass
        raise UserError(f"{self.path} is damaged at {info.filename}: get it again")


def list_input(path: str, workers: int, zipped: bool = False) -> Source:
    """Lists a folder recursively without its hidden files; an archive is not looked into yet.

    SourceError if the path does not exist, or is a compressed archive; with `zipped` a zip may be.
    """
    path = path if path.endswith("://") else path.rstrip("/") or "/"
    try:
        stat = tensorflow().io.gfile.stat(path)
    except tensorflow().errors.NotFoundError as error:
        raise SourceError(f"there is no {path}") from error
    if not stat.is_directory:
        ends = _ends(path, stat.length, zipped)
        return Source(path, [], _digest([("", stat.length, stat.mtime_nsec, ends)]), archive=True)
    with pools.Threads(workers) as pool:
        rows = sorted(_walk(path, pool))
    folders = tuple(name[:-1] for name, *_ in rows if name.endswith("/"))
    rows = [row for row in rows if not row[0].endswith("/")]
    return Source(path, [File(*row[:2]) for row in rows], _digest(rows), folders=folders)


def list_inputs(
    paths: Mapping[str, str | None], workers: int, zipped: bool = False
) -> dict[str, Source]:
    """The inputs by their flags; each path is listed once."""
    listed = {path: list_input(path, workers, zipped) for path in {*paths.values()} if path}
    return {flag: listed[path] for flag, path in paths.items() if path}


def check_unchanged(inputs: Mapping[str, Source], workers: int) -> None:
    """UserError if an input is another one than when it was listed."""
    paths = {flag: source.path for flag, source in inputs.items()}
    for flag, source in list_inputs(paths, workers, zipped=True).items():
        if source.stamp != inputs[flag].stamp:
            raise UserError(f"--{flag} changed while it was read; start again with --overwrite")


def _digest(rows: list[tuple]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode(errors="backslashreplace"))
    return digest.hexdigest()


def _walk(root: str, pool: futures.Executor) -> Iterator[tuple[str, int, int]]:
    """Yields (name relative to root, size, modification time) of every file that is not hidden.

    It also yields ("NAME/", 0, 0) for every folder in `root`.
    """
    gfile = tensorflow().io.gfile

    def entries(folder: str) -> list[tuple[str, Any]]:
        path = os.path.join(root, folder)
        for name in () if "://" in root else os.listdir(path):
            if not cli.is_utf8(name):  # TensorFlow cannot read it
                problem = f"holds {os.fsencode(name)!r}, whose name is not UTF-8"
                raise SourceError(f"{path!r} {problem}: rename the file")
        names = [name.rstrip("/") for name in gfile.listdir(path)]
        paths = [os.path.join(folder, name) for name in names if name and not is_hidden(name)]
        return [(path, gfile.stat(os.path.join(root, path))) for path in paths]

    level = [""]
    while level:
        below = []
        for children in pools.ordered(pool, entries, level, 1000):
            for path, stat in children:
                if not stat.is_directory:
                    yield path, stat.length, stat.mtime_nsec
                    continue
                below.append(path)
                if "/" not in path:
                    yield f"{path}/", 0, 0
        level = below


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name does not belong to the user's data."""
    return name.startswith(".") or name == "__MACOSX"


def _ends(path: str, size: int, zipped: bool) -> bytes:
    """The first and last 64 KiB of a file, because TensorFlow has no exact modification time."""
    limits.check_file(path, SourceError)
    head, tail = read_at(path, 0, 1 << 16), read_at(path, max(0, size - (1 << 16)), 1 << 16)
    packed = {b"\x1f\x8b": "gzip", b"PK": "zip", b"BZ": "bzip2", b"\xfd7": "xz"}
    if head[:2] in packed and not (zipped and head[:2] == b"PK"):
        raise SourceError(f"{path} is compressed ({packed[head[:2]]}); unpack it, or give a folder")
    return head + tail


def images(source: Source, sniff: bool, workers: int) -> Source:
    """The images of a folder or a tar; the other files become `skipped`.

    With `sniff` the first bytes of a file say that it is an image, else its name does.
    """
    files = _tar_files(source.path, workers) if source.archive else source.files

    def reason(file: File) -> str:
        """Why a file is no image; '' if it is one."""
        if not file.size:
            return "empty" if source.archive else "an empty file"
        if not sniff:
            return "" if file.name.lower().endswith(SUFFIXES) else "not named .JPEG"
        head = read_at(os.path.join(source.path, file.name), 0, photos.HEAD)
        return "" if photos.looks_like_image(head) else photos.unknown(head)

    reasons = []
    progress = ProgressBar(f"looking at {source.path}", len(files), "files")
    with pools.Threads(workers) as pool:
        texts = pools.ordered(pool, reason, files, 4 * workers) if sniff else map(reason, files)
        for text in texts:
            progress.add()
            reasons.append(text)
    if not source.archive:
        progress.close()
    kept = [file for file, text in zip(files, reasons, strict=True) if not text]
    skipped = sorted((file.name, text) for file, text in zip(files, reasons, strict=True) if text)
    return _with_files(source, kept, tuple(skipped))


def _with_files(
    source: Source, files: list[File], skipped: tuple[tuple[str, str], ...] = ()
) -> Source:
    """The source with these files, sorted; SourceError if an archive holds one twice."""
    files = sorted(files, key=lambda file: file.name)
    for file, after in itertools.pairwise(files):
        if file.name == after.name:
            raise SourceError(f"{source.path} holds {file.name} more than once")
    return dataclasses.replace(source, files=files, skipped=skipped)


def _tar_files(path: str, workers: int) -> list[File]:
    """The files of a tar and of its inner tars."""
    members = [*_members(path)]
    files = [file for file in members if not file.name.endswith(".tar")]
    inner = [file for file in members if file.name.endswith(".tar")]
    progress = ProgressBar(f"indexing {path}", len(inner), "inner archives")
    with pools.Threads(workers) as pool:
        nested = pools.ordered(pool, lambda tar: [*_members(path, tar)], inner, 4 * workers)
        for members in nested:
            progress.add(1, sum(file.size for file in members))
            files += members
    if inner:
        progress.close()
    return files


def _members(path: str, inner: File | None = None) -> Iterator[File]:
    """Yields the files 'class/file' of a tar: the class is the folder, or the inner tar's name."""
    tf, start, last = tensorflow(), inner.place if inner else 0, ""
    label = os.path.basename(inner.name).removesuffix(".tar") if inner else ""
    archive = f"{label}.tar in {path}" if inner else path
    with tf.io.gfile.GFile(path, "rb") as file:
        end = start + inner.size if inner else file.size()
        file.seek(start)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for info in tar:
                    if info.offset_data > end:
                        break  # into the outer tar
                    last = info.name
                    if not cli.is_utf8(last):
                        problem = f"holds {os.fsencode(last)!r}, whose name is not UTF-8"
                        raise SourceError(f"{archive} {problem}: unpack it, and rename the file")
                    folder, base = os.path.split(last)
                    folder = label or os.path.basename(folder)
                    if info.isreg() and not base.startswith("."):
                        name = f"{folder}/{base}" if folder else base
                        yield File(name, info.size, info.offset_data)
            # tarfile takes damage, or the end of the file, for the end of the tar.
            is_cut = tar.offset + 512 > end or read_at(path, tar.offset, 512) != bytes(512)
        except (tarfile.TarError, ValueError, tf.errors.OutOfRangeError) as error:
            problem = f"cut short or damaged after {last}" if last else "no tar archive"
            raise SourceError(f"{archive} is {problem}: {one_line(error)}") from error
    if is_cut:
        raise SourceError(f"{archive} is cut short or damaged after {last or 'its start'}")


def all_files(source: Source) -> Source:
    """All files of a folder or a zip, except hidden ones.

    SourceError if the archive is no zip, cut short, encrypted, or packed in an unusual way.
    """
    if not source.archive:
        return source
    path, files = source.path, []
    try:
        with tensorflow().io.gfile.GFile(path, "rb") as file, zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        problem = "is cut short, damaged or no zip archive"
        raise SourceError(f"{path} {problem} ({one_line(error)}): get it again") from error
    for info in infos:
        name, method = zip_name(info), info.compress_type
        if any(map(is_hidden, name.removeprefix("./").split("/"))):
            continue
        if info.flag_bits & 1 or method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            problem = f"has {name} encrypted or packed in an unusual way (method {method})"
            raise SourceError(f"{path} {problem}: unpack it, and give the folder")
        files.append(File(name, info.file_size, info))
    return _with_files(source, files)


def zip_name(info: zipfile.ZipInfo) -> str:
    """The name of a file in a zip; some archivers write UTF-8 and do not say so."""
    if not info.flag_bits & 0x800:
        with contextlib.suppress(UnicodeError):
            return info.filename.encode("cp437").decode()
    return info.filename


def read_all(path: str, most: int) -> bytes:
    """Reads a file; SourceError if it has more than `most` bytes, or is a pipe or the like."""
    limits.check_file(path, SourceError)
    limits.check_size(path, tensorflow().io.gfile.stat(path).length, most, SourceError)
    return read_at(path, 0, most)


def read_at(path: str, offset: int, size: int) -> bytes:
    """Reads up to `size` bytes at an offset of a file."""
    with tensorflow().io.gfile.GFile(path, "rb") as file:
        file.seek(offset)
        try:
            return file.read(size)
        except tensorflow().errors.OutOfRangeError:  # of an offset beyond its end
            return b""
