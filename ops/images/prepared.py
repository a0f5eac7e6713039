"""Prepares single images for a model, for prediction and export."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from errors import DataError, one_line
from ops.images.input_spec import InputSpec, evaluated
from ops.shards import read_errors, tensorflow


def prepare(encoded: bytes, spec: InputSpec) -> np.ndarray:
    """uint8[size, size, 3], RGB, of a JPEG, PNG, BMP or GIF: the pixels that evaluation reads.

    As in evaluation, an orientation in EXIF is not applied.

    Raises:
      DataError: it is no such image.
    """
    return decoded(_program(spec), functools.partial(evaluated, spec=spec), encoded).numpy()


def decoded(program: Callable[..., Any], plain: Callable[..., Any], *inputs: Any) -> Any:
    """What `program`, the graph of `plain`, makes of an encoded image and further `inputs`.

    Raises:
      DataError: the image cannot be decoded.
    """
    with contextlib.suppress(*read_errors()):
        return program(*inputs)
    try:  # again, because an error of a graph does not begin with its reason
        return plain(*map(tensorflow().constant, inputs))
    except read_errors() as error:
        raise DataError(f"no image that can be decoded: {one_line(error)}") from error


@functools.lru_cache(maxsize=64)
def _program(spec: InputSpec) -> Any:
    """`evaluated` as a graph, which takes half the time."""
    tf = tensorflow()
    signature = [tf.TensorSpec([], tf.string)]
    program = functools.partial(evaluated, spec=spec)
    return tf.function(program, input_signature=signature, autograph=False)  # which takes seconds
