"""Prepares single images for a model, for prediction and export."""

from __future__ import annotations

import contextlib
import functools
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
    with contextlib.suppress(*read_errors()):
        return _program(spec)(encoded).numpy()
    try:  # again, because an error of a graph does not begin with its reason
        return evaluated(tensorflow().constant(encoded), spec).numpy()
    except read_errors() as error:
        raise DataError(f"no image that can be decoded: {one_line(error)}") from error


@functools.lru_cache(maxsize=64)
def _program(spec: InputSpec) -> Any:
    """`evaluated` as a graph, which takes half the time."""
    tf = tensorflow()
    signature = [tf.TensorSpec([], tf.string)]
    program = functools.partial(evaluated, spec=spec)
    return tf.function(program, input_signature=signature, autograph=False)  # which takes seconds
