"""How far measured runs were from such forecasts, by generation of TPU.

The runs are in scripts/bench/measured.json; `python -m scripts.bench.calibrate` compiles their
programs and prints the intervals that belong here.
"""

import dataclasses
from typing import Any

from engine.forecast.topology import Chip

DATE = "2026-11-29"
VERSIONS = "jax 0.10.2, libtpu 0.0.42.1"  # that the forecasts were made with

# The least and the most of measured / forecast: of runs of the same program as far as is known, and
# of all runs. v2 has one run alone.
INTERVALS = {"v2 and v3": ((0.97, 1.08), (0.94, 1.40)), "v4": ((0.92, 1.16), (0.86, 1.47))}
# The most of measured / forecast of operations without cycles: of a top-k and of a gather of single
# numbers, both on v6e (docs/check.md). No scatter was measured; its copies wait as a gather's do.
SLOWEST = {"sort": 1.4, "gather": 4.0, "scatter": 4.0}
_WIDER = 1.2  # for a generation without a run, on both sides of all others: an assumption


@dataclasses.dataclass(frozen=True)
class Error:
    """The least and the most of measured time / forecast time."""

    least: float
    most: float
    source: str  # where they come from, as a sentence

    def of_time(self, value: float) -> tuple[float, float]:
        """The interval of a number that grows with the time, such as dollars."""
        return self.least * value, self.most * value

    def of_rate(self, value: float) -> tuple[float, float]:
        """The interval of a number that falls with the time, such as examples per second."""
        return value / self.most, value / self.least

    def described(self) -> dict[str, Any]:
        """The error with the date and the versions of the forecasts, for JSON."""
        return dataclasses.asdict(self) | {"date": DATE, "forecasts_by": VERSIONS}


def error(chip: Chip) -> Error:
    """The error of forecasts for a chip."""
    for which, ((least, most), (least_of_all, most_of_all)) in INTERVALS.items():
        if chip.name in which:
            source = (
                f"measured runs of {which} were {least:.2f} to {most:.2f} of such forecasts, "
                f"other programs {least_of_all:.2f} to {most_of_all:.2f}"
            )
            return Error(least, most, source)
    least = min(all_[0] for _, all_ in INTERVALS.values()) / _WIDER
    most = max(all_[1] for _, all_ in INTERVALS.values()) * _WIDER
    source = f"no public run of {chip.name}; the widest range of v2 to v4, wider by a fifth"
    return Error(least, most, source)
