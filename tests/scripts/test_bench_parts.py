"""The table of what the parts of a step cost, from names and cycles as the compiler gives them."""

import pytest
from PIL import Image

from scripts.bench import parts

NAMES = {
    "jit(step)/jvp(Net)/backbone/stage1/conv": (940_000, 940_000),
    "jit(step)/transpose(jvp(Net))/backbone/head/conv": (470_000, 0),
    "jit(step)/jvp(Net)/head/dot": (94_000, 94_000),
    "jit(step)/backbones/add": (188_000, 0),
    "jit(step)/my_head/add": (0, 0),
    "jit(step)/head_2/add": (0, 0),
    "": (188_000, 0),
}


def test_operations_belong_to_the_first_part_in_their_path():
    costs = parts.split(NAMES, ["head", "backbone", "pyramid"], 0.94e9)
    assert costs["backbone"] == pytest.approx((1.0, 1.0))
    assert costs["head"] == pytest.approx((0.6, 0.1))
    assert costs["pyramid"] == (0, 0)
    assert costs["other"] == pytest.approx((0.4, 0))


def test_the_table_and_its_picture(tmp_path):
    costs = parts.split(NAMES, ["backbone", "head"], 0.94e9)
    lines = parts.table(costs).splitlines()
    assert "| backbone | 1.5 | 75.0% | 1.0 | 0.5 |" in lines
    assert "| step | 2.0 | 100.0% | 1.1 | 0.9 |" in lines
    assert lines[-1] == "without products: 45.0% of the step"
    parts.draw({"v3-8": costs, "v5e-8": costs}, str(tmp_path / "parts.png"))
    with Image.open(tmp_path / "parts.png") as picture:
        assert picture.width > 500
