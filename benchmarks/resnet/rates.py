"""How many training images a second of CPU time prepares, for forecasts."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.resnet.settings import Images

# CPU time per training image, fitted to the rows of docs/performance.md at 128, 160 and 224 pixels:
# (for each image, for each of its pixels after resizing).
_MICROSECONDS = {"exact": (1500.0, 0.018), "fast": (1430.0, 0.0077)}
_MICROSECONDS_CACHED = 230.0  # for an image of 256 x 256 pixels in memory


def input_rates(images: Images) -> tuple[Mapping[str, float], ...]:
    """Images per second for each size: see `Hints.input_rates`.

    The figures of docs/performance.md, for JPEGs of 500 x 375 pixels and 110 KB.
    """
    cache = images.decoded_cache or 256
    cached = {f"decoded_cache={cache}": 1e6 / (_MICROSECONDS_CACHED * (cache / 256) ** 2)}
    costs = _MICROSECONDS.items()
    return tuple(
        {mode: 1e6 / (image + pixel * side**2) for mode, (image, pixel) in costs} | cached
        for side in images.sides
    )
