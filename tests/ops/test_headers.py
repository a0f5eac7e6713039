"""Image files whose headers would keep Pillow busy, or have more pixels than can be decoded."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from ops.images import headers, photos
from ops.shards import tensorflow


def encoded(kind, mode="RGB", **more):
    out = io.BytesIO()
    image = Image.fromarray(np.arange(3072, dtype=np.uint8).reshape(32, 32, 3))
    image.convert(mode).save(out, kind, **more)
    return out.getvalue()


def segment(marker, body=b""):
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body


def chunk(kind, body=b""):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height):
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(9999))
    parts = chunk(b"IHDR", size) + chunk(b"IDAT", pixels) + chunk(b"IEND")
    return b"\x89PNG\r\n\x1a\n" + parts


def tiff(tags):
    """So many tags that all have the same 100 KB as their value."""
    entries = struct.pack("<HHII", 256, 3, 1, 8) + struct.pack("<HHII", 257, 3, 1, 8)
    entries += b"".join(struct.pack("<HHII", 1000 + i, 7, 100_000, 9000) for i in range(tags))
    return b"II*\0" + struct.pack("<IH", 8, tags + 2) + entries + bytes(120_000)


JPEG, GIF, PNG = encoded("JPEG"), encoded("GIF"), encoded("PNG")
START, END = JPEG[:2], JPEG[2:]  # before and behind the place for further segments
SCAN = JPEG.index(b"\xff\xda")
TABLE = 13 + 3 * (2 << (GIF[10] & 7))
PROGRESSIVE = encoded("JPEG", progressive=True)
SCANS = PROGRESSIVE.index(b"\xff\xda")
HOSTILE = {
    "fill bytes": (START + b"\xff" * 99_999, "65,536 bytes between parts of its header"),
    "zeros": (JPEG[:SCAN] + bytes(99_999), "65,536 bytes between parts of its header"),
    "comments": (START + segment(0xFE) * 3000 + END, "more than 2,048 parts"),
    "EXIF": (START + segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 3 + END, "bytes of EXIF data"),
    "EXIF of a PNG": (PNG[:33] + chunk(b"eXIf", bytes(1 << 18)) + PNG[33:], "bytes of EXIF data"),
    "scans": (PROGRESSIVE[:SCANS] + PROGRESSIVE[SCANS:-2] * 99, "more than 500 scans"),
    "chunks": (PNG[:33] + chunk(b"abCd") * 30_000 + PNG[33:], "too many parts"),
    "comments of a GIF": (GIF[:TABLE] + b"!\xfe\x01x\0" * 30_000 + GIF[TABLE:], "too many parts"),
    # Pillow may warn about the tags first, and here a warning is an error.
    "values of a TIFF": (tiff(90), "the same part too often|Tag data larger than file"),
    "pixels of a PNG": (png(31_623, 31_623), "1,000,014,129 pixels, more than the 178,956,970"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_takes_one_line(case):
    data, words = HOSTILE[case]
    with pytest.raises(photos.BadImage, match=words):
        photos.convert(data, rotate=True, quality=95)


def test_usual_headers_pass():
    data = START + segment(0xE1, b"Exif\0\0" + bytes(60_000)) + segment(0xE2, bytes(65_000)) * 99
    data += b"\xff" * 100 + END
    assert photos.convert(data, rotate=True, quality=95).encoded == data
    for kind in ("PNG", "GIF", "TIFF", "BMP", "WEBP"):
        assert photos.convert(encoded(kind), rotate=True, quality=95).change == f"{kind}, not JPEG"


def test_the_rest_of_a_jpeg_is_not_copied_for_each_block(monkeypatch):
    reads = []

    class Counted(headers.File):
        def read(self, size=-1, /):
            reads.append(size)
            return super().read(size)

    monkeypatch.setattr(headers, "File", Counted)
    data = encoded("JPEG", "CMYK")
    data = data[: data.index(b"\xff\xda") + 14] + b"\xff" * (4 << 20)
    with pytest.raises(photos.BadImage, match="cut short"):
        photos.convert(data, rotate=True, quality=95)
    assert len(reads) < 200  # blocks of 64 KiB would be 64 more than the header's 3 for each part
    assert max(reads) == len(data)


@pytest.mark.parametrize("data", [png(31_623, 31_623), png(8, 8), b"\x89PNG no image"])
def test_a_record_says_if_its_image_is_too_large(data):
    tf = tensorflow()
    value = tf.train.BytesList(value=[b"text", data])
    feature = {"image/encoded": tf.train.Feature(bytes_list=value)}
    record = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
    words = "; 1,000,014,129 pixels, more than the 178,956,970 that are decoded: shrink the image"
    expected = words if data == png(31_623, 31_623) else ""
    assert headers.remark(tf.constant(record)) == expected
    assert headers.remark(tf.constant([b"x", record]), 1) == expected
    assert headers.remark(tf.constant(b"no example")) == ""
