"""The model of a chip, in numbers that a person can check."""

import pytest

from engine.forecast import timing, topology

V4, V3 = topology.CHIPS["v4"], topology.CHIPS["v3"]


def test_the_longest_limit_counts():
    """275 TFLOP/s, 1.2 TB/s and 1.05 GHz; of v3 half of a chip's rates are a core's."""
    product = timing.operation_seconds
    assert product(V4, 275e12, 1.2e9, 0) == 1.0  # its FLOPs
    assert product(V4, 275e9, 1.2e12, 0) == 1.0  # its bytes
    assert product(V4, 275e9, 1.2e9, 1.05e9) == pytest.approx(0.66)  # its cycles
    assert product(V3, 61.5e12, 0, 0) == product(V3, 1, 0.45e12, 0) == 1.0
    # Without a product: the bytes at 0.95 of the bandwidth, a quarter of the cycles.
    assert product(V4, 0, 1.14e12, 1.05e9) == pytest.approx(1.0)
    assert product(V4, 0, 0, 1.05e9) == pytest.approx(0.25)


def test_every_chip_has_a_time():
    for chip in topology.CHIPS.values():
        assert timing.operation_seconds(chip, 1e12, 1e9, 1e6) > 0
