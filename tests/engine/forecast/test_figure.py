"""The picture of a program's time."""

import dataclasses
from xml.etree import ElementTree

import pytest

from engine.forecast import figure
from engine.forecast.forecasts import Forecast
from tests.engine.forecast.test_estimates import TRAIN, V3, operation

PROGRAM = dataclasses.replace(
    TRAIN,
    operations=(
        operation(0.004, scopes="jit(step)/layer<1>/dot", place="net.py:3", flops=7),
        operation(0.002, scopes="jit(step)/layer<1>/dot", place="net.py:3", times=2.0, flops=7),
        operation(0.001, scopes="jit(step)/psum", link_seconds=0.001),
        operation(0.001, scopes="jit(step)/exp", place="net.py:9"),
    ),
)
ONE = Forecast(
    topology=V3, price=8.0, examples=None, used=8, fits=True, error="", arguments=(), callbacks=0,
    program=PROGRAM,
)  # fmt: skip


def test_operations_of_one_line_are_one_bar():
    first, *others = ONE.dearest()
    assert (first.times, first.flops, first.kind) == (3, 21, "products")
    assert first.seconds == pytest.approx(0.008)
    assert [group.kind for group in others] == ["collectives", "other work"]


def test_the_bars_are_as_long_as_their_times():
    root = ElementTree.fromstring(figure.draw([ONE, dataclasses.replace(ONE, program=None)], 2))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{space}text")]
    assert "net.py:3 dot" in texts and "all others" in texts
    assert len([text for text in texts if text and text.startswith("v3:2x2: 10 ms")]) == 1
    widths = [
        float(x.get("width", "")) for x in root.iter(f"{space}rect") if x.get("height") == "13"
    ]
    assert widths == pytest.approx([380, 380 / 8, 380 / 8], abs=0.1)
