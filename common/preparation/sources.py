"""Where images come from: a tar (of tars) or a folder, local or gs://, read file by file.

A tar stores its members uncompressed, so the members of an inner tar are contiguous in the outer
tar. One pass over the headers gives the offset of every image. Then each image is one ranged read,
in any order, and nothing is unpacked. `open_tar` reads tars of any origin with tarfile, which
trusts their headers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any

import numpy as np

from common import console, limits, pools
from common.data.shards import tensorflow
from common.errors import UserError, one_line
from common.images import photos

SUFFIXES = (".jpeg", ".jpg", ".png")
_READ_AT_ONCE = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE)
_READ_AT_ONCE += (tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class SourceError(UserError):
    """The input cannot be used; the message names the file and the fix."""

    def __init__(self, message: str):
        super().__init__(message, code=2)


@dataclasses.dataclass(frozen=True)
class Source:
    """The images of one archive or folder, sorted by name.

    Attributes:
        path: of the archive or folder, local or gs://.
        archive: whether the path is an archive.
        names: 'class/file', or 'file' where there are no classes.
        offsets: int64[n], where each image begins in the archive, in bytes; 0 in a folder.
        sizes: int64[n], bytes.
        skipped: (name, reason) of the files that are no images.
    """

    path: str
    archive: bool
    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray
    skipped: list[tuple[str, str]]

    def class_name(self, i: int) -> str:
        """Returns the class of the i-th image, '' where there are no classes."""
        return self.names[i].partition("/")[0] if "/" in self.names[i] else ""

    def read(self, i: int) -> bytes:
        """Reads the i-th image file; any thread may call it.

        Raises:
            photos.BadImage: the file is larger than an image may be.
            UserError: the file's length has changed since the index was made.
            tf.errors.OpError: the file cannot be read.
        """
        self.check_size(i)
        size = int(self.sizes[i])
        if self.archive:
            data = read_at(self.path, int(self.offsets[i]), size)
        else:
            data = read_at(os.path.join(self.path, self.names[i]), 0, size + 1)
        if len(data) != size:
            raise UserError(f"{self.path} changed while it was read: {self.names[i]}")
        return data

    def check_size(self, i: int) -> None:
        """Raises photos.BadImage if the i-th file is larger than an image may be."""
        if (size := int(self.sizes[i])) > limits.IMAGE_BYTES:
            fault = f"the file has {size:,} bytes, an image at most {limits.IMAGE_BYTES:,}"
            raise photos.BadImage(f"{fault}: save it as a JPEG")

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for `from_json`, without the path."""
        fields = {"archive": self.archive, "names": self.names, "skipped": self.skipped}
        return fields | {"offsets": self.offsets.tolist(), "sizes": self.sizes.tolist()}

    @classmethod
    def from_json(cls, path: str, fields: dict[str, Any]) -> Source:
        """Makes the source at `path` from the fields of `to_json`."""
        arrays = {key: np.array(fields[key], np.int64) for key in ("offsets", "sizes")}
        skipped = [(name, reason) for name, reason in fields["skipped"]]
        return cls(path, fields["archive"], fields["names"], skipped=skipped, **arrays)


@dataclasses.dataclass(frozen=True)
class Listing:
    """An archive or folder before its images are read.

    Attributes:
        path: of the archive or folder, local or gs://.
        archive: whether the path is an archive.
        stamp: a digest of names, sizes and modification times; it changes with the input.
        files: the sorted (name, size) of a folder; [] for an archive.
        folders: the names of the folders in a folder, those without files too.
    """

    path: str
    archive: bool
    stamp: str
    files: list[tuple[str, int]]
    folders: tuple[str, ...] = ()

    def all(self) -> Source:
        """All files of a folder, whatever they are."""
        sizes = np.array([size for _, size in self.files], np.int64)
        names = [name for name, _ in self.files]
        return Source(self.path, False, names, np.zeros_like(sizes), sizes, [])


def list_input(path: str, workers: int, zipped: bool = False) -> Listing:
    """Stats an archive, or lists a folder recursively without its hidden files.

    Args:
        path: of the archive or folder, local or gs://.
        workers: threads that list.
        zipped: whether the archive may be a zip.

    Raises:
        SourceError: the path does not exist, or the archive is compressed.
    """
    gfile = tensorflow().io.gfile
    path = path if path.endswith("://") else path.rstrip("/") or "/"
    try:
        stat = gfile.stat(path)
    except tensorflow().errors.NotFoundError as error:
        raise SourceError(f"there is no {path}") from error
    if not stat.is_directory:
        ends = _ends(path, stat.length, zipped)
        return Listing(path, True, _digest([("", stat.length, stat.mtime_nsec, ends)]), [])
    with pools.Threads(workers) as pool:
        rows = sorted(_walk(path, pool))
    files = [row for row in rows if not row[0].endswith("/")]
    folders = tuple(name[:-1] for name, _, _ in rows if name.endswith("/"))
    return Listing(path, False, _digest(files), [(name, size) for name, size, _ in files], folders)


def list_inputs(
    paths: Mapping[str, str | None], workers: int, zipped: bool = False
) -> dict[str, Listing]:
    """The listings of the inputs by their flags, see `list_input`; each path is listed once."""
    list_once = functools.cache(lambda path: list_input(path, workers, zipped))
    return {flag: list_once(path) for flag, path in paths.items() if path}


def check_unchanged(listings: Mapping[str, Listing], workers: int) -> None:
    """Raises UserError if an input is another one than when it was listed."""
    paths = {flag: listing.path for flag, listing in listings.items()}
    for flag, listing in list_inputs(paths, workers, zipped=True).items():
        if listing.stamp != listings[flag].stamp:
            raise UserError(f"--{flag} changed while it was read; start again with --overwrite")


def index(listing: Listing, sniff: bool, workers: int) -> Source:
    """Finds the images of an input.

    Args:
        listing: the result of `list_input`.
        sniff: whether the first bytes of a file say that it is an image; else its name does.
        workers: threads that read.

    Raises:
        SourceError: the archive is damaged, cut short, or no tar.
    """
    if listing.archive:
        return _index_archive(listing, workers)
    images, skipped = [], []
    with pools.Threads(workers) as pool:

        def fault(file: tuple[str, int]) -> str:
            return _fault(listing.path, *file, sniff)

        progress = console.ProgressBar(f"looking at {listing.path}", len(listing.files), "files")
        for file, reason in zip(
            listing.files, pools.ordered(pool, fault, listing.files, 4 * workers), strict=True
        ):
            progress.add()
            if reason:
                skipped.append((file[0], reason))
            else:
                images.append(file)
        progress.close()
    names = [name for name, _ in images]
    sizes = np.array([size for _, size in images], np.int64)
    return Source(listing.path, False, names, np.zeros_like(sizes), sizes, skipped)


def _fault(root: str, name: str, size: int, sniff: bool) -> str:
    if not size:
        return limits.special(os.path.join(root, name)) or "an empty file"
    if not sniff:
        return "" if name.lower().endswith(SUFFIXES) else "not named .JPEG"
    with tensorflow().io.gfile.GFile(os.path.join(root, name), "rb") as file:
        known = photos.looks_like_image(file.read(16))
    return "" if known else "not a JPEG, PNG, WebP, BMP, GIF or TIFF image"


def _digest(rows: Any) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode(errors="backslashreplace"))
    return digest.hexdigest()


def _walk(root: str, pool: futures.Executor) -> Iterator[tuple[str, int, int]]:
    """Yields (name relative to root, size, modification time) of every file that is not hidden.

    And ("NAME/", 0, 0) of every folder in `root`.
    """
    gfile = tensorflow().io.gfile

    def entries(folder: str) -> list[tuple[str, Any]]:
        if "://" not in root:
            _check_local(root, folder)
        names = gfile.listdir(os.path.join(root, folder))
        if "/" in names:  # an object FOLDER//NAME, which TensorFlow lists but cannot read
            raise SourceError(f"{os.path.join(root, folder)}/ holds a folder without a name ('//')")
        names = [name.rstrip("/") for name in names]
        names = [name for name in names if name and name[0] != "." and name != "__MACOSX"]
        paths = [f"{folder}/{name}" if folder else name for name in names]
        return [(path, gfile.stat(os.path.join(root, path))) for path in paths]

    level = [""]
    while level:
        below = []
        for children in pools.ordered(pool, entries, level, 1000):
            for path, stat in children:
                if stat.is_directory:
                    below.append(path)
                    if "/" not in path:
                        yield f"{path}/", 0, 0
                else:
                    yield path, stat.length, stat.mtime_nsec
        level = below


def _check_local(root: str, folder: str) -> None:
    """Refuses names that TensorFlow cannot read, and a link to a folder that the link is in.

    `folder` is relative to `root`.
    """
    path = os.path.join(root, folder).rstrip("/")
    for name in os.listdir(path or "/"):
        if not console.is_utf8(name):
            fault = f"holds {os.fsencode(name)!r}, whose name is not UTF-8"
            raise SourceError(f"{path!r} {fault}: rename the file")
    if folder and os.path.islink(path):
        parts = folder.split("/")
        above = [os.path.join(root, *parts[:i]) for i in range(len(parts))]
        if os.path.realpath(path) in map(os.path.realpath, above):
            raise SourceError(f"{path!r} is a link to a folder that it is in: remove the link")


def _ends(path: str, size: int, zipped: bool) -> bytes:
    """The first and last 64 KiB of a file, because TensorFlow has no exact modification time."""
    head, tail = read_at(path, 0, 1 << 16), read_at(path, max(0, size - (1 << 16)), 1 << 16)
    packed = {b"\x1f\x8b": "gzip", b"PK": "zip", b"BZ": "bzip2", b"\xfd7": "xz"}
    if head[:2] in packed and not (zipped and head[:2] == b"PK"):
        raise SourceError(f"{path} is compressed ({packed[head[:2]]}); unpack it, or give a folder")
    return head + tail


def _index_archive(listing: Listing, workers: int) -> Source:
    inner, rows = [], []
    for name, offset, size in _members(listing.path, 0, None):
        folder, base = os.path.split(name)
        if base.startswith("."):
            continue
        if base.endswith(".tar"):
            inner.append((base.removesuffix(".tar"), offset, size))
        else:
            label = os.path.basename(folder)
            rows.append((f"{label}/{base}" if label else base, offset, size))

    def nested(archive: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        label, start, length = archive
        members = _members(listing.path, start, length, f"{label}.tar in ")
        named = ((os.path.basename(name), offset, size) for name, offset, size in members)
        return [(f"{label}/{n}", offset, size) for n, offset, size in named if n[0] != "."]

    with pools.Threads(workers) as pool:
        progress = console.ProgressBar(f"indexing {listing.path}", len(inner), "inner archives")
        for members in pools.ordered(pool, nested, inner, 4 * workers):
            progress.add(1, sum(size for _, _, size in members))
            rows += members
        if inner:
            progress.close()
    images = sorted(row for row in rows if row[0].lower().endswith(SUFFIXES) and row[2])
    skipped = [(n, "empty" if not size else "not named .JPEG") for n, _, size in rows]
    image_names = {row[0] for row in images}
    if len(image_names) != len(images):
        duplicate = next(a[0] for a, b in zip(images, images[1:], strict=False) if a[0] == b[0])
        raise SourceError(f"{listing.path} holds {duplicate} more than once")
    return Source(
        listing.path,
        True,
        [row[0] for row in images],
        np.array([row[1] for row in images], np.int64),
        np.array([row[2] for row in images], np.int64),
        sorted(row for row in skipped if row[0] not in image_names),
    )


def _members(
    path: str, start: int, size: int | None, inside: str = ""
) -> Iterator[tuple[str, int, int]]:
    """Yields (name, offset in the file, size) of every regular file of the tar at `start`."""
    archive, last = f"{inside}{path}", ""
    with tensorflow().io.gfile.GFile(path, "rb") as file:
        window: Any = _TarWindow(file, start, file.size() - start if size is None else size)
        try:
            with open_tar(window, "r:") as tar:
                for info in tar_members(tar):
                    last = info.name
                    if not console.is_utf8(last):
                        name = os.fsencode(last)
                        raise SourceError(f"{archive} holds {name!r}, whose name is not UTF-8")
                    if info.isreg():
                        yield info.name, start + info.offset_data, info.size
                end = tar.offset
        except (tarfile.TarError, EOFError) as error:
            fault = f"cut short or damaged after {last}" if last else "no tar archive"
            raise SourceError(f"{archive} is {fault}: {one_line(error)}") from error
        window.seek(end)
        # tarfile accepts damage or the file's end as the tar's end
        if window.read(512) != bytes(512):
            raise SourceError(f"{archive} is cut short or damaged after {last or 'its start'}")


def read_all(path: str, most: int) -> bytes:
    """Reads a file; SourceError if it has more than `most` bytes, or is a pipe or the like."""
    limits.check_file(path, SourceError)
    limits.check_size(path, tensorflow().io.gfile.stat(path).length, most, SourceError)
    return read_at(path, 0, most)


def read_at(path: str, offset: int, size: int) -> bytes:
    """Reads up to `size` bytes at an offset of a file.

    Raises:
        SourceError: the path is a pipe, a device or a socket.
        tf.errors.OpError: the file cannot be read.
    """
    limits.check_file(path, SourceError)
    with tensorflow().io.gfile.GFile(path, "rb") as file:
        file.seek(offset)
        try:
            return file.read(size)
        except tensorflow().errors.OutOfRangeError:  # of an offset beyond its end
            return b""


class _TarMember(tarfile.TarInfo):
    """A member of a tar; tarfile would read a long name or extended attributes of any size."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> _TarMember:
        """See `tarfile.TarInfo.frombuf`; tarfile.ReadError for a size that no tar has."""
        info = super().frombuf(buf, encoding, errors)
        most = limits.TAR_HEADER_BYTES
        if info.type in _READ_AT_ONCE and info.size > most:
            raise tarfile.ReadError(
                f"a name or attributes of {info.size:,} bytes, at most {most:,}"
            )
        return info


def open_tar(file: Any, mode: Any) -> tarfile.TarFile:
    """Opens a tar for reading; tarfile.ReadError if its first header is damaged.

    Args:
      file: has `read`, and for a `mode` without "|" also `seek` and `tell`.
      mode: as of `tarfile.open`.
    """
    with _checked_tar():
        return tarfile.open(fileobj=file, mode=mode, tarinfo=_TarMember)


def tar_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of a tar that `open_tar` has opened; tarfile.ReadError if it is damaged."""
    with _checked_tar():
        for info in tar:
            if info.size < 0:  # some versions of tarfile would go back for ever
                raise tarfile.ReadError(f"{info.name} has {info.size:,} bytes")
            yield info


@contextlib.contextmanager
def _checked_tar() -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError) as error:  # tarfile does not check all fields
        raise tarfile.ReadError(one_line(error)) from error


class _TarWindow:
    """A part of a file, which tarfile reads as a file."""

    def __init__(self, file: Any, start: int, size: int):
        self._file, self._start, self._size, self._position = file, start, size, 0

    def read(self, size: int) -> bytes:
        size = max(0, min(size, self._size - self._position))
        if not size:
            return b""
        self._file.seek(self._start + self._position)
        data = self._file.read(size)
        self._position += len(data)
        return data

    def seek(self, position: int) -> None:
        self._position = position

    def tell(self) -> int:
        return self._position
