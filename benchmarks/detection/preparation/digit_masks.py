"""Makes images of handwritten digits over clutter, with masks and in two orientations.

    python -m scripts.prepare digit_masks --out=data/digit_masks

As `digit_scenes`, but two of three images are 128 pixels high and 160 wide and the
others 160 high and 128 wide, and the records have the mask of each digit.
"""

import functools

from benchmarks.detection.preparation import digit_scenes
from ops.preparation import writing

WIDE, UPRIGHT = (128, 160), (160, 128)
KIND = digit_scenes.Kind(
    "make_digit_masks",
    1,
    (WIDE, WIDE, UPRIGHT),
    {"description": "outlined handwritten digits over clutter", "version": "1", "size": WIDE},
    masks=True,
)


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    what = f"{sum(digit_scenes.COUNTS.values()):,} images of digits into {{out}}, about 40 s"
    make = functools.partial(digit_scenes.make, kind=KIND)
    writing.maker(KIND.program, __doc__, what, make, argv)
