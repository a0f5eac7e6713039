"""The model of a chip: how long an operation takes, from its FLOPs, bytes and cycles.

The compiler's cycles serve it to choose between layouts and windows. They are no measurement: for
work on elements they price the HBM at about 270 bytes (bfloat16) or 435 bytes (float32) per cycle
and core on v2, v3 and v4 alike, while the published bandwidth is 500, 479 and 571. docs/check.md
has the comparison. So the model takes

* for operations without a convolution or matrix product the bytes, at `_REACHED` of the bandwidth;
* for the others the cycles, times a share by generation that was fitted to measured runs, and at
  least their FLOPs at the peak and their bytes at the bandwidth.
"""

from engine.forecast.topology import Chip

# Of the compiler's cycles, for products. No run of v5e, v5p, v6e and tpu7x is public: as v4.
_SHARES = {"v2": 1.0, "v3": 0.97, "v4": 0.66}
_SHARE_OF_OTHERS = 0.66
# Of the published bandwidth, where memory is the limit. An assumption.
_REACHED = 0.95
# Of the compiler's cycles, for work on elements: cores issued 0.04 to 0.45 times as many bundles
# of instructions in six small programs for v2 to v5p.
_ISSUED = 0.25


def operation_seconds(chip: Chip, flops: float, moved: float, cycles: float) -> float:
    """The seconds of one run of an operation on one device; `flops` are those of bfloat16."""
    compute, memory = limits(chip, flops, moved)
    estimate = cycles / chip.clock
    if flops:
        return max(compute, memory, _SHARES.get(chip.name, _SHARE_OF_OTHERS) * estimate)
    return max(memory / _REACHED, _ISSUED * estimate)


def limits(chip: Chip, flops: float, moved: float) -> tuple[float, float]:
    """(seconds that so many FLOPs need at the peak of a device, that so many bytes need)."""
    return flops * chip.devices / chip.peak, moved * chip.devices / chip.bandwidth
