"""The font of pictures that predict.py draws."""

from __future__ import annotations

import functools
import os
from typing import Any

from PIL import ImageFont


@functools.cache
def load(size: int, bold: bool = False) -> Any:
    """DejaVu Sans, which comes with matplotlib; it has no Chinese, Japanese or Korean letters."""
    import matplotlib

    file = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    path = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", file)
    return ImageFont.truetype(path, size)
