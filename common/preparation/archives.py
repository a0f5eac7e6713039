"""Archives that a user points at: listed, and unpacked completely or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import lzma
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

from common import console
from common.errors import one_line
from common.preparation import sources
from common.preparation.folders import Folder

SUFFIXES = (".zip", ".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz")
_STAMP = ".unpacked"  # in the folder: the archive whose files it has
_FAULTS = (  # RuntimeError: encrypted; NotImplementedError: packed in an unusual way
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError),
    *(RuntimeError, NotImplementedError, ValueError, OSError),
)


@dataclasses.dataclass(frozen=True)
class Listing(Folder):
    """The files of an archive, where `unpack` would put them; only their heads can be read."""

    archive: str = ""

    @classmethod
    def of(cls, path: str, folder: str) -> Listing:
        """Lists an archive without unpacking it; SourceError if it is damaged, encrypted or none.

        `folder` is that of `unpack`.
        """
        files = []
        with _opened(path) as (archive, _):
            for name, size, member in _members(archive):
                if not any(map(sources.is_hidden, name.split("/"))):
                    files.append(sources.File(name, size, member))
        return cls(folder, tuple(sorted(files, key=lambda file: file.name)), archive=path)

    def head(self, name: str, size: int = 1 << 16) -> bytes:
        """The first bytes of a file."""
        member = next(file.place for file in self.files if file.name == name)
        with _opened(self.archive) as (archive, _):
            is_zip = isinstance(archive, zipfile.ZipFile)
            with archive.open(member) if is_zip else archive.extractfile(member) as file:
                return file.read(size)


def unpack(path: str, folder: str) -> None:
    """Unpacks a local archive into a new folder, unless this has its files already.

    Raises:
        SourceError: the archive is damaged, encrypted, or none; or the folder has other files.
    """
    part = os.path.join(os.path.dirname(folder), f"tmp.{os.path.basename(folder)}")
    stamp = f"{os.path.basename(path)} {os.path.getsize(path)} {os.stat(path).st_mtime_ns}"
    if os.path.lexists(folder):
        with contextlib.suppress(OSError), open(f"{folder}/{_STAMP}") as file:
            if file.read() == stamp:
                return
        raise sources.SourceError(
            f"{path} would be unpacked to {folder}, which has other files: move that folder away, "
            "or rename the archive"
        )
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        with _opened(path) as (archive, file):
            os.makedirs(part)
            progress = console.ProgressBar(f"unpacking {path}", 0, "files", os.path.getsize(path))
            done = 0
            for _, _, member in _members(archive):
                safe: dict[str, Any] = (
                    {} if isinstance(archive, zipfile.ZipFile) else {"filter": "data"}
                )
                archive.extract(member, part, **safe)
                before, done = done, max(done, file.tell())
                progress.add(1, done - before)
            progress.close()
            with open(f"{part}/{_STAMP}", "w") as stamped:
                stamped.write(stamp)
            os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, IO[bytes]]]:
    """A ZipFile or a TarFile, and the file below it; faults in the context become SourceErrors."""
    try:
        with open(path, "rb") as file:
            is_zip = path.lower().endswith(".zip")
            with zipfile.ZipFile(file) if is_zip else tarfile.open(fileobj=file) as archive:
                yield archive, file
    except _FAULTS as error:
        if getattr(error, "errno", None):  # of the disk
            raise
        raise sources.SourceError(
            f"{path} is damaged, cut short, encrypted or no archive ({one_line(error).rstrip(':')})"
            ": get it again, or unpack it yourself and give the folder"
        ) from error


def _members(archive: Any) -> Iterator[tuple[str, int, Any]]:
    """Yields (name, size, member) of the files of an archive in their order.

    Raises:
        tarfile.ReadError: a tar ends before its end mark.
    """
    if isinstance(archive, zipfile.ZipFile):
        for info in archive.infolist():
            if not info.flag_bits & 0x800:  # some archivers write UTF-8 and do not say so
                with contextlib.suppress(UnicodeError):
                    info.filename = info.filename.encode("cp437").decode()
            info.filename = info.filename.replace("\\", "/")  # of Windows
            if not info.is_dir():
                yield info.filename, info.file_size, info
        return
    for info in archive:
        if not info.isdir():
            yield info.name.removeprefix("./"), info.size, info
    archive.fileobj.seek(archive.offset)
    if len(archive.fileobj.read(512)) < 512:
        raise tarfile.ReadError("unexpected end of data")
