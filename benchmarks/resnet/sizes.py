"""Progressive resizing: the size of training images as a function of the step, small first.

Training on small images first and on large ones at the end reaches nearly the same accuracy in
less time (Howard 2018, fast.ai's DAWNBench entry; Tan and Le 2021, EfficientNetV2,
arXiv:2104.00298). A run compiles its step once for each size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from common.tensorflow import tensorflow


def fix(pairs: Sequence[Sequence[float]]) -> str:
    """What to do about pairs (fraction of the run, pixels) that cannot work; "" if they can."""
    if any(len(pair) != 2 for pair in pairs):
        return "use pairs (fraction, pixels) such as ((0, 128), (0.4, 160), (0.8, 224))"
    fractions, sides = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if fractions and (fractions[0] != 0 or fractions[-1] >= 1):
        return "the fractions begin with 0 and stay below 1"
    if any(later <= one for one, later in itertools.pairwise(fractions)):
        return "each fraction must be larger than the one before"
    if any(side != int(side) or not 1 <= side <= 16384 for side in sides):
        return "pixels are integers, 1 to 16384"
    return ""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sides of the training images in a run of `total` steps."""

    starts: tuple[int, ...]  # the first step of each side, from 0; ascending
    pixels: tuple[int, ...]
    total: int

    @classmethod
    def plan(cls, pairs: Sequence[Sequence[float]], total: int) -> Sizes:
        """Rounds the pairs (fraction of the run, pixels) to steps of a run of `total` steps."""
        starts = tuple(round(fraction * total) for fraction, _ in pairs)
        return cls(starts, tuple(int(side) for _, side in pairs), total)

    def on_host(self, step: Any) -> Any:
        """The side int32[] at a step int64[], tensors of TensorFlow."""
        tf = tensorflow()
        begun = tf.reduce_sum(tf.cast(tf.constant(self.starts, tf.int64) <= step, tf.int32))
        return tf.constant(self.pixels, tf.int32)[begun - 1]

    def steps(self, pixels: int) -> int:
        """How many steps of the run have this side."""
        ends = (*self.starts[1:], self.total)
        stages = zip(self.pixels, self.starts, ends, strict=True)
        return sum(end - start for side, start, end in stages if side == pixels)

    def note(self) -> str:
        """The sizes in words, with steps counted from 1."""
        pairs = zip(self.pixels[1:], self.starts[1:], strict=True)
        later = "".join(f", {side} from step {start + 1:,}" for side, start in pairs)
        return f"training images have {self.pixels[0]} pixels{later}"
