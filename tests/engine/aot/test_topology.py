"""Slices: every spelling, what is no slice, and the machines of each."""

import pytest

from common.errors import ConfigError
from engine.aot.topology import CHIPS, machines, parse_slices


@pytest.mark.parametrize(
    ("text", "name", "accelerator", "devices"),
    [
        ("v3-32", "v3:4x4", "v3-32", 32),
        ("tpu-v2-256", "v2:8x16", "v2-256", 256),
        ("v4:2x2", "v4:2x2x1", "v4-8", 4),
        ("v4-64", "v4:2x4x4", "v4-64", 32),
        ("v5p-128", "v5p:4x4x4", "v5p-128", 64),
        ("V5LitePod-16", "v5e:4x4", "v5litepod-16", 16),
        ("v5lite-8", "v5e:2x4", "v5litepod-8", 8),
        (" TPU v6e-256 ", "v6e:16x16", "v6e-256", 256),
        ("TPU7x:2x2x2", "tpu7x:2x2x2", "tpu7x-16", 16),
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


def test_lists():
    assert [t.name for t in parse_slices("v3-8, v5e:4x4,v3:2x2")] == ["v3:2x2", "v5e:4x4"]
    assert [t.accelerator for t in parse_slices("all")] == [f"{c.prefix}-8" for c in CHIPS.values()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "which slice.*v5litepod-1/4/8.*all"),
        ("v3-8,v9-8", "^--tpu=v9-8.*v2-8/32.*v6e-1/4/8.*as a grid, tpu9:2x2x1"),
        ("v5e:4xx4", "v5e:4xx4"),
        ("v3-12", "no such slice of v3.*v3-8, v3-32"),
        *((f"v5e:{grid}", "up to v5e:16x16") for grid in ("2x2x2", "0x4", "16x32")),
        ("v5e:3x4", "no whole slice.*hosts of v5e have 2x2 chips.*or v5e:1x1"),
        ("v4:1x2", "no whole slice.*hosts of v4 have 2x2x1 chips; use multiples of that"),
    ],
)
def test_what_is_no_slice(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_slices(text)
    assert "\n" not in str(caught.value)


def test_the_clock_is_that_at_which_the_matrix_units_reach_the_peak():
    units = {"v2": (2, 128), "v3": (4, 128), "v4": (8, 128), "v5e": (4, 128)}
    units |= {"v5p": (8, 128), "v6e": (4, 256), "tpu7x": (8, 256)}
    assert set(units) == set(CHIPS)
    for name, (count, side) in units.items():
        chip = CHIPS[name]
        assert chip.clock * count * side * side * 2 == pytest.approx(chip.peak, rel=0.01)


@pytest.mark.parametrize(
    ("slice_", "count", "cpus"),
    [
        ("v3-32", 4, 96),
        ("v4-32", 4, 240),
        ("v5e-1", 1, 24),
        ("v5e-8", 1, 224),
        ("v5e-16", 4, 112),
        ("v5p-16", 2, 208),
        ("v6e-16", 4, 180),
        ("tpu7x-16", 2, 224),
    ],
)
def test_the_machines_of_a_slice(slice_, count, cpus):
    (one,) = parse_slices(slice_)
    assert machines(one) == (count, cpus)


@pytest.mark.parametrize(
    ("slices", "options"),
    [
        ("v5e-1,v6e-1,tpu7x:1x1x1", {"chips_per_host_bounds": [1, 1, 1]}),
        ("v5e-8,v6e-8", {"chips_per_host_bounds": [2, 4, 1]}),
        ("v5e-4,v5e-16,v2-8,v3:2x4,v5p-8,tpu7x-8", {}),
        ("v4-8,v4-64", {"chip_config_name": "megacore"}),
    ],
)
def test_what_libtpu_is_told(slices, options):
    assert all(parsed.options == options for parsed in parse_slices(slices))


def test_a_chip_that_only_libtpu_may_know_is_a_grid_without_figures():
    one, two = parse_slices("TPU9i:4x2x1,v5:2x2")
    assert (one.name, one.chips, one.devices) == ("tpu9i:4x2x1", 8, 0)
    assert two.name == "v5:2x2" and two.options == {}
    assert one.chip.missing == ["clock", "peak", "memory", "bandwidth", "price"]
    assert parse_slices(one.name)[0].name == one.name
