"""Where images come from: a tar (of tars) or a folder, local or gs://, read file by file.

A tar stores its members uncompressed, and so an inner tar's members lie whole in the outer one.
One pass over the headers finds the place of every image; afterwards each is one ranged read, in
any order, and nothing is unpacked.
"""

import dataclasses
import hashlib
import os
import tarfile
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np

from errors import UserError, one_line
from ops import parallel
from ops.shards import tensorflow
from scripts import console
from scripts.data import images

SUFFIXES = (".jpeg", ".jpg", ".png")


class SourceError(UserError):
    """The input cannot be used; the message names the file and the remedy."""

    def __init__(self, message: str):
        super().__init__(message, code=2)


@dataclasses.dataclass(frozen=True)
class Source:
    """The images of one archive or folder, sorted by name.

    names: 'class/file', or 'file' where there are no classes.
    offsets, sizes: int64[n], bytes; in an archive the place of each, in a folder offsets are 0.
    skipped: (name, reason) of what was left out.
    """

    path: str
    archive: bool
    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray
    skipped: list[tuple[str, str]]

    def class_name(self, i: int) -> str:
        """The class of the i-th image, '' where there are no classes."""
        return self.names[i].partition("/")[0] if "/" in self.names[i] else ""

    def read(self, i: int) -> bytes:
        """The i-th file; from any thread.

        Raises:
            UserError: the file has another length than at the beginning.
            tf.errors.OpError: it cannot be read.
        """
        size = int(self.sizes[i])
        if self.archive:
            data = _read_at(self.path, int(self.offsets[i]), size)
        else:
            path = os.path.join(self.path, self.names[i])
            with tensorflow().io.gfile.GFile(path, "rb") as file:
                data = file.read()
        if len(data) != size:
            raise UserError(f"{self.path} changed while it was read: {self.names[i]}")
        return data

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads; the path is not in it."""
        fields = {"archive": self.archive, "names": self.names, "skipped": self.skipped}
        return fields | {"offsets": self.offsets.tolist(), "sizes": self.sizes.tolist()}

    @classmethod
    def from_json(cls, path: str, fields: dict[str, Any]) -> "Source":
        """The source at `path` as `to_json` described it."""
        arrays = {key: np.array(fields[key], np.int64) for key in ("offsets", "sizes")}
        skipped = [(name, reason) for name, reason in fields["skipped"]]
        return cls(path, fields["archive"], fields["names"], skipped=skipped, **arrays)


@dataclasses.dataclass(frozen=True)
class Input:
    """An archive or folder as it is found, before its images are looked at.

    stamp: a digest of names, sizes and times of change: equal when nothing was changed.
    files: of a folder (name, size), sorted; of an archive none.
    """

    path: str
    archive: bool
    stamp: str
    files: list[tuple[str, int]]


def look(path: str, workers: int) -> Input:
    """Stats an archive, or lists a folder with all below it but hidden files.

    Raises:
        SourceError: there is no such file, or it is compressed.
    """
    gfile = tensorflow().io.gfile
    path = path if path.endswith("://") else path.rstrip("/") or "/"
    try:
        stat = gfile.stat(path)
    except tensorflow().errors.NotFoundError as error:
        raise SourceError(f"there is no {path}") from error
    if not stat.is_directory:
        ends = _ends(path, stat.length)
        return Input(path, True, _digest([("", stat.length, stat.mtime_nsec, ends)]), [])
    with console.Threads(workers) as pool:
        files = sorted(_walk(path, pool))
    return Input(path, False, _digest(files), [(name, size) for name, size, _ in files])


def index(found: Input, sniff: bool, workers: int) -> Source:
    """Finds the images of an input.

    Args:
        found: by `look`.
        sniff: an image is what begins like one; else what is named like one.
        workers: threads that read.

    Raises:
        SourceError: an archive is damaged, cut short, or no tar.
    """
    if found.archive:
        return _index_archive(found, workers)
    kept, skipped = [], []
    with console.Threads(workers) as pool:

        def fault(file: tuple[str, int]) -> str:
            return _fault(found.path, *file, sniff)

        progress = console.Progress(f"looking at {found.path}", len(found.files), "files")
        for file, reason in zip(
            found.files, parallel.ordered(pool, fault, found.files, 4 * workers), strict=True
        ):
            progress.add()
            if reason:
                skipped.append((file[0], reason))
            else:
                kept.append(file)
        progress.close()
    names = [name for name, _ in kept]
    sizes = np.array([size for _, size in kept], np.int64)
    return Source(found.path, False, names, np.zeros_like(sizes), sizes, skipped)


def _fault(root: str, name: str, size: int, sniff: bool) -> str:
    if not size:
        return "an empty file"
    if not sniff:
        return "" if name.lower().endswith(SUFFIXES) else "not named .JPEG"
    with tensorflow().io.gfile.GFile(os.path.join(root, name), "rb") as file:
        known = images.looks_like_image(file.read(16))
    return "" if known else "not a JPEG, PNG, WebP, BMP, GIF or TIFF image"


def _digest(rows: Any) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode(errors="backslashreplace"))
    return digest.hexdigest()


def _walk(root: str, pool: futures.Executor) -> Iterator[tuple[str, int, int]]:
    """(name relative to root, size, time of change) of every file but hidden ones."""
    gfile = tensorflow().io.gfile

    def entries(folder: str) -> list[tuple[str, Any]]:
        names = gfile.listdir(os.path.join(root, folder))
        if "/" in names:  # objects named FOLDER//NAME, which TensorFlow lists but cannot read
            raise SourceError(f"{os.path.join(root, folder)}/ holds a folder without a name ('//')")
        names = [name.rstrip("/") for name in names]
        names = [name for name in names if name and name[0] != "." and name != "__MACOSX"]
        paths = [f"{folder}/{name}" if folder else name for name in names]
        return [(path, gfile.stat(os.path.join(root, path))) for path in paths]

    level = [""]
    while level:
        below = []
        for found in parallel.ordered(pool, entries, level, 1000):
            for path, stat in found:
                if stat.is_directory:
                    below.append(path)
                else:
                    yield path, stat.length, stat.mtime_nsec
        level = below


def _ends(path: str, size: int) -> bytes:
    """The first and the last 64 KiB: TensorFlow knows times to the second only, or not at all."""
    head, tail = _read_at(path, 0, 1 << 16), _read_at(path, max(0, size - (1 << 16)), 1 << 16)
    packed = {b"\x1f\x8b": "gzip", b"PK": "zip", b"BZ": "bzip2", b"\xfd7": "xz"}
    if head[:2] in packed:
        raise SourceError(f"{path} is compressed ({packed[head[:2]]}); unpack it, or give a folder")
    return head + tail


def _index_archive(found: Input, workers: int) -> Source:
    inner, rows = [], []
    for name, offset, size in _members(found.path, 0, None):
        folder, base = os.path.split(name)
        if base.startswith("."):
            continue
        if base.endswith(".tar"):
            inner.append((base.removesuffix(".tar"), offset, size))
        else:
            label = os.path.basename(folder)
            rows.append((f"{label}/{base}" if label else base, offset, size))

    def nested(place: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        label, start, length = place
        found_here = _members(found.path, start, length, f"{label}.tar in ")
        named = ((os.path.basename(name), offset, size) for name, offset, size in found_here)
        return [(f"{label}/{n}", offset, size) for n, offset, size in named if n[0] != "."]

    with console.Threads(workers) as pool:
        progress = console.Progress(f"indexing {found.path}", len(inner), "inner archives")
        for more in parallel.ordered(pool, nested, inner, 4 * workers):
            progress.add(1, sum(size for _, _, size in more))
            rows += more
        if inner:
            progress.close()
    kept = sorted(row for row in rows if row[0].lower().endswith(SUFFIXES) and row[2])
    skipped = [(n, "empty" if not size else "not named .JPEG") for n, _, size in rows]
    taken = {row[0] for row in kept}
    if len(taken) != len(kept):
        double = next(a[0] for a, b in zip(kept, kept[1:], strict=False) if a[0] == b[0])
        raise SourceError(f"{found.path} holds {double} more than once")
    return Source(
        found.path,
        True,
        [row[0] for row in kept],
        np.array([row[1] for row in kept], np.int64),
        np.array([row[2] for row in kept], np.int64),
        sorted(row for row in skipped if row[0] not in taken),
    )


class _Window:
    """A part of a file as a file of its own, for tarfile."""

    def __init__(self, file: Any, start: int, size: int):
        self._file, self._start, self._size, self._at = file, start, size, 0

    def read(self, size: int) -> bytes:
        size = max(0, min(size, self._size - self._at))
        if not size:
            return b""
        self._file.seek(self._start + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data

    def seek(self, at: int) -> None:
        self._at = at

    def tell(self) -> int:
        return self._at


def _members(
    path: str, start: int, size: int | None, inside: str = ""
) -> Iterator[tuple[str, int, int]]:
    """(name, offset in the file, size) of every regular file of the tar at `start`."""
    where, last = f"{inside}{path}", "its start"
    with tensorflow().io.gfile.GFile(path, "rb") as file:
        window: Any = _Window(file, start, file.size() - start if size is None else size)
        try:
            with tarfile.open(fileobj=window, mode="r:") as tar:
                for info in tar:
                    last = info.name
                    if info.isreg():
                        yield info.name, start + info.offset_data, info.size
                end = tar.offset
        except (tarfile.TarError, EOFError) as error:
            fault = (
                "no tar archive" if last == "its start" else f"cut short or damaged after {last}"
            )
            raise SourceError(f"{where} is {fault}: {one_line(error)}") from error
        window.seek(end)
        if window.read(512) != bytes(512):  # tarfile takes damage, or the end of the file, for it
            raise SourceError(f"{where} is cut short or damaged after {last}")


def _read_at(path: str, offset: int, size: int) -> bytes:
    """One ranged read."""
    with tensorflow().io.gfile.GFile(path, "rb") as file:
        file.seek(offset)
        return file.read(size)
