"""Says how an encoded image becomes the pixels that a model expects.

A model scores what it should only with the pixels it was trained for: size, crop, resizing, mean
and channel order differ between libraries. Every checkpoint keeps its `InputSpec`; evaluation,
prediction and export read it. `ops.images.libraries` has the specs of other libraries.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from ops.images import pixels
from ops.shards import tensorflow

_CROP_PADDING = 1 / 0.875 - 1  # evaluation keeps the central 87.5 % of the shorter side


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """How an image becomes [size, size, 3], and which pixels count as 0 and 1.

    Attributes:
      size: the side of the square that the model takes.
      resize: the shorter side to which the image is resized before its centre is cropped, with
        torchvision's rounding; 0: `centre_window` is cropped first, then resized to `size`.
      kernel: 'bilinear' or 'bicubic'.
      antialias: True: resized as Pillow, torchvision and timm do; False: as TensorFlow does.
      mean: subtracted from the pixels 0..255, in RGB order.
      std: the divisor after that, in RGB order.
      channels: 'RGB' or 'BGR', the order that the model's first layer expects.
    """

    size: int
    resize: int
    kernel: str
    antialias: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    channels: str = "RGB"

    def at(self, size: int) -> InputSpec:
        """The same recipe for another size."""
        resize = max(size, round(self.resize * size / self.size)) if self.resize else 0
        return dataclasses.replace(self, size=size, resize=resize)

    def as_dict(self) -> dict[str, Any]:
        """JSON, which `ops.images.libraries.from_dict` reads."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


# (mean, std) of ImageNet's training images.
IMAGENET = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
# The TensorFlow TPU tutorial's, and this repository's own.
TENSORFLOW = InputSpec(224, 0, "bicubic", False, *IMAGENET)


def parse(text: str) -> InputSpec:
    """The spec of a name in `libraries.NAMED`, or of a JSON object as text.

    Raises:
      DataError: it is neither, or a value cannot work.
    """
    if text == "tensorflow":
        return TENSORFLOW
    from ops.images import libraries

    return libraries.parse(text)


def evaluated(
    encoded: Any, spec: InputSpec, *, only_jpeg: bool = False, is_portable: bool = False
) -> Any:
    """uint8[size, size, 3], RGB, of an encoded image; both are tensors. See `pixels.decode`.

    `is_portable` leaves Pillow out, so that the graph runs without Python; a few pixels of an
    antialiased image then differ by 1.
    """
    if spec.resize or spec.antialias:
        from ops.images import libraries

        return libraries.evaluated(encoded, spec, only_jpeg, is_portable)
    window = functools.partial(centre_window, size=spec.size)
    image = pixels.decode(encoded, window, only_jpeg=only_jpeg)
    image = pixels.sample(image, [spec.size, spec.size], spec.kernel)
    return tensorflow().ensure_shape(image, [spec.size, spec.size, 3])


def centre_window(height: Any, width: Any, size: int) -> Any:
    """int32[4] (y, x, side, side): the centre, size / (size + padding) of the shorter side."""
    tf = tensorflow()
    ratio = size / (size + round(size * _CROP_PADDING))
    side = tf.cast(ratio * tf.cast(tf.minimum(height, width), tf.float32), tf.int32)
    side = tf.maximum(side, 1)  # of an image of one pixel
    return tf.stack([(height - side + 1) // 2, (width - side + 1) // 2, side, side])
