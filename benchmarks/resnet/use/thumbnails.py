"""Makes small pictures of images in records, for people to look at."""

from __future__ import annotations

import io

from ops.images import pixels


def jpeg(encoded: bytes, side: int) -> bytes:
    """A JPEG of at most `side` pixels a side; smaller images keep their size.

    Args:
      encoded: a JPEG, PNG, BMP or GIF that evaluation has decoded before.
      side: of the square that the picture fits into.
    """
    from PIL import Image

    image = Image.fromarray(pixels.decode(encoded).numpy())
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return file.getvalue()
