"""Slices: every spelling, what is no slice, and the machines of each."""

import pytest

from common.errors import ConfigError
from engine.forecast.topology import CHIPS, Chip, machines, of_kind, parse_slices


@pytest.mark.parametrize(
    ("text", "name", "accelerator", "devices"),
    [
        ("v3:2x2", "v3:2x2", "v3-8", 8),
        ("v3-32", "v3:4x4", "v3-32", 32),
        ("tpu-v2-256", "v2:8x16", "v2-256", 256),
        ("v4-8", "v4:2x2x1", "v4-8", 4),
        ("v4-32", "v4:2x2x4", "v4-32", 16),
        ("v5p-128", "v5p:4x4x4", "v5p-128", 64),
        ("v5e:4x4", "v5e:4x4", "v5litepod-16", 16),
        ("V5LitePod-16", "v5e:4x4", "v5litepod-16", 16),
        ("v5e-1", "v5e:1x1", "v5litepod-1", 1),
        (" TPU v6e-256 ", "v6e:16x16", "v6e-256", 256),
        ("TPU7x:2x2x2", "tpu7x:2x2x2", "tpu7x-16", 16),
        ("v7x-128", "tpu7x:4x4x4", "tpu7x-128", 128),
    ],
)
def test_spellings(text, name, accelerator, devices):
    (parsed,) = parse_slices(text)
    assert (parsed.name, parsed.accelerator, parsed.devices) == (name, accelerator, devices)
    assert parse_slices(parsed.accelerator) == parse_slices(parsed.name) == [parsed]


def test_every_size_of_every_chip_is_a_grid_of_so_many():
    for chip in CHIPS.values():
        for size in chip.sizes:
            (parsed,) = parse_slices(f"{chip.prefix}-{size}")
            assert parsed.chips == (size // 2 if chip.counts_cores else size)
            assert len(parsed.shape) == chip.dimensions
            assert max(parsed.shape) <= 4 * min(parsed.shape) or parsed.chips <= 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "which slice.*v5litepod-1/4/8.*all"),
        ("v3-8,v9-8", "^--tpu=v9-8.*v2-8/32.*v6e-1/4/8"),
        ("tpu9:2x2x1", "^--tpu=tpu9:2x2x1.*v6e-1/4/8"),
        ("v5e:4xx4", "v5e:4xx4"),
        ("v3-12", "no such slice of v3.*v3-8, v3-32"),
        ("v5e:2x2x2", "slices of v5e are grids up to v5e:16x16"),
        *((f"v5e:{grid}", "v5e:16x16") for grid in ("0x4", "16x32")),
        ("tpu7x:2x1x1", "not a complete slice.*hosts of tpu7x have 2x2x1.*or tpu7x:1x1x1"),
        ("v5e:3x4", "not a complete slice.*hosts of v5e have 2x2 chips.*or v5e:1x1"),
        ("v4:1x2", "not a complete slice.*hosts of v4 have 2x2x1 chips; use multiples of that"),
    ],
)
def test_what_is_no_slice(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_slices(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("slice_", "count", "cpus"),
    [
        *(("v2-8", 1, 96), ("v3-8", 1, 96), ("v3-32", 4, 96), ("v4-8", 1, 240), ("v4-32", 4, 240)),
        *(("v5e-1", 1, 24), ("v5e-4", 1, 112), ("v5e-8", 1, 224), ("v5e-16", 4, 112)),
        *(("v5p-8", 1, 208), ("v5p-16", 2, 208)),
        *(("v6e-1", 1, 44), ("v6e-4", 1, 180), ("v6e-8", 1, 180), ("v6e-16", 4, 180)),
        *(("tpu7x-8", 1, 224), ("tpu7x-16", 2, 224)),
    ],
)
def test_the_machines_of_a_slice(slice_, count, cpus):
    (one,) = parse_slices(slice_)
    assert machines(one) == (count, cpus)


def test_what_libtpu_is_told():
    one_host = {
        "v5e-1": [1, 1, 1],
        "v5e-8": [2, 4, 1],
        "v6e-1": [1, 1, 1],
        "v6e-8": [2, 4, 1],
        "tpu7x:1x1x1": [1, 1, 1],
    }
    for text, bounds in one_host.items():
        (parsed,) = parse_slices(text)
        assert parsed.options == {"chips_per_host_bounds": bounds}
    for text in ("v5e-4", "v5e-16", "v2-8", "v3-32", "v3:2x4", "v5p-8", "v6e-4", "tpu7x-8"):
        (parsed,) = parse_slices(text)
        assert parsed.options == {}
    for text in ("v4-8", "v4-64"):
        (parsed,) = parse_slices(text)
        assert parsed.options == {"chip_config_name": "megacore"}


def test_chips_by_what_jax_calls_them():
    assert [of_kind(kind) for kind in ("TPU v5 lite", "TPU7x", "cpu")] == [
        *(CHIPS["v5e"], CHIPS["tpu7x"], None)
    ]
    assert [one.name for one in parse_slices("all")] == [
        *("v2:2x2", "v3:2x2", "v4:2x2x1", "v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")
    ]


V4, V3 = CHIPS["v4"], CHIPS["v3"]


def test_the_longest_limit_counts():
    """275 TFLOP/s, 1.2 TB/s and 1.05 GHz; of v3 half of a chip's rates are a core's."""
    product = Chip.operation_seconds
    assert product(V4, 275e12, 1.2e9, 0) == 1.0  # its FLOPs
    assert product(V4, 275e9, 1.2e12, 0) == 1.0  # its bytes
    assert product(V4, 275e9, 1.2e9, 1.05e9) == pytest.approx(0.66)  # its cycles
    assert product(V3, 61.5e12, 0, 0) == product(V3, 1, 0.45e12, 0) == 1.0
    # Without a product: the bytes at 0.95 of the bandwidth, a quarter of the cycles.
    assert product(V4, 0, 1.14e12, 1.05e9) == pytest.approx(1.0)
    assert product(V4, 0, 0, 1.05e9) == pytest.approx(0.25)


def test_every_chip_has_a_time():
    for chip in CHIPS.values():
        assert chip.operation_seconds(1e12, 1e9, 1e6) > 0
