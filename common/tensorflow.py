"""TensorFlow, which only reads and decodes data here: imported when it is needed first."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

from common.errors import DataError


@functools.cache
def tensorflow() -> Any:
    """Imports TensorFlow, which only reads data here, and keeps it off every accelerator."""
    try:
        with _without_keras():
            import tensorflow as tf
    except ImportError as error:
        raise DataError(
            f"reading records needs TensorFlow ({error}): pip install -r requirements.txt"
        ) from error
    for device in ("GPU", "TPU"):
        tf.config.set_visible_devices([], device)
    return tf


@contextlib.contextmanager
def _without_keras() -> Iterator[None]:
    """Keeps the import of TensorFlow from importing Keras, which takes 4 of 9 s of CPU time.

    TensorFlow looks for an older Keras instead, which is not installed. `tf.keras` is Keras as
    usual when it is used later.
    """
    name = "TF_USE_LEGACY_KERAS"
    is_free = name not in os.environ
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if is_free:
            del os.environ[name]


def read_errors() -> tuple[type[Exception], ...]:
    """The errors of damaged records; UnicodeDecodeError where TensorFlow's message quotes bytes."""
    return tensorflow().errors.OpError, UnicodeDecodeError
