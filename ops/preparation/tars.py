"""Reads tars of any origin with tarfile, which trusts their headers."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from typing import Any

from errors import one_line
from ops import limits

_READ_AT_ONCE = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE)
_READ_AT_ONCE += (tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class Member(tarfile.TarInfo):
    """A member of a tar; tarfile would read a long name or extended attributes of any size."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Member:
        """See `tarfile.TarInfo.frombuf`; tarfile.ReadError for a size that no tar has."""
        info = super().frombuf(buf, encoding, errors)
        most = limits.TAR_HEADER_BYTES
        if info.type in _READ_AT_ONCE and info.size > most:
            raise tarfile.ReadError(
                f"a name or attributes of {info.size:,} bytes, at most {most:,}"
            )
        return info


def opened(file: Any, mode: Any) -> tarfile.TarFile:
    """Opens a tar for reading; tarfile.ReadError if its first header is damaged.

    Args:
      file: has `read`, and for a `mode` without "|" also `seek` and `tell`.
      mode: as of `tarfile.open`.
    """
    with _checked():
        return tarfile.open(fileobj=file, mode=mode, tarinfo=Member)


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of a tar that `opened` has opened; tarfile.ReadError if it is damaged."""
    with _checked():
        for info in tar:
            if info.size < 0:  # some versions of tarfile would go back for ever
                raise tarfile.ReadError(f"{info.name} has {info.size:,} bytes")
            yield info


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError) as error:  # tarfile does not check all fields
        raise tarfile.ReadError(one_line(error)) from error


class Window:
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
