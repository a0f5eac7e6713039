"""One palette for all pictures: no other file has colours, and each pair can be told apart."""

import pathlib
import re

import pytest

from common import palette
from tests.test_budget import sources

ROOT = pathlib.Path(__file__).parents[2]


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2, 0 for black and 1 for white."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


def test_no_other_file_has_colours():
    files = [path for paths in sources().values() for path in paths]
    found = [
        str(path.relative_to(ROOT))
        for path in files
        if re.search(r"#[0-9a-fA-F]{6}\b", path.read_text())
    ]
    assert found == ["common/palette.py"]


@pytest.mark.parametrize("colour", palette.CLASSES)
def test_a_name_can_be_read_on_the_colour_of_its_class(colour):
    ink = 1.0 if colour in palette.DARK else 0.0
    assert contrast(luminance(colour), ink) >= 4.5


@pytest.mark.parametrize("colour", [palette.TRAIN, palette.EVAL, palette.GREY])
def test_lines_stand_out_from_a_white_and_from_a_dark_ground(colour):
    assert (
        contrast(luminance(colour), 1.0) >= 3 <= contrast(luminance(colour), luminance("#14191f"))
    )
