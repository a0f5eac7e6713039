"""Whole files, local or gs://: those that match a pattern, their sizes, reading, writing."""

import concurrent.futures
import contextlib
import glob
import os
import re
import uuid
from collections.abc import Iterable, Sequence

from common.errors import DataError, one_line
from common.tensorflow import tensorflow


def matching_paths(pattern: str, folder: str = "") -> list[str]:
    """The paths that match a pattern; its `existing_prefix` is taken literally."""
    prefix = existing_prefix(pattern, folder)
    escaped = re.sub(r"[\\*?\[]", r"\\\g<0>", prefix)
    return tensorflow().io.gfile.glob(escaped + pattern[len(prefix) :])


def existing_prefix(pattern: str, folder: str = "") -> str:
    """The longest part from a pattern's start that exists as a path; at least `folder`."""
    exists = tensorflow().io.gfile.exists if "://" in pattern else os.path.lexists
    prefix = pattern
    while glob.has_magic(prefix[len(folder) :]) and not exists(prefix):
        prefix = prefix.rpartition("/")[0]
    return prefix


def sizes(paths: Sequence[str]) -> list[int]:
    """The bytes in each file; DataError if a file is missing or may not be read."""
    tf = tensorflow()

    def size(path: str) -> int:
        try:
            return int(tf.io.gfile.stat(path).length)
        except tf.errors.OpError as error:
            raise DataError(f"cannot read {path}: {one_line(error)}") from error

    with concurrent.futures.ThreadPoolExecutor(16) as pool:  # a stat on gs:// takes 20 to 100 ms
        return list(pool.map(size, paths))


def write(path: str, parts: Iterable[bytes]) -> None:
    """Writes or replaces a local or gs:// file, completely or not at all; makes its folder."""
    gfile = tensorflow().io.gfile
    folder, name = os.path.split(path)
    if "://" not in path:  # object stores have no folders, and a missing bucket would hang makedirs
        gfile.makedirs(folder or ".")
    # A name for each writer, which the readers' patterns train-* and validation-* do not match.
    temporary = os.path.join(folder, f"tmp.{name}.{uuid.uuid4().hex[:8]}")
    try:
        with gfile.GFile(temporary, "wb") as file:
            file.write(b"")  # makes the file, even without parts
            for part in parts:
                file.write(part)
        gfile.rename(temporary, path, overwrite=True)
    except BaseException:
        with contextlib.suppress(tensorflow().errors.OpError):  # the first error is raised
            if gfile.exists(temporary):
                gfile.remove(temporary)
        raise


def read(path: str) -> bytes | None:
    """The content of a local or gs:// file; None if it does not exist."""
    tf = tensorflow()
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            return file.read()
    except tf.errors.NotFoundError:
        return None


def list_folder(path: str) -> list[str]:
    """The names in a folder, local or gs://; none if it does not exist."""
    return tensorflow().io.gfile.listdir(path) if is_folder(path) else []


def is_folder(path: str) -> bool:
    """Whether a folder exists, local or gs://.

    tf.errors.OpError if it may not be read, or does not answer; TensorFlow's own isdir returns
    False there.
    """
    tf = tensorflow()
    try:
        return tf.io.gfile.stat(path).is_directory
    except tf.errors.NotFoundError:
        return False
