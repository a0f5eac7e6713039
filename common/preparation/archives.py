"""Archives that a user points at: listed, and unpacked completely or not at all."""

import contextlib
import dataclasses
import lzma
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from common.errors import one_line
from common.preparation import sources
from common.preparation.folders import Folder

SUFFIXES = (".zip", ".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz")
_STAMP = ".unpacked"  # in the folder: the archive whose files it has
_ERRORS = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,  # encrypted
    NotImplementedError,  # packed in an unusual way
    ValueError,
    OSError,
)


@dataclasses.dataclass(frozen=True)
class Listing(Folder):
    """The files of an archive, where `unpack` would put them; only their heads can be read."""

    archive: Any = None  # a ZipFile or a TarFile

    @classmethod
    def of(cls, path: str, folder: str) -> "Listing":
        """Lists an archive without unpacking it; SourceError if it is damaged or none."""
        with _readable(path):
            archive = _open(path)
            if isinstance(archive, tarfile.TarFile):
                rows = [(m.name.removeprefix("./"), m.size, m) for m in archive if m.isreg()]
                _check_end(archive)
            else:
                infos = [info for info in archive.infolist() if not info.is_dir()]
                rows = [(_zip_name(info), info.file_size, info) for info in infos]
        rows = [row for row in rows if not any(map(sources.is_hidden, row[0].split("/")))]
        files = [sources.File(*row) for row in sorted(rows, key=lambda row: row[0])]
        return cls(folder, tuple(files), archive=archive)

    def head(self, name: str, size: int = 1 << 16) -> bytes:
        """The first bytes of a file."""
        member = next(file.place for file in self.files if file.name == name)
        is_zip = isinstance(self.archive, zipfile.ZipFile)
        with _readable(str(self.archive.filename if is_zip else self.archive.name)):
            open_file = self.archive.open if is_zip else self.archive.extractfile
            with open_file(member) as file:
                return file.read(size)


def _open(path: str) -> zipfile.ZipFile | tarfile.TarFile:
    return zipfile.ZipFile(path) if path.lower().endswith(".zip") else tarfile.open(path)


def _zip_name(info: zipfile.ZipInfo) -> str:
    return sources.zip_name(info).replace("\\", "/")  # of Windows


def _check_end(archive: tarfile.TarFile) -> None:
    """Raises ReadError unless a tar was read to its end mark: tarfile takes damage for it."""
    file: Any = archive.fileobj
    file.seek(archive.offset)
    if file.read(512) != bytes(512):
        raise tarfile.ReadError("unexpected end of data")


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """SourceError if the archive cannot be read."""
    try:
        yield
    except _ERRORS as error:
        if getattr(error, "errno", None):  # of the disk
            raise
        raise sources.SourceError(
            f"{path} is damaged, cut short, encrypted or no archive ({one_line(error).rstrip(':')})"
            ": get it again, or unpack it yourself and give the folder"
        ) from error


def unpack(path: str, folder: str) -> None:
    """Unpacks a local archive into a new folder, unless this has its files already.

    SourceError if the archive is damaged, encrypted or none, or if the folder has other files.
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
    print(f"unpacking {path}", flush=True)
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        with _readable(path), _open(path) as archive:
            os.makedirs(part)
            if isinstance(archive, tarfile.TarFile):
                archive.extractall(part, filter="data")
                _check_end(archive)
            else:
                for info in archive.infolist():
                    info.filename = _zip_name(info)
                    archive.extract(info, part)
        with open(f"{part}/{_STAMP}", "w") as stamped:
            stamped.write(stamp)
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
