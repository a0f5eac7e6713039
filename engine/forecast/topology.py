"""Describes TPU chips and their speed, slices, hosts, and reads the names that users give slices.

Peak, memory and bandwidth: Google's Cloud TPU system architecture pages, per chip. Clock: the
one at which the chip's matrix units reach that peak (v2 2, v3 4, v4 8, v5e 4 and v5p 8 units of
128x128, v6e 4 and tpu7x 8 of 256x256, two FLOPs per multiplier and cycle). Price: Google's list
price on demand in the United States, as of 2025 as far as we know; not verified. The price of tpu7x
is missing: no page of Google's that we could read in November 2026 had it.

Links: of v5e, v5p, v6e and tpu7x, Google's pages (what all links of a chip carry both ways,
divided by twice their number); of v4, the table in the chapter "TPUs" of the scaling book
(jax-ml.github.io/scaling-book), 10 % less than Jouppi et al. 2023; of v2 and v3, Jouppi et al. 2020
(496 and 656 Gbit/s), not verified: the book has 100 GB/s for v3.

vCPUs by machine: Google's pages "Plan TPUs in GKE" and "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x"
of Cloud TPU's documentation; the numbers of v2, v3 and v4 are not verified.
"""

import dataclasses
import math
import re
from typing import Any

from common.errors import ConfigError

# Of the compiler's cycles, for products. No run of v5e, v5p, v6e and tpu7x is public: as v4.
_SHARES = {"v2": 1.0, "v3": 0.97, "v4": 0.66}
_SHARE_OF_OTHERS = 0.66
# Of the published bandwidth, where memory is the limit. An assumption.
_REACHED = 0.95
# Of the compiler's cycles, for work on elements: cores issued 0.04 to 0.45 times as many bundles
# of instructions in six small programs for v2 to v5p.
_ISSUED = 0.25


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of TPU chip."""

    name: str  # the generation, "v5e"
    prefix: str  # what its accelerator types begin with, "v5litepod"
    counts_cores: bool  # whether the number in an accelerator type counts cores, two per chip
    dimensions: int  # of the torus that slices are cut from
    devices: int  # that jax shows per chip
    clock: float  # of the cores, Hz
    peak: float  # bfloat16 FLOP/s per chip (peak FLOPs)
    memory: float  # HBM size, bytes per chip; the compiler says whether a step fits
    bandwidth: float  # of the HBM, bytes/s per chip
    link: float  # bytes/s of one link to a neighbouring chip, in one direction
    price: float  # US dollars per hour and chip; nan where it is not known
    sizes: tuple[int, ...]  # the numbers in its accelerator types
    doubled: tuple[str, ...] = ()  # types of arrays of whose products it does twice as many

    def operation_seconds(self, flops: float, moved: float, cycles: float) -> float:
        """The seconds of one run of an operation on one device; `flops` are those of bfloat16.

        The compiler's cycles serve it to choose between layouts and windows. They are no
        measurement: for work on elements they price the HBM at about 270 bytes (bfloat16) or 435
        bytes (float32) per cycle and core on v2, v3 and v4 alike, while the published bandwidth is
        500, 479 and 571. docs/check.md has the comparison. So an operation without a convolution or
        matrix product takes its bytes, at `_REACHED` of the bandwidth; another one the cycles,
        times a share by generation that was fitted to measured runs, and at least its FLOPs at the
        peak and its bytes at the bandwidth.
        """
        compute, memory = self.limits(flops, moved)
        estimate = cycles / self.clock
        if flops:
            return max(compute, memory, _SHARES.get(self.name, _SHARE_OF_OTHERS) * estimate)
        return max(memory / _REACHED, _ISSUED * estimate)

    def limits(self, flops: float, moved: float) -> tuple[float, float]:
        """(seconds that so many FLOPs need at the peak of a device, that so many bytes need)."""
        return flops * self.devices / self.peak, moved * self.devices / self.bandwidth


_POD = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_LITE = (1, 4, 8, 16, 32, 64, 128, 256)
_GIB = 2.0**30
_INTEGERS = ("s8", "u8")
# fmt: off
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", "v2", True, 2, 2, 0.70e9, 46e12, 16 * _GIB, 0.70e12, 62e9, 1.125,
             (8, 32, 128, 256, 512)),
        Chip("v3", "v3", True, 2, 2, 0.94e9, 123e12, 32 * _GIB, 0.90e12, 82e9, 2.00,
             (8, *_POD[2:9])),
        Chip("v4", "v4", True, 3, 1, 1.05e9, 275e12, 32 * _GIB, 1.20e12, 45e9, 3.22, _POD),
        Chip("v5e", "v5litepod", False, 2, 1, 1.50e9, 197e12, 16 * _GIB, 0.82e12, 50e9, 1.20,
             _LITE, _INTEGERS),
        Chip("v5p", "v5p", True, 3, 1, 1.75e9, 459e12, 95 * _GIB, 2.77e12, 100e9, 4.20, _POD,
             _INTEGERS),
        Chip("v6e", "v6e", False, 2, 1, 1.75e9, 918e12, 32 * _GIB, 1.64e12, 100e9, 2.70, _LITE,
             _INTEGERS),
        Chip("tpu7x", "tpu7x", True, 3, 2, 2.20e9, 2307e12, 192 * _GIB, 7.38e12, 100e9, math.nan,
             _POD, ("f8",)),
    )
}
# fmt: on
# What jax calls the chips.
_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x"}
_SPELLING = re.compile(
    r"(tpu\d+[a-z]*|(?:tpu[- ]?)?v\d+[a-z]*)(?:-(\d{1,6})|:(\d{1,4}x\d{1,4}(?:x\d{1,4})?))"
)
_HOST = (2, 2, 1)  # the chips of a host, but of slices of one chip and of v5e's and v6e's 2x4
# vCPUs of a machine by its number of chips. A slice of another number has machines of 4 chips.
_MACHINES = {
    "v2": {4: 96},
    "v3": {4: 96},
    "v4": {4: 240},
    "v5e": {1: 24, 4: 112, 8: 224},
    "v5p": {4: 208},
    "v6e": {1: 44, 4: 180, 8: 180},
    "tpu7x": {4: 224},
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: chips of one kind in a grid."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """Number of devices that jax shows."""
        return self.chips * self.chip.devices

    @property
    def name(self) -> str:
        """The slice as libtpu calls it: "v5e:4x4"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def accelerator(self) -> str:
        """The accelerator type of the slice: "v5litepod-16"."""
        return f"{self.chip.prefix}-{self.chips * (2 if self.chip.counts_cores else 1)}"

    @property
    def options(self) -> dict[str, Any]:
        """The options with which libtpu describes this slice as the cloud provides it."""
        options: dict[str, Any] = {}
        if self.chip.name == "v4":
            options["chip_config_name"] = "megacore"  # its two cores are one device
        if self.chip.sizes == _LITE and self.shape in ((1, 1), (2, 4)):  # one host
            options["chips_per_host_bounds"] = [*self.shape, 1]
        if self.chip.name == "tpu7x" and self.chips == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
        return options


def machines(topology: Topology) -> tuple[int, int]:
    """(hosts of a slice, vCPUs of each host)."""
    sizes = _MACHINES[topology.chip.name]
    chips = topology.chips if topology.chips in sizes else 4
    return -(-topology.chips // chips), sizes[chips]


def of_kind(device_kind: str) -> Chip | None:
    """The chip that jax calls `device_kind`, "TPU v5 lite"; None if it is not known."""
    return CHIPS.get(_KINDS.get(device_kind, ""))


def known() -> str:
    """All slices by their accelerator types, in one line."""
    return "; ".join(f"{chip.prefix}-{'/'.join(map(str, chip.sizes))}" for chip in CHIPS.values())


def parse_slices(text: str) -> list[Topology]:
    """Reads a comma list of slices, or "all": the slice of type -8 of every chip.

    A slice is libtpu's name ("v5e:4x4", "v4:2x2x2") or the cloud's ("v5litepod-16", "v5e-16",
    "v3-32"), in which v2, v3, v4, v5p and tpu7x count cores, two per chip, and v5e and v6e chips.
    """
    if text.strip().lower() == "all":
        return [_sized(chip, 8) for chip in CHIPS.values()]
    slices = [_one(part.strip()) for part in text.split(",") if part.strip()]
    if not slices:
        raise ConfigError(f"--tpu={text}: which slice? Known are {known()}, or all")
    return list(dict.fromkeys(slices))


def _one(text: str) -> Topology:
    flag_text = f"--tpu={text}"
    match = _SPELLING.fullmatch(text.lower())
    name = re.sub("^tpu[- ]?(?=v)", "", match[1]) if match else ""
    chip = CHIPS.get(_ALIASES.get(name, name))
    if match is None or chip is None:
        raise ConfigError(
            f"{flag_text} is not a slice that is known: write v5e:4x4 or one of {known()}; several "
            "with commas, or all"
        )
    if match[2]:
        if int(match[2]) not in chip.sizes:
            sizes = ", ".join(f"{chip.prefix}-{size}" for size in chip.sizes)
            raise ConfigError(f"{flag_text}: there is no such slice of {chip.name}; use {sizes}")
        return _sized(chip, int(match[2]))
    return _grid(chip, flag_text, tuple(map(int, match[3].split("x"))))


def _grid(chip: Chip, flag_text: str, shape: tuple[int, ...]) -> Topology:
    """The slice of a known chip with this shape; `flag_text` is the user's flag."""
    topology = Topology(chip, shape + (1,) * (chip.dimensions - len(shape)))
    largest = _sized(chip, chip.sizes[-1])
    if len(shape) > chip.dimensions or not 1 <= topology.chips <= largest.chips:
        raise ConfigError(f"{flag_text}: slices of {chip.name} are grids up to {largest.name}")
    alone = chip.sizes == _LITE or chip.name == "tpu7x"
    if any(side % chips for side, chips in zip(topology.shape, _HOST, strict=False)) and not (
        alone and topology.chips == 1
    ):
        host = "x".join(map(str, _HOST[: chip.dimensions]))
        also = f", or {chip.name}:{'x'.join('1' * chip.dimensions)}" if alone else ""
        raise ConfigError(
            f"{flag_text} is not a complete slice: hosts of {chip.name} have {host} chips; use "
            f"multiples of that{also}"
        )
    return topology


def _sized(chip: Chip, size: int) -> Topology:
    """The slice of an accelerator type: a grid with sides as equal as powers of two can be."""
    power = (size // (2 if chip.counts_cores else 1)).bit_length() - 1
    if chip.dimensions == 3 and power == 2:
        return Topology(chip, (2, 2, 1))  # one host
    sides = [(power + i) // chip.dimensions for i in range(chip.dimensions)]
    return Topology(chip, tuple(2**side for side in sides))
