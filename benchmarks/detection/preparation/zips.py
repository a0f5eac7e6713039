"""Reads the members of a zip, local or gs://, one by one and in any order, without unpacking it.

The directory at the end of a zip has the position of every member. Then each member is one ranged
read, stored or deflated.
"""

import contextlib
import dataclasses
import os
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np

from common import limits
from common.data.shards import tensorflow
from common.errors import UserError, one_line
from common.images import photos
from common.preparation.sources import Source, SourceError, read_at

_HEADER = 30  # bytes in front of a member, before its name
_EXTRA = 256  # bytes that the fields behind the name seldom exceed
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Zip(Source):
    """The members of a zip; `offsets` are those of their headers.

    Attributes:
        packed: int64[n], the bytes of each member in the archive.
        checksums: int64[n], CRC-32 of each member.
        deflated: bool[n].
        heads: int64[n], the bytes of each header up to the end of the name.
    """

    packed: np.ndarray
    checksums: np.ndarray
    deflated: np.ndarray
    heads: np.ndarray

    def read(self, i: int) -> bytes:
        """Reads the i-th member; any thread may call it.

        Raises:
            photos.BadImage: the member is larger than an image may be, or expands too much.
            UserError: the member is damaged, or the archive has changed.
            tf.errors.OpError: the archive cannot be read.
        """
        self.check_size(i)
        arrays = self.offsets, self.heads, self.packed, self.sizes
        start, head, packed, size = (int(array[i]) for array in arrays)
        if fault := limits.expansion(packed, size):
            raise photos.BadImage(fault)
        damaged = UserError(f"{self.path} is damaged at {self.names[i]}: mend or replace it")
        if packed > 2 * size + _HEADER:  # no archiver needs so much
            raise damaged
        data = read_at(self.path, start, head + _EXTRA + packed)
        # The name and the fields behind it may be longer here than in the directory.
        begin = _HEADER + int.from_bytes(data[26:28], "little")
        begin += int.from_bytes(data[28:30], "little")
        if begin + packed > len(data):
            data += read_at(self.path, start + len(data), begin + packed - len(data))
        body = data[begin : begin + packed]
        with contextlib.suppress(zlib.error):  # the checksum shows it
            body = zlib.decompressobj(-15).decompress(body, size + 1) if self.deflated[i] else body
        if data[:4] != b"PK\3\4" or zlib.crc32(body) != self.checksums[i]:
            raise damaged
        return body


def index(path: str) -> Zip:
    """Reads the directory of a zip; hidden members and folders are left out.

    Raises:
        SourceError: the file is no zip, cut short, encrypted, or packed in a way other than the
            usual.
    """
    with _opened(path) as archive:
        rows = sorted((_name(info), info.header_offset, info) for info in archive.infolist())
    rows = [row for row in rows if not row[2].is_dir() and _is_visible(row[0])]
    for (name, *_), (after, *_) in zip(rows, rows[1:], strict=False):
        if name == after:
            raise SourceError(f"{path} holds {name} more than once")
    for name, _, info in rows:
        if info.flag_bits & 1:
            raise SourceError(f"{path} is encrypted ({name}): unpack it, and give the folder")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SourceError(
                f"{path} packs {name} in an unusual way (method {info.compress_type}): unpack it, "
                "and give the folder"
            )
    infos = [info for *_, info in rows]
    heads = [_HEADER + len(info.orig_filename.encode(errors="replace")) for info in infos]
    return Zip(
        path,
        True,
        [name for name, *_ in rows],
        np.array([info.header_offset for info in infos], np.int64),
        np.array([info.file_size for info in infos], np.int64),
        [],
        np.array([info.compress_size for info in infos], np.int64),
        np.array([info.CRC for info in infos], np.int64),
        np.array([info.compress_type == zipfile.ZIP_DEFLATED for info in infos], bool),
        np.array(heads, np.int64),
    )


def find(path: str, base: str) -> str:
    """The member whose name without folders is `base`; '' if there is none.

    Raises:
        SourceError: the file is no zip, or there are several.
    """
    with _opened(path) as archive:
        names = [n for n in archive.namelist() if os.path.basename(n) == base and _is_visible(n)]
    if len(names) > 1:
        raise SourceError(f"{path} holds {base} more than once: {', '.join(names[:3])}")
    return names[0] if names else ""


def read_member(path: str, name: str) -> bytes:
    """Reads a member; SourceError if it is damaged, or too large for annotations."""
    with _opened(path) as archive:
        info = archive.getinfo(name)
        limits.check_size(f"{path}/{name}", info.file_size, limits.ANNOTATION_BYTES, SourceError)
        if fault := limits.expansion(info.compress_size, info.file_size):
            raise SourceError(f"{path}: {name} {fault}")
        with archive.open(info) as file:  # in blocks, because a size in the directory may be a lie
            return b"".join(iter(lambda: file.read(1 << 20), b""))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[zipfile.ZipFile]:
    try:
        with tensorflow().io.gfile.GFile(path, "rb") as file, zipfile.ZipFile(file) as archive:
            yield archive
    except _DAMAGE as error:
        fault = "is cut short, damaged or no zip archive"
        raise SourceError(f"{path} {fault} ({one_line(error)}): mend or replace it") from error


def _name(info: zipfile.ZipInfo) -> str:
    """The name of a member; some archivers write UTF-8 and do not say so."""
    if info.flag_bits & 0x800:
        return info.filename
    with contextlib.suppress(UnicodeError):
        return info.filename.encode("cp437").decode()
    return info.filename


def _is_visible(name: str) -> bool:
    parts = [part for part in name.split("/") if part != "."]
    return not any(part.startswith(".") or part == "__MACOSX" for part in parts)
