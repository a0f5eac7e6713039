"""Image files of other formats, with too many pixels, and with other depths than 8 bits."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from common.images import photos


def encoded(kind, mode="RGB", **more):
    out = io.BytesIO()
    image = Image.fromarray(np.arange(3072, dtype=np.uint8).reshape(32, 32, 3))
    image.convert(mode).save(out, kind, **more)
    return out.getvalue()


def chunk(kind, body=b""):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of_size(width, height):
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(9999))
    parts = chunk(b"IHDR", size) + chunk(b"IDAT", pixels) + chunk(b"IEND")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_an_image_of_too_many_pixels_takes_one_line():
    words = "1,000,014,129 pixels, more than the 178,956,970"
    with pytest.raises(photos.BadImage, match=words):
        photos.convert(png_of_size(31_623, 31_623), rotate=True, quality=95)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "TIFF", "BMP", "WEBP", "AVIF"])
def test_other_formats_become_jpegs(kind):
    data = encoded(kind)
    jpeg = photos.convert(data, rotate=True, quality=95)
    assert photos.looks_like_image(data[: photos.HEAD]) and jpeg.change == f"{kind}, not JPEG"
    pixels = np.asarray(Image.open(io.BytesIO(jpeg.encoded)).convert("L")).astype(float)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("L"))
    assert np.abs(pixels - expected).mean() < 8


@pytest.mark.parametrize("brand", [b"heic", b"mif1\0\0\0\0mif1heic"])
def test_heic_is_named(brand):
    head = b"\0\0\0\x1cftyp" + brand
    assert not photos.looks_like_image(head) and "HEIC" in photos.unknown(head)


# --- Other depths than 8 bits.

RAMP = np.arange(4096).reshape(64, 64)


def file(values, form, **options):
    out = io.BytesIO()
    Image.fromarray(values).save(out, form, **options)
    return out.getvalue()


def deep_png(values, kind, sbit=None):
    """A PNG of 16 bits per channel, which Pillow cannot write in colour."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in values.astype(">u2"))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0))
    depth = chunk(b"sBIT", bytes([sbit])) if sbit else b""
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + depth + pixels + chunk(b"IEND", b"")


def colours(*channels):
    return np.stack(channels, -1)


SCALED = {  # file: (values from 0 to 1, what is said of a guess)
    "8 bits in 32": (file((RAMP % 256).astype(np.int32), "TIFF"), RAMP % 256 / 255, " 8 bits"),
    "10 bits in 16": (file((RAMP // 4).astype(np.uint16), "PNG"), RAMP // 4 / 1023, "10 bits"),
    "12 bits in 16": (file(RAMP.astype(np.uint16), "PNG"), RAMP / 4095, "12 bits"),
    "12 bits, big-endian": (file(RAMP.astype(">u2"), "TIFF"), RAMP / 4095, "12 bits"),
    "14 bits in 32": (file((RAMP * 4).astype(np.int32), "TIFF"), RAMP * 4 / 16383, "14 bits"),
    "16 bits": (file((RAMP * 16).astype(np.uint16), "PNG"), RAMP * 16 / 65535, ""),
    "16 bits of 8, dark": (file((RAMP % 9 * 257).astype(np.uint16), "PNG"), RAMP % 9 / 255, ""),
    "black": (file(np.zeros((9, 9), np.uint16), "PNG"), np.zeros((9, 9)), ""),
    "declared by sBIT": (deep_png(RAMP // 8, 0, 12), RAMP // 8 / 4095, ""),
    "dark, by sBIT": (deep_png(RAMP, 0, 16), RAMP / 65535, ""),
    "declared by a TIFF": (
        file((RAMP // 8).astype(np.uint16), "TIFF", tiffinfo={281: 4095}),
        RAMP // 8 / 4095,
        "",
    ),
    "shares": (file((RAMP / 4095).astype(np.float32), "TIFF"), RAMP / 4095, ""),
    "float of 8 bits": (file((RAMP % 256).astype(np.float32), "TIFF"), RAMP % 256 / 255, " 8 bits"),
    "colour": (deep_png(colours(RAMP, RAMP, RAMP), 2), RAMP / 4095, "12 bits"),
    "colour, opaque": (
        deep_png(colours(RAMP, RAMP, RAMP, np.full_like(RAMP, 65535)), 6),
        RAMP / 4095,
        "12 bits",
    ),
    "grey, transparent": (  # over white
        deep_png(colours(RAMP, np.full_like(RAMP, 0)), 4),
        np.ones((64, 64)),
        "12 bits",
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_picture_is_scaled_by_its_depth(name):
    data, expected, guess = SCALED[name]
    jpeg = photos.to_jpeg(data, rotate=True, quality=100)
    pixels = np.asarray(Image.open(io.BytesIO(jpeg.encoded)).convert("RGB")).astype(int)
    assert np.abs(pixels - np.rint(255 * expected)[..., None]).max() <= 3
    assert jpeg.change.endswith(guess) and bool(guess) == ("taken for" in jpeg.change)


def test_16_bits_are_rounded():
    every = np.arange(65536)
    np.testing.assert_array_equal(photos._scaled(every, 0)[0], np.rint(every / 257))


UNKNOWN = {
    "more than 16 bits": RAMP.astype(np.int32) * 1000,
    "negative": RAMP.astype(np.int32) - 5,
    "no number": np.full((9, 9), np.nan, np.float32),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_picture_without_a_known_range_is_refused(name):
    with pytest.raises(photos.BadImage, match="pixels from .* to .*save it with 8 or 16 bits"):
        photos.to_jpeg(file(UNKNOWN[name], "TIFF"), rotate=True, quality=95)
