"""YOLO's data.yaml or list of classes, and what the numbers in its label files mean."""

import collections
import contextlib
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from common import limits
from common.errors import one_line
from common.preparation.folders import Folder
from common.preparation.sources import SourceError
from common.text import text_lines

_NUMBERS = rb"(?:[ \t]+-?[\d.][\d.eE+-]*)"
# The first line of a label file: a class, and a box or more numbers.
LINE = rb"^(?:\xef\xbb\xbf)?\s*\d+(?:\.0*)?" + _NUMBERS + rb"{4,}[ \t]*(?:[\r\n]|$)"
# A line with a box, or, as a group, with a polygon.
SHAPES = rb"(?m)^\s*\d+(?:\.0*)?" + _NUMBERS + rb"{4,5}(" + _NUMBERS + rb"{5,})?[ \t]*\r?$"
_MOST = 0.95  # of the rows: so many say what all are


class Settings(NamedTuple):
    """YOLO's data.yaml, or a list of classes without one."""

    file: str = ""
    names: Mapping[int, str] = {}  # of the classes
    content: Mapping[str, Any] = {}  # of data.yaml
    shapes: str = ""  # what `shapes_of` says


def read_settings(folder: Folder, heads: Iterable[bytes]) -> Settings:
    """The settings of the uppermost data.yaml with names, else of a list of classes.

    `heads` are the first bytes of label files. SourceError if a .yaml with names is no YAML, or the
    file's encoding is not known.
    """
    import yaml

    lists = folder.named(".names", ".labels", "classes.txt")  # of darknet and LabelImg
    files = [*folder.named(".yaml", ".yml"), *lists]
    shapes = shapes_of(heads)
    for file in sorted(files, key=lambda name: (name in lists, name.count("/"), name)):
        if file in lists:
            return Settings(file, dict(enumerate(text_lines(folder.text(file)))), {}, shapes)
        if not re.search(rb"n\0?a\0?m\0?e\0?s", folder.head(file, limits.TEXT_BYTES)):  # or UTF-16
            continue
        try:  # the loader that leaves all values text: `no` is a name
            content = yaml.load(folder.text(file), Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise SourceError(f"{folder.full(file)} is not YAML: {one_line(error)}") from error
        names = content.get("names") if isinstance(content, dict) else None
        names = dict(enumerate(names)) if isinstance(names, list) else names
        if isinstance(names, dict) and all(str(key).isdigit() for key in names):
            shapes = "key points" if "kpt_shape" in content else shapes
            return Settings(file, {int(k): str(name) for k, name in names.items()}, content, shapes)
    return Settings(shapes=shapes)


def shapes_of(heads: Iterable[bytes]) -> str:
    """What numbers behind the class mean in YOLO's label files, from what these begin with.

    "key points" follow a box, "corners" are of boxes in any direction, which people also draw as
    outlines; "" are outlines or boxes alone.
    """
    rows = []
    for line in itertools.chain(*(re.split(rb"[\r\n]+", head) for head in heads)):
        with contextlib.suppress(ValueError):
            if re.match(LINE, line) and len(values := [*map(float, line.split()[1:])]) > 5:
                rows.append(values)
    length, number = collections.Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
    if number <= _MOST * len(rows):  # outlines have as many points as they need
        return ""
    table = np.array([row for row in rows if len(row) == length])
    if (table[:, :2] == table[:, -2:]).all(1).mean() > 0.5:  # closed outlines
        return ""
    if length == 8:
        return "corners"
    middle, half = table[:, None, :2], table[:, None, 2:4] / 2
    fits = (middle - half >= -0.01) & (middle + half <= 1.01)
    for size in (2, 3):  # of a key point, without or with a number that says whether it is seen
        if (length - 4) % size == 0:
            points = table[:, 4:].reshape(number, -1, size)
            xy, seen = points[..., :2], points[..., 2:]
            is_inside = fits & ((abs(xy - middle) <= half + 0.01) | (xy == 0))
            is_seen = size == 3 and np.isin(seen, (0, 1, 2)).all()
            if is_seen or is_inside.all((1, 2)).mean() >= _MOST:
                return "key points"
    return ""
