"""Says how an encoded image becomes the pixels that a model expects, and prepares single images.

A model scores what it should only with the pixels it was trained for: size, crop, resizing, mean
and channel order differ between libraries. Every checkpoint keeps its `InputSpec`; evaluation,
prediction and export read it. `NAMED` has the specs of other libraries.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from PIL import Image

from common.errors import DataError, one_line, parse_json
from common.images import pixels
from common.tensorflow import read_errors, tensorflow

_PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_LONGEST = 64  # times the shorter side; the ends of a longer image are cut before it is resized
_CROP_PADDING = 1 / 0.875 - 1  # evaluation keeps the central 87.5 % of the shorter side


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """How an image becomes [size, size, 3], and which pixels count as 0 and 1."""

    size: int  # the side of the square that the model takes
    # The shorter side to which the image is resized before its centre is cropped, with
    # torchvision's rounding; 0: `centre_window` is cropped first, then resized to `size`.
    resize: int
    kernel: str  # 'bilinear' or 'bicubic'
    antialias: bool  # resized as Pillow, torchvision and timm do; else as TensorFlow does
    mean: tuple[float, float, float]  # subtracted from the pixels 0..255, in RGB order
    std: tuple[float, float, float]  # the divisor after that, in RGB order
    channels: str = "RGB"  # or 'BGR', the order that the model's first layer expects

    def at(self, size: int) -> Self:
        """The same spec for another size."""
        resize = max(size, round(self.resize * size / self.size)) if self.resize else 0
        return dataclasses.replace(self, size=size, resize=resize)

    def as_dict(self) -> dict[str, Any]:
        """JSON, which `from_dict` reads."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


# (mean, std) of the pixels of ImageNet's training images: of 0..1, and of 0..255.
IMAGENET_UNIT = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
# The spec of the TensorFlow TPU tutorial and of this repository.
TENSORFLOW = InputSpec(224, 0, "bicubic", False, *IMAGENET)
# (mean, std)
_VGG = (123.68, 116.78, 103.94), (1.0, 1.0, 1.0)
_CAFFE = (123.68, 116.779, 103.939), (1.0, 1.0, 1.0)
NAMED = {
    "tensorflow": TENSORFLOW,
    # The first weights of torchvision (76.13 %), and the second ones (80.86 %).
    "torchvision_v1": InputSpec(224, 256, "bilinear", True, *IMAGENET),
    "torchvision_v2": InputSpec(224, 232, "bilinear", True, *IMAGENET),
    # timm's "ResNet strikes back" weights, with crop_pct 0.95; a3 was trained at 160.
    "timm_a1": InputSpec(224, 235, "bicubic", True, *IMAGENET),
    "timm_a3": InputSpec(160, 168, "bicubic", True, *IMAGENET),
    # ResNet-RS at its size of 160: the centre of 160 / (160 + 32) of the shorter side.
    "resnet_rs": InputSpec(160, 192, "bicubic", False, *IMAGENET),
    # The resnet_garden of tensorflow/tpu, from which the Gradient tutorial came.
    "vgg": InputSpec(224, 256, "bilinear", False, *_VGG),
    # keras.applications' "caffe" mode; Keras leaves size and resizing to its user.
    "keras": InputSpec(224, 256, "bilinear", True, *_CAFFE, "BGR"),
}


def parse_spec(text: str) -> InputSpec:
    """The spec of a name in `NAMED`, or of a JSON object as text; DataError if it is neither."""
    if text in NAMED:
        return NAMED[text]
    try:
        values = parse_json(text)
    except ValueError:
        known = ", ".join(map(repr, NAMED))
        raise DataError(f"use one of {known}, or a JSON object") from None
    return from_dict(values)


def from_dict(values: Any) -> InputSpec:
    """Reads and checks what `InputSpec.as_dict` wrote; DataError if a value cannot work."""
    names = [field.name for field in dataclasses.fields(InputSpec)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise DataError(f"an input spec is a JSON object with the keys {', '.join(names)}")
    for name, (is_valid, accepted) in _CHECKS.items():
        if not is_valid(values[name]):
            raise DataError(f"the input spec's {name}={values[name]!r:.80} must be {accepted}")
    size, resize = values["size"], values["resize"]
    if resize and not size <= resize <= 4 * size:
        raise DataError(f"the input spec's resize={resize} must be 0, or {size} to {4 * size}")
    pairs: Any = {name: tuple(map(float, values[name])) for name in ("mean", "std")}
    return InputSpec(**values | pairs)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= 65536


def _are_three(values: Any, least: float) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) == 3
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        and all(least <= v <= 255 for v in values)  # not of NaN
    )


_CHECKS = {  # name: (whether a value can work, what it must be)
    "size": (lambda v: _is_whole(v, 1), "a whole number, 1 to 65536"),
    "resize": (lambda v: _is_whole(v, 0), "a whole number, 0 to 65536"),
    "kernel": (lambda v: v in tuple(_PILLOW), "'bilinear' or 'bicubic'"),
    "antialias": (lambda v: isinstance(v, bool), "true or false"),
    "mean": (lambda v: _are_three(v, 0), "three numbers, 0 to 255"),
    "std": (lambda v: _are_three(v, 1), "three numbers, 1 to 255 (of pixels 0..255, not 0..1)"),
    "channels": (lambda v: v in ("RGB", "BGR"), "'RGB' or 'BGR'"),
}


def evaluated(
    encoded: Any, spec: InputSpec, *, only_jpeg: bool = False, is_portable: bool = False
) -> Any:
    """uint8[size, size, 3], RGB, of an encoded image; both are tensors.

    `only_jpeg` saves the time of finding out the format, where all images are JPEGs.
    `is_portable` leaves Pillow out, so that the graph runs without Python; a few pixels of an
    antialiased image then differ by 1.
    """
    centre = functools.partial(centre_window, size=spec.size)
    if not (spec.resize or spec.antialias):
        image = pixels.decode(encoded, centre, only_jpeg=only_jpeg)
        image = pixels.sample(image, [spec.size, spec.size], spec.kernel)
        return tensorflow().ensure_shape(image, [spec.size, spec.size, 3])
    window = _middle if spec.resize else centre
    image = pixels.decode(encoded, window, only_jpeg=only_jpeg)
    tf = tensorflow()
    shape = _resized(tf.shape(image)[0], tf.shape(image)[1], spec)
    if spec.antialias and is_portable:
        resized = tf.image.resize(image, shape, method=spec.kernel, antialias=True)
        image = tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)
    elif spec.antialias:
        resize = functools.partial(_pillow, kernel=spec.kernel)
        image = tf.numpy_function(resize, [image, shape], tf.uint8)
    else:
        image = pixels.sample(image, shape, spec.kernel)
    top, left = _margin(shape[0] - spec.size), _margin(shape[1] - spec.size)
    image = image[top : top + spec.size, left : left + spec.size]
    return tf.ensure_shape(image, [spec.size, spec.size, 3])


def seen_part(height: int, width: int, spec: InputSpec) -> tuple[float, ...]:
    """(top, left, bottom, right) of what `evaluated` keeps of an image, in pixels of the image."""
    window = _middle if spec.resize else functools.partial(centre_window, size=spec.size)
    y, x, height, width = window(height, width).numpy().tolist()
    resized = _resized(height, width, spec).numpy().tolist()
    top, left = (_margin(side - spec.size) for side in resized)
    down, across = height / resized[0], width / resized[1]  # pixels of the image for one of these
    bottom, right = top + spec.size, left + spec.size
    return y + top * down, x + left * across, y + bottom * down, x + right * across


def centre_window(height: Any, width: Any, size: int) -> Any:
    """int32[4] (y, x, side, side): the centre, size / (size + padding) of the shorter side."""
    tf = tensorflow()
    ratio = size / (size + round(size * _CROP_PADDING))
    side = tf.cast(ratio * tf.cast(tf.minimum(height, width), tf.float32), tf.int32)
    side = tf.maximum(side, 1)  # of an image of one pixel
    return tf.stack([(height - side + 1) // 2, (width - side + 1) // 2, side, side])


def _middle(height: Any, width: Any) -> Any:
    """int32[4] (y, x, height, width): all pixels of an image that is not extremely long."""
    tf = tensorflow()
    most = _LONGEST * tf.minimum(height, width)
    tall, wide = tf.minimum(height, most), tf.minimum(width, most)
    return tf.stack([(height - tall) // 2, (width - wide) // 2, tall, wide])


def _resized(height: Any, width: Any, spec: InputSpec) -> Any:
    """int32[2]: height and width after resizing; the longer side is rounded down, as by torch."""
    tf = tensorflow()
    if not spec.resize:
        return tf.constant([spec.size, spec.size])
    return tf.stack([height, width]) * spec.resize // tf.minimum(height, width)


def _margin(excess: Any) -> Any:
    """Half of the excess, rounded to even where it is odd, as torch's `CenterCrop` does."""
    half = excess // 2
    return half + (excess % 2) * (half % 2)


def _pillow(image: np.ndarray, shape: np.ndarray, kernel: str) -> np.ndarray:
    height, width = map(int, shape)
    return np.asarray(Image.fromarray(image).resize((width, height), _PILLOW[kernel]))


def prepare_image(encoded: bytes, spec: InputSpec) -> np.ndarray:
    """uint8[size, size, 3], RGB, of a JPEG, PNG, BMP or GIF: the pixels that evaluation reads.

    As in evaluation, an orientation in EXIF is not applied. DataError if it is no such image.
    """
    plain = functools.partial(evaluated, spec=spec)
    return run_decoder(_evaluation_graph(spec), plain, encoded).numpy()


def run_decoder(program: Callable[..., Any], plain: Callable[..., Any], *inputs: Any) -> Any:
    """What `program`, the graph of `plain`, makes of an encoded image and further `inputs`.

    DataError if the image cannot be decoded.
    """
    with contextlib.suppress(*read_errors()):
        return program(*inputs)
    try:  # again, because an error of a graph does not begin with its reason
        return plain(*map(tensorflow().constant, inputs))
    except read_errors() as error:
        raise DataError(f"no image that can be decoded: {one_line(error)}") from error


@functools.lru_cache(maxsize=64)
def _evaluation_graph(spec: InputSpec) -> Any:
    """`evaluated` as a graph, which takes half the time."""
    tf = tensorflow()
    signature = [tf.TensorSpec([], tf.string)]
    program = functools.partial(evaluated, spec=spec)
    return tf.function(program, input_signature=signature, autograph=False)  # which takes seconds
