"""Makes images of handwritten digits over clutter, with masks and in two orientations.

    python -m scripts.prepare digit_masks --out=data/digit_masks

As `digit_scenes`, but two of three images are 128 pixels high and 160 wide and the others 160 high
and 128 wide, and the records have the mask of each digit.
"""

import argparse

from benchmarks.detection.preparation import digit_scenes

WIDE, UPRIGHT = (128, 160), (160, 128)
parse = digit_scenes.parse
KIND = digit_scenes.Kind(
    1,
    (WIDE, WIDE, UPRIGHT),
    {"description": "outlined handwritten digits over clutter", "version": "1", "size": WIDE},
    masks=True,
)


def prepare(args: argparse.Namespace) -> str:
    """Makes the images that are missing, and their records; returns the last line to print."""
    return digit_scenes.prepare(args, KIND)
