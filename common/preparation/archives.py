"""Unpacks an archive that a user points at, completely or not at all."""

import contextlib
import lzma
import os
import shutil
import tarfile
import zipfile
import zlib

from common.errors import one_line
from common.preparation import sources

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
    is_zip = path.lower().endswith(".zip")
    try:
        with zipfile.ZipFile(path) if is_zip else tarfile.open(path) as archive:
            os.makedirs(part)
            if isinstance(archive, tarfile.TarFile):
                archive.extractall(part, filter="data")
            else:
                for info in archive.infolist():
                    info.filename = sources.zip_name(info).replace("\\", "/")  # of Windows
                    archive.extract(info, part)
        with open(f"{part}/{_STAMP}", "w") as stamped:
            stamped.write(stamp)
        os.rename(part, folder)
    except _ERRORS as error:
        if getattr(error, "errno", None):  # of the disk
            raise
        raise sources.SourceError(
            f"{path} is damaged, cut short, encrypted or no archive ({one_line(error).rstrip(':')})"
            ": get it again, or unpack it yourself and give the folder"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
