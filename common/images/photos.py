"""Converts any image file into the RGB JPEG of a record."""

import contextlib
import dataclasses
import io
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from common import limits
from common.tensorflow import tensorflow

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
HEAD = 32  # bytes of a file that say which format it has
_JPEG = ("JPEG", "MPO")  # the latter is some cameras' JPEG, with more pictures behind it
_ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
_DEPTHS = (8, 10, 12, 14, 16)  # bits that sensors have, in files of 16 or 32 bits per channel
_BITS_PER_SAMPLE, _MAX_SAMPLE_VALUE = 258, 281  # tags of a TIFF


class BadImage(ValueError):
    """The file is no image, or it is damaged; the message has the reason without the name."""


@dataclasses.dataclass(frozen=True)
class Jpeg:
    """An image as a record stores it."""

    encoded: bytes  # a JPEG
    height: int
    width: int
    change: str  # why the image was re-encoded; '' if it was not


def quiet() -> None:
    """Silences Pillow's warnings; the callers report each file that they cannot use."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def looks_like_image(head: bytes) -> bool:
    """Whether the first HEAD bytes of a file belong to one of the FORMATS."""
    starts = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF87a", b"GIF89a")
    starts += (b"II*\0", b"MM\0*")
    is_webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    return head.startswith(starts) or is_webp or b"avi" in _brands(head)


def unknown(head: bytes) -> str:
    """Why a file with these first HEAD bytes is no image of the FORMATS, in words."""
    if b"hei" in _brands(head):
        return "a HEIC image: save it as a JPEG"
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the file: type git lfs pull"
    return "not a JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF image"


def _brands(head: bytes) -> bytes:
    """What a file in the form of AVIF and HEIC says that it is; b"" for others."""
    return head[8:] if head[4:8] == b"ftyp" else b""


def to_jpeg(data: bytes, rotate: bool, quality: int, grey: bool = True, max_side: int = 0) -> Jpeg:
    """Converts an image file to a JPEG, and decodes a file that was kept as it is, as a check."""
    jpeg = convert(data, rotate, quality, grey, max_side)
    if not jpeg.change:
        decode(data)
    return jpeg


def convert(data: bytes, rotate: bool, quality: int, grey: bool = True, max_side: int = 0) -> Jpeg:
    """Converts an image file to an RGB or grey JPEG.

    A file that is such a JPEG already is kept byte for byte, and not decoded. Other files are
    re-encoded: the first picture of several, transparency over white, more than 8 bits per channel
    scaled to 8, see `_scaled`.

    `rotate` turns the pixels by the EXIF orientation, which is ignored otherwise. `quality`, 1 to
    100, is for re-encoded JPEGs. With `grey`, a grey JPEG may stay grey. A short side of more than
    `max_side` pixels is shrunk to that; 0 shrinks nothing.
    """
    with _opened(data) as image:
        change = _change(image, rotate, ("RGB", "L") if grey else ("RGB",))
        shrinks = 0 < max_side < min(image.size)
        if shrinks:
            change = change or "short side above --max_side"
        if not change:
            return Jpeg(data, image.height, image.width, "")
        is_deep = image.mode in ("RGB", "RGBA") and ";16" in str(image.tile[:1])
        image.load()
        depth, note = _declared_bits(image, data), ""
        if is_deep and np.asarray(image)[..., :3].max() < 64:
            image, note = _deep_colours(image, data, depth)
        upright = ImageOps.exif_transpose(image) if rotate else image
        if upright.mode[0] in "IF":  # grey values that Pillow clips above 255
            pixels, note = _scaled(np.asarray(upright), depth)
            upright = Image.fromarray(pixels)
        rgb, change = _to_rgb(upright), change + note
        if shrinks:
            share = max_side / min(rgb.size)
            width, height = (round(side * share) for side in rgb.size)
            rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
        out = io.BytesIO()
        rgb.save(out, "JPEG", quality=quality)
        return Jpeg(out.getvalue(), rgb.height, rgb.width, change)


def sizes(data: bytes) -> list[tuple[int, int]]:
    """(height, width) of an image as it is stored and, if EXIF turns it, as it is seen.

    It reads the header. EXIF data behind the pixels of a PNG are not found. Pillow turns each TIFF.
    """
    with _opened(data) as image:
        size = image.height, image.width
        orientation = 1 if image.format == "TIFF" else _orientation(image)
        seen = size[::-1] if orientation in range(5, 9) else size
        return [size, seen] if orientation in range(2, 9) else [size]


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Opens an image file; all errors in the context become BadImage."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except BadImage:
        raise
    except Exception as error:  # Pillow's decoders raise anything on damaged files
        if isinstance(error, UnidentifiedImageError):
            raise BadImage("not an image that can be read") from error
        if isinstance(error, Image.DecompressionBombError):
            number = re.search(r"\d+", str(error))  # Pillow's limit is `limits.PIXELS`, too
            size = f"{int(number[0]) if number else 0:,} pixels, more than the {limits.PIXELS:,}"
            raise BadImage(f"{size} that are decoded: shrink the image") from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadImage(f"damaged or cut short: {reason[:200]}") from error


def decode(data: bytes) -> Any:
    """Decodes a JPEG, PNG, BMP or GIF to uint8[H, W, 3] with the decoder of the training."""
    tf = tensorflow()
    try:
        return tf.io.decode_image(data, channels=3, expand_animations=False)
    except tf.errors.OpError as error:
        raise BadImage("damaged or cut short: it cannot be decoded") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """Converts a Pillow image of 8 bits per channel to mode RGB."""
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _declared_bits(image: Any, data: bytes) -> int:
    """The bits of a sample that a file of 16 bits per sample declares; 0 if it does not."""
    if image.format == "PNG":  # the chunk sBIT, which stands before the pixels
        begin = data.find(b"sBIT", 0, data.find(b"IDAT")) + 4
        return data[begin] if begin > 3 else 0
    if image.format == "TIFF":
        if max_value := image.tag_v2.get(_MAX_SAMPLE_VALUE):
            return int(np.max(max_value)).bit_length()
        bits = int(np.max(image.tag_v2.get(_BITS_PER_SAMPLE, 0)))
        return bits if bits < 16 else 0
    return 0


def _deep_colours(image: Any, data: bytes, depth: int) -> tuple[Any, str]:
    """A dark picture of 16 bits per colour as `_scaled` gives it; Pillow keeps the upper 8 only."""
    if image.format != "PNG":
        raise BadImage("16 bits per channel, of which few are used: save it as an 8-bit PNG")
    values = tensorflow().io.decode_png(data, dtype=tensorflow().uint16).numpy()
    grey = values.shape[2] < 3
    colours, note = _scaled(values[..., : 1 if grey else 3], depth)
    channels = [colours] * (3 if grey else 1)
    if values.shape[2] in (2, 4):  # transparency
        channels.append(_scaled(values[..., -1:], depth)[0])
    result = Image.fromarray(np.concatenate(channels, 2))
    result.info = image.info  # with the orientation
    return result, note


def _scaled(values: np.ndarray, declared: int) -> tuple[np.ndarray, str]:
    """Scales values of any type and depth to uint8: (the values, a note if it had to guess).

    The file declares the depth, else it is the smallest of `_DEPTHS` that holds the values; 16 if
    all are multiples of 257, as 8 bits in 16 are. Floats from 0 to 1 are shares of white.
    """
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= 65535):  # NaN is neither
        raise BadImage(f"pixels from {low:,} to {high:,}: save it with 8 or 16 bits per channel")
    if values.dtype.kind == "f" and high <= 1:
        return np.rint(255 * values).astype(np.uint8), ""
    values = np.rint(values).astype(np.int64)
    depth, note = declared, ""
    if not (values % 257).any():
        depth = 16
    elif not 0 < declared <= 16 or high >= 1 << declared:
        depth = next(bits for bits in _DEPTHS if high < 1 << bits)
        if depth < 16:
            note = f"; values to {high:,.0f} taken for {depth} bits"
    white = (1 << depth) - 1
    return ((255 * values + white // 2) // white).astype(np.uint8), note


def _change(image: Image.Image, rotate: bool, modes: tuple[str, ...]) -> str:
    if image.format not in _JPEG:
        return f"{image.format}, not JPEG"
    if image.mode not in modes:
        return "grey" if image.mode == "L" else f"{image.mode} colours"
    if rotate and _orientation(image) in range(2, 9):
        return "EXIF rotation"
    return ""


def _orientation(image: Image.Image) -> Any:
    try:
        return Image.Image.getexif(image).get(_ORIENTATION, 1)  # a PNG's own decodes it
    except Exception:  # damaged EXIF data around an intact picture
        return 1
