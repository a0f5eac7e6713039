"""Decodes and resizes images on the host, with TensorFlow."""

import functools
from collections.abc import Callable
from typing import Any

from common.tensorflow import tensorflow

LARGE = 1 << 20  # pixels: smaller JPEGs gain nothing from `least_side`
# Accurate DCT costs nothing measurable; TensorFlow's default is off by 1.6 levels RMS.
_ACCURATE = "INTEGER_ACCURATE"


def decode(
    encoded: Any,
    window: Callable[[Any, Any], Any] | None = None,
    *,
    only_jpeg: bool = False,
    least_side: Any = None,
) -> Any:
    """uint8[h, w, 3] of a JPEG, PNG, BMP or GIF: its `window(height, width)`, or all pixels.

    `only_jpeg` saves the 33 us that reading the format takes; other formats then raise
    InvalidArgumentError or are decoded nevertheless. With `least_side`, an int or a tensor, the
    window of a JPEG above a megapixel has a half, a quarter or an eighth of its height and width,
    the smallest of them with so many pixels on the shorter side.
    """
    tf = tensorflow()

    def jpeg() -> Any:
        if window is None and least_side is None:
            return tf.io.decode_jpeg(encoded, channels=3, dct_method=_ACCURATE)
        shape = tf.io.extract_jpeg_shape(encoded)  # decoding alone would take a PNG as well
        box = window(shape[0], shape[1]) if window else tf.stack([0, 0, shape[0], shape[1]])
        if least_side is None:
            return _crop(encoded, box)
        return tf.cond(
            shape[0] * shape[1] > LARGE,
            lambda: _reduced(encoded, box, least_side),
            lambda: _crop(encoded, box),
        )

    def other() -> Any:
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        if window is None:
            return image
        y, x, height, width = tf.unstack(window(tf.shape(image)[0], tf.shape(image)[1]))
        return image[y : y + height, x : x + width]

    return jpeg() if only_jpeg else tf.cond(tf.io.is_jpeg(encoded), jpeg, other)


def _crop(encoded: Any, box: Any, divisor: int = 1) -> Any:
    """A window (y, x, height, width) of a JPEG that is decoded at 1/`divisor` of its size."""
    return tensorflow().io.decode_and_crop_jpeg(
        encoded, box, channels=3, ratio=divisor, dct_method=_ACCURATE
    )


def _reduced(encoded: Any, box: Any, least_side: Any) -> Any:
    """A window of a JPEG at 1/8, 1/4, 1/2 or all of its size: the first with `least_side` pixels.

    The decoder scales the DCT, which makes means of pixels, as antialias does. The window's corners
    are rounded to the pixels that are left.
    """
    tf = tensorflow()

    def at(divisor: int) -> Any:
        corners = box[:2], box[:2] + box[2:]
        begin, end = ((corner + divisor // 2) // divisor for corner in corners)
        return _crop(encoded, tf.concat([begin, end - begin], 0), divisor)

    shorter = tf.minimum(box[2], box[3])
    cases = [(shorter >= d * least_side, functools.partial(at, d)) for d in (8, 4, 2)]
    return tf.case(cases, default=lambda: _crop(encoded, box))


def jpegs_first(decode: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Decoders for `decoding.Reader`, which takes all images for JPEGs until one is not."""
    return [functools.partial(decode, only_jpeg=only_jpeg) for only_jpeg in (True, False)]


def sample(image: Any, shape: Any, kernel: str) -> Any:
    """uint8[*shape, 3] of uint8[h, w, 3] with a 'bilinear' or 'bicubic' kernel, no antialias."""
    tf = tensorflow()
    is_bicubic = kernel == "bicubic"
    resize = tf.raw_ops.ResizeBicubic if is_bicubic else tf.raw_ops.ResizeBilinear
    resized = resize(images=image[tf.newaxis], size=shape, half_pixel_centers=True)[0]
    if is_bicubic:  # this kernel overshoots
        resized = tf.clip_by_value(resized, 0, 255)
    return tf.cast(resized + 0.5, tf.uint8)


def shrink(image: Any, size: int) -> Any:
    """uint8[size, size, 3] of uint8[h, w, 3], with a triangle kernel and antialias."""
    tf = tensorflow()
    resized = tf.image.resize(image, [size, size], method="bilinear", antialias=True)
    return tf.ensure_shape(tf.cast(resized + 0.5, tf.uint8), [size, size, 3])
