"""How far measured runs were from such forecasts, by generation of TPU.

The rows are in scripts/bench/measured.json; `python -m scripts.bench.calibrate` makes the forecasts
again and prints the intervals that belong here.
"""

import dataclasses
from typing import Any

from engine.forecast.topology import Chip

DATE = "2026-11-29"
VERSIONS = "jax 0.10.2, libtpu 0.0.42.1"  # that the forecasts were made with


@dataclasses.dataclass(frozen=True)
class Error:
    """The least and the most of measured time / forecast time."""

    least: float
    most: float
    source: str  # where they come from, as a sentence

    def described(self) -> dict[str, Any]:
        """The error with the date and the versions of the forecasts, for JSON."""
        return dataclasses.asdict(self) | {"date": DATE, "forecasts_by": VERSIONS}


_MEASURED = {"v2": (0.97, 1.0), "v3": (0.93, 1.5), "v4": (0.91, 1.5)}
_OTHERS = (0.7, 1.7)


def error(chip: Chip) -> Error:
    """The error of forecasts for a chip."""
    if chip.name not in _MEASURED:
        least, most = _OTHERS
        return Error(least, most, "no public run of this generation: an assumption")
    least, most = _MEASURED[chip.name]
    source = f"measured runs of this generation were {least:.2f} to {most:.2f} of such forecasts"
    return Error(least, most, source)
