"""Archives that a user points at: listed, and unpacked completely or not at all."""

import contextlib
import dataclasses
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from common import locks
from common.errors import one_line, some, visible
from common.preparation import sources
from common.preparation.folders import Folder

SUFFIXES = (".zip", ".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz")
_LONGEST_NAME = 255  # bytes, of a file or folder in Linux
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
        with _readable(path), contextlib.ExitStack() as opened:
            archive = opened.enter_context(_open(path))
            members = {name: member for name, member, _ in _files(path, archive)}
            opened.pop_all()  # it stays open
        size = "size" if isinstance(archive, tarfile.TarFile) else "file_size"
        rows = [sources.File(name, getattr(m, size), m) for name, m in sorted(members.items())]
        return cls(folder, tuple(rows), archive=archive)

    def head(self, name: str, size: int = 1 << 16) -> bytes:
        """The first bytes of a file."""
        member = next(file.place for file in self.files if file.name == name)
        is_zip = isinstance(self.archive, zipfile.ZipFile)
        path = str(self.archive.filename if is_zip else self.archive.name)
        with _readable(path), _open_member(self.archive, member) as file:
            return file.read(size)


def _open(path: str) -> zipfile.ZipFile | tarfile.TarFile:
    return zipfile.ZipFile(path) if path.lower().endswith(".zip") else tarfile.open(path)


def _open_member(archive: Any, member: Any) -> Any:
    return (archive.open if isinstance(archive, zipfile.ZipFile) else archive.extractfile)(member)


def _files(path: str, archive: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields (name, member with the content, name of an equal file before it or "") of each file.

    A hard link is how tar stores a second name of a file. Other links, devices, names that no disk
    takes, and what would lie outside of the folder are left out, which a line says. Hidden files
    are none. SourceError if no file remains.
    """
    made: dict[str, Any] = {}
    left_out = []
    is_tar = isinstance(archive, tarfile.TarFile)
    for info in archive if is_tar else archive.infolist():
        member, equal = info, ""
        if isinstance(info, zipfile.ZipInfo):
            name = sources.zip_name(info).replace("\\", "/")  # of Windows
            is_folder = name.endswith("/")
            if stat.S_ISLNK(info.external_attr >> 16):
                member = None
        else:
            name, is_folder = info.name, info.isdir()
            if info.islnk():
                equal = _inside(info.linkname)
                member = made.get(equal)
            elif not info.isreg():
                member = None
        name = _inside(name)
        parts = name.split("/")
        if is_folder or (parts[0] != ".." and any(map(sources.is_hidden, parts))):
            continue
        is_long = max(len(os.fsencode(part)) for part in parts) > _LONGEST_NAME
        if member is None or parts[0] == ".." or is_long:
            left_out.append(name)
            continue
        if name == equal:  # it has its content
            continue
        made[name] = member
        yield name, member, equal
    if is_tar:
        _check_end(archive)
    if left_out:
        what = "links, devices or names that are too long or lead out of its folder"
        print(
            visible(f"left out of {path}: {len(left_out):,} {what}: {some(left_out)}"), flush=True
        )
    if not made:
        raise sources.SourceError(f"{path} holds no files")


def _inside(name: str) -> str:
    """A member's name without "/" at its start, "." and ".." in it; what leads out keeps ".."."""
    return os.path.normpath(name.lstrip("/"))


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

    def is_unpacked() -> bool:
        with contextlib.suppress(OSError), open(f"{folder}/{_STAMP}") as file:
            return file.read() == stamp
        return False

    if is_unpacked():
        return
    with locks.alone(f"{part}.lock", f"unpacks to {folder}", "rename the archive"):
        if is_unpacked():  # meanwhile
            return
        if os.path.lexists(folder):
            raise sources.SourceError(
                f"{path} would be unpacked to {folder}, which has other files: move that folder "
                "away, or rename the archive"
            )
        print(f"unpacking {path}", flush=True)
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        try:
            with _readable(path), _open(path) as archive:
                _unpack(path, archive, part)
            with open(f"{part}/{_STAMP}", "w") as stamped:
                stamped.write(stamp)
            os.rename(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _unpack(path: str, archive: Any, part: str) -> None:
    """Writes the files of an archive below a folder. Only files and folders are ever made there."""
    for name, member, equal in _files(path, archive):
        target = os.path.join(part, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if equal:  # reading it again would unpack all that is before it
            shutil.copy2(os.path.join(part, equal), target)
            continue
        with _open_member(archive, member) as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file)
        if isinstance(archive, tarfile.TarFile):
            with contextlib.suppress(OSError, OverflowError):  # a time that no disk can hold
                os.utime(target, (member.mtime, member.mtime))
