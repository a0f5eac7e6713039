"""Tars whose headers lie: one line that names the archive, and no large read."""

import os
import tarfile

import pytest

from benchmarks.translation.preparation import sources as texts
from common import limits
from common.preparation import sources


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def resized(field: bytes) -> bytes:
    """A header with another size field, 12 bytes, and the checksum that belongs to it."""
    raw = bytearray(header("a/1.jpg"))
    raw[124:136] = field
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def attributes(text: str) -> bytes:
    """A member with an extended attribute, as POSIX's pax writes it."""
    record = f"{len(text) + 4} {text}\n".encode()
    assert len(record) == len(text) + 4
    return header("pax", len(record), tarfile.XHDTYPE) + record.ljust(512, b"\0")


PICTURE = header("a/1.jpg", 3) + b"\xff\xd8\xff".ljust(512, b"\0")
END = bytes(1024)
HOSTILE = {
    "a name of 1 GiB": (
        PICTURE + header("././@LongLink", 1 << 30, tarfile.GNUTYPE_LONGNAME),
        f"at most {limits.TAR_HEADER_BYTES:,}",
    ),
    "attributes of 1 GiB": (PICTURE + header("pax", 1 << 30, tarfile.XHDTYPE), "at most"),
    "a negative size": (PICTURE + resized(b"\xff" * 10 + b"\xfe\x00"), "-512 bytes"),
    "a size that is no number": (PICTURE + resized(b"zzzzzzzzzzz\0"), "cut short or damaged"),
    "a sparse map of words": (
        attributes("GNU.sparse.map=1,b,3") + PICTURE + END,
        "invalid literal for int()",
    ),
    "a size of words": (attributes("size=enormous0") + PICTURE + END, "cut short or damaged"),
    "a member beyond the end": (PICTURE + header("a/2.jpg", 1 << 40) + END, "cut short"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_pictures_in_a_tar_that_lies(name, tmp_path):
    data, text = HOSTILE[name]
    path = tmp_path / "photos.tar"
    path.write_bytes(data)
    if "GiB" in name:
        os.truncate(path, 2 << 30)  # a sparse file, so that the bytes could be read
    listing = sources.list_input(str(path), 1)
    with pytest.raises(sources.SourceError) as raised:
        sources.index(listing, True, 1)
    error = str(raised.value)
    assert str(path) in error and text in error and "\n" not in error


@pytest.mark.parametrize("name", ["a name of 1 GiB", "a negative size", "a sparse map of words"])
def test_texts_in_a_tar_that_lies(name, tmp_path):
    data, text = HOSTILE[name]
    path = tmp_path / "texts.tar"
    path.write_bytes(data)
    with pytest.raises(sources.SourceError) as raised:
        texts.pairs_in(str(path), "en", "de")
    error = str(raised.value)
    assert str(path) in error and text in error and "\n" not in error
