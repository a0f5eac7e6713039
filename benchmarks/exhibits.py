"""What the exhibits of several benchmarks have in common: tables, pictures, groups of examples."""

import csv
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from common import palette
from common.images import pixels
from common.images.input_spec import InputSpec, seen_part

CLASSES = 50  # rows of a table of classes
_GAP = 4  # pixels between two images
_COLOURS = "inferno"  # of heat maps, a colour map of matplotlib: black, violet, orange, yellow


def csv_file(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """UTF-8 with a line of names, then a line for each row."""
    return csv_text([columns, *rows]).encode()


def thumbnail(encoded: bytes, side: int) -> Any:
    """A PIL image of at most `side` pixels a side; a small one is enlarged by a whole number.

    `encoded` is a JPEG, PNG, BMP or GIF that evaluation has decoded before.
    """
    from PIL import Image, ImageOps

    image = Image.fromarray(pixels.decode(encoded).numpy())
    image.thumbnail((side, side))
    return ImageOps.scale(image, side // max(image.size), Image.Resampling.NEAREST)


def heated(image: Any, heat: np.ndarray, spec: InputSpec) -> Any:
    """A PIL image, in grey, below the colours of a heat map f32[size, size] from 0 to 1.

    The map lies on the part of the image that a model of this `spec` sees, within a white frame.
    """
    from matplotlib import colormaps
    from PIL import Image, ImageDraw

    top, left, bottom, right = map(round, seen_part(image.height, image.width, spec))
    levels = Image.fromarray((255 * heat).astype(np.uint8))
    levels = levels.resize((right - left, bottom - top), Image.Resampling.BILINEAR)
    levels.putpalette(colormaps[_COLOURS](np.arange(256), bytes=True)[:, :3].tobytes())
    grey = image.convert("L").convert("RGB")
    part = grey.crop((left, top, right, bottom))
    shown = Image.blend(grey, Image.new("RGB", grey.size), 0.6)
    shown.paste(Image.blend(part, levels.convert("RGB"), 0.5), (left, top))
    ImageDraw.Draw(shown).rectangle((left, top, right - 1, bottom - 1), outline="white")
    return shown


def curves(panels: Sequence[tuple[str, Mapping, bool]], title: str, unit: str) -> bytes:
    """A PNG of panels (name, {(split, quantity): {x: y}}, in per cent?), whole `unit`s on x."""
    from matplotlib import figure, ticker

    drawn, file = figure.Figure(figsize=(4 * len(panels), 3.6), layout="constrained"), io.BytesIO()
    drawn.suptitle(title)
    grid = drawn.subplots(1, len(panels), sharex=True, squeeze=False)[0]
    for axes, (name, lines, is_percent) in zip(grid, panels, strict=True):
        keys = sorted({key for _, key in lines}, key=lambda key: (len(key), key))
        for key, look in zip(keys, itertools.cycle(("o-", "s--", "^:", "D-.", "v-", "P--"))):
            for split, hue in (("train", palette.TRAIN), ("eval", palette.EVAL)):
                if curve := sorted(lines.get((split, key), {}).items()):
                    x, y = zip(*curve, strict=True)
                    axes.plot(x, y, look[split == "train" :], c=hue, ms=4, label=f"{split} {key}")
        axes.set(xlabel=unit, title=name)
        axes.grid(alpha=0.3)
        if is_percent:
            axes.yaxis.set_major_formatter(ticker.PercentFormatter(1, symbol=" %"))
        if lines:
            axes.legend(fontsize=8, framealpha=0.6)
    grid[0].set_xlim(left=0)
    grid[0].xaxis.set_major_locator(ticker.MaxNLocator("auto", steps=(1, 2, 5, 10), integer=True))
    grid[0].xaxis.set_major_formatter(ticker.EngFormatter(sep=""))  # 1M for 1,000,000
    drawn.savefig(file, format="png", dpi=110)
    return file.getvalue()


def beside(left: Any, right: Any) -> Any:
    """A PIL image of two of the same size, with a white line between them."""
    from PIL import Image

    both = Image.new("RGB", (2 * left.width + _GAP, left.height), "white")
    both.paste(left, (0, 0))
    both.paste(right, (left.width + _GAP, 0))
    return both


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The probabilities float64 in [0, 1] of independent labels, in the shape of the logits."""
    return 1 / (1 + np.exp(-np.clip(logits.astype(np.float64), -500, 500)))


def even_groups(values: np.ndarray, max_groups: int) -> list[np.ndarray]:
    """The indices of values int[n] in at most `max_groups` groups, the least values first.

    Equal values stay together. So groups may differ in size, and there may be fewer of them; none
    is empty.
    """
    order = np.argsort(values, kind="stable")
    ordered, n = values[order], len(values)
    if not n:
        return []
    lasts = [max(n * (i + 1) // max_groups, 1) - 1 for i in range(max_groups)]
    ends = np.unique(np.searchsorted(ordered, ordered[lasts], side="right"))
    return np.split(order, ends[:-1])


def percent(share: float) -> str:
    """A share in per cent with one decimal; a dash for nan."""
    return "–" if math.isnan(share) else f"{100 * share:.1f}\u00a0%"


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The lines of rows of cells."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
