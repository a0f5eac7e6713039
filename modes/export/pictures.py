"""Pictures that an export is checked with: drawn, always the same, and of several sizes."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

_SHAPES = ((300, 400), (480, 360), (256, 256), (231, 517), (640, 333))


def draw() -> list[bytes]:
    """Five encoded pictures, JPEG and PNG: waves, gradients, edges and a little noise."""
    return [_draw(i, *shape, "PNG" if i == 2 else "JPEG") for i, shape in enumerate(_SHAPES)]


def _draw(number: int, height: int, width: int, form: str) -> bytes:
    noise = np.random.default_rng(number).normal(0, 8, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    waves = 127 + 90 * np.sin(x / (7 + 5 * number)) * np.cos(y / (11 + 3 * number))
    planes = np.stack([waves, 255 * x / width, 255 * y / height], axis=-1)
    inside = (x - width / 2) ** 2 + (y - height / 2) ** 2 < (min(height, width) / 3) ** 2
    planes[inside] = 255 - planes[inside][:, [(number + k) % 3 for k in range(3)]]
    file = io.BytesIO()
    Image.fromarray((planes + noise).clip(0, 255).astype(np.uint8)).save(file, form, quality=90)
    return file.getvalue()
