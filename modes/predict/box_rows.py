"""The objects on a picture: rows for programs, lines for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from modes.predict.rows import cell, cut, shortest
from modes.predict.sources import exact, shown

COLUMNS = ("path", "label", "category_id", "score", "x", "y", "width", "height", "error")


@dataclasses.dataclass(frozen=True)
class Object:
    """One object.

    Attributes:
      label: the name of its class.
      category_id: of its class in the data.
      score: from 0 to 1.
      box: (y0, x0, y1, x1) in pixels of the photo.
      outline: run lengths of its mask, as COCO has them; None without masks.
      inside: makes bool[height, width], the pixels of the photo in its mask.
    """

    label: str
    category_id: int
    score: float
    box: tuple[float, ...]
    outline: Mapping[str, Any] | None = None
    inside: Callable[[], np.ndarray] | None = None

    @property
    def bbox(self) -> list[float]:
        """x, y, width and height in pixels, as COCO has them."""
        y0, x0, y1, x1 = self.box
        return [x0, y0, x1 - x0, y1 - y0]


@dataclasses.dataclass(frozen=True)
class Row:
    """The objects on a photo of `height` x `width` pixels, the best first, or an error."""

    path: str
    height: int = 0
    width: int = 0
    objects: tuple[Object, ...] = ()
    error: str = ""

    def content(self) -> dict[str, Any]:
        """See `rows.Row`."""
        content: dict[str, Any] = {"path": exact(self.path)}
        if self.error:
            return content | {"error": self.error}
        objects = []
        for each in self.objects:
            values = {"label": each.label, "category_id": each.category_id}
            values |= {"score": shortest(each.score), "bbox": list(map(shortest, each.bbox))}
            outline = {"segmentation": each.outline} if each.outline else {}
            objects.append({**values, **outline})
        return content | {"height": self.height, "width": self.width, "objects": objects}

    def cells(self) -> list[dict[str, Any]]:
        """See `rows.Row`: a line for each object; a picture without any has one line."""
        common = {"path": exact(self.path), "error": self.error}
        lines = []
        for each in self.objects:
            cells = (each.label, each.category_id, *map(shortest, (each.score, *each.bbox)))
            lines.append(common | dict(zip(COLUMNS[1:-1], cells, strict=True)))
        return lines or [common]


def coco(row: Row, image_id: int) -> Iterator[dict[str, Any]]:
    """The objects of a picture in COCO's form of results."""
    for each in row.objects:
        values = {"image_id": image_id, "category_id": each.category_id, "score": each.score}
        outline = {"segmentation": each.outline} if each.outline else {}
        yield {**values, "bbox": each.bbox, **outline}


def table(rows: Iterable[Row], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns: one for each picture, one for each object."""
    for row in rows:
        name = cell(row.path, max(width - 30, 20))
        if row.error:
            yield f"{name}  ERROR {row.error}\n"
            continue
        count = len(row.objects)
        found = "no objects" if not count else f"{count} object{'s' * (count > 1)}"
        yield f"{name}  {row.width} x {row.height}, {found}\n"
        for each in row.objects:
            x, y, wide, high = each.bbox
            label = cut(shown(each.label), 24)
            yield f"  {label:24} {each.score:6.1%}  at {x:.0f}, {y:.0f}: {wide:.0f} x {high:.0f}\n"
