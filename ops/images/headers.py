"""Looks at the headers of image files before Pillow does, which takes any time for a hostile one.

Pillow reads headers with Python code, byte by byte where markers are missing, and copies the EXIF
data or the comment so far for each further part of it: 16 MB took 100 s.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from PIL import Image

from ops import limits
from ops.images import pixels
from ops.shards import tensorflow

_MARKER = re.compile(rb"\xff([^\x00\xff])")  # of a JPEG; fill bytes may stand before it
_BARE = {0x01, *range(0xD0, 0xDA)}  # markers without a length
_SCAN, _APP1 = 0xDA, 0xE1  # the first begins the pixels, the second may have EXIF data
_SEGMENTS = 2_048  # of a JPEG's header; cameras write 10 to 100, with depth maps some hundreds
_JUNK_BYTES = 64 << 10  # between segments; the standard allows fill bytes, which nobody writes
EXIF_BYTES = 128 << 10  # the standard allows 64 KiB; damaged editors write it twice
_SCANS = 500  # of a progressive JPEG, as in libjpeg-turbo's own tests; usual are 10
_READS, _READ_BYTES = 50_000, 512  # reads, and one more for so many bytes; a chunk of a PNG takes 3
_COPIES = 4  # of the file that Pillow may read before the pixels, and 1 MiB; usual is 1


class BadImage(ValueError):
    """The file is no image, or it is damaged; the message has the reason without the name."""


class File(io.BytesIO):
    """An image file in memory that raises BadImage if Pillow reads it in too many parts."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self._reads = _READS + len(data) // _READ_BYTES
        self._left = _COPIES * len(data) + (1 << 20)  # bytes

    def opened(self) -> None:
        """From now on bytes may be read again: strips of a TIFF are, 64 KiB for each."""
        self._left = 1 << 62

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._reads -= 1
        self._left -= len(data)
        if min(self._reads, self._left) < 0:
            raise BadImage("damaged: it has too many parts, or lists the same part too often")
        return data


def check_jpeg(data: bytes) -> None:
    """Raises BadImage if the header of a JPEG has more parts than Pillow reads quickly."""
    if data.count(b"\xff\xda") > _SCANS:
        raise BadImage(f"damaged: more than {_SCANS:,} scans")
    position, junk, exif = 2, 0, 0
    for _ in range(_SEGMENTS):
        end = min(position + _JUNK_BYTES + 2, len(data))
        match = _MARKER.search(data, position, end)
        junk += (match.start() if match else end) - position
        if junk > _JUNK_BYTES:
            raise BadImage(f"damaged: more than {_JUNK_BYTES:,} bytes between parts of its header")
        if match is None or match[1][0] == _SCAN:
            return
        position = match.end()
        if match[1][0] not in _BARE:
            size = int.from_bytes(data[position : position + 2], "big")
            if match[1][0] == _APP1 and data[position + 2 : position + 6] == b"Exif":
                exif += size
            position += size
        if exif > EXIF_BYTES:
            raise BadImage(f"damaged: more than {EXIF_BYTES:,} bytes of EXIF data")
    raise BadImage(f"damaged: its header has more than {_SEGMENTS:,} parts")


def check_exif(info: Mapping[Any, Any]) -> None:
    """Raises BadImage if Pillow's `info` of an image has more EXIF data than it reads quickly."""
    for key in ("exif", "Raw profile type exif"):
        if len(info.get(key, b"")) > EXIF_BYTES:
            raise BadImage(f"damaged: more than {EXIF_BYTES:,} bytes of EXIF data")


def too_large(error: Image.DecompressionBombError) -> str:
    """The message for an image of more pixels than `limits.PIXELS`, which is Pillow's limit."""
    number = re.search(r"\d+", str(error))
    size = int(number[0]) if number else 0
    return f"{size:,} pixels, more than the {limits.PIXELS:,} that are decoded: shrink the image"


def remark(serialized: Any, *rest: Any) -> str:
    """Says that an image in a record is too large to be decoded; "" if none is.

    Args:
      serialized: the tf.train.Example, a string tensor; or several of them [n].
      rest: begins with the index of the one among several.
    """
    record = serialized[rest[0]] if serialized.shape.rank else serialized
    try:
        feature = tensorflow().train.Example.FromString(record.numpy()).features.feature
        files = [data for row in feature.values() for data in row.bytes_list.value]
        for data in files:
            if data.startswith(pixels.MAGIC):
                Image.open(io.BytesIO(data)).close()
    except Image.DecompressionBombError as error:
        return f"; {too_large(error)}"
    except Exception:  # no example, or a damaged image: that is the fault
        return ""
    return ""
