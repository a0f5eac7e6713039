"""Names, writes and lists shards of TFRecords, for the scripts; `shards` reads them for training.

A split is the files `train-00000-of-01024` ... or `validation-00000-of-00128` ...; for detection
`train-00000-of-00256.tfrecord` ... or `val-00000-of-00032.tfrecord` ..., as Google named them; for
translation `translate_packed-train-00000-of-00100` ... and `translate-dev-00000-of-00001`.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import google_crc32c

from common.data import storage
from common.tensorflow import tensorflow

SPLITS = ("train", "validation")
DETECTION_SPLITS = ("train", "val")
DETECTION_SUFFIX = ".tfrecord"
TEXT_SPLITS = ("translate_packed-train", "translate-dev")
_NUMBER = r"-\d{5,}-of-\d{5,}"
_SHARD = (
    rf"(?:validation{_NUMBER}|(?:train|val){_NUMBER}(?:\.tfrecord)?|"
    rf"(?:{'|'.join(TEXT_SPLITS)}){_NUMBER})"
)
_UNFINISHED = r"tmp\..+\.[0-9a-f]{8}"  # of `storage.write`


def shard_name(split: str, i: int, n: int) -> str:
    """The file name of shard i of n, counted from 0, without a suffix: 'train-00000-of-01024'."""
    if split not in (*SPLITS, *DETECTION_SPLITS, *TEXT_SPLITS) or not 0 <= i < n:
        raise ValueError(f"no such shard: {split} {i} of {n}")
    return f"{split}-{i:05d}-of-{n:05d}"


def shard_runs(num_examples: int, num_shards: int) -> list[range]:
    """The examples of each shard, as consecutive runs of which none is empty.

    As in the original ImageNet records, each shard holds ceil(num_examples / num_shards) and the
    last one the rest: 1,023 shards of 1,252 and one of 371. Where this would leave a shard empty,
    the sizes differ by at most 1 instead.
    """
    if not 1 <= num_shards <= num_examples:
        raise ValueError(f"cannot fill {num_shards} shards with {num_examples} examples")
    size = -(-num_examples // num_shards)
    bounds = [min(i * size, num_examples) for i in range(num_shards + 1)]
    if bounds[-2] == num_examples:
        bounds = [i * num_examples // num_shards for i in range(num_shards + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def existing_shards(out: str) -> list[str]:
    """Sorted names of the shards of all splits in a folder, which need not exist."""
    return _matching(out, _SHARD)


def remove_shards(out: str) -> None:
    """Deletes a folder's shards, and the files of interrupted writers."""
    for name in _matching(out, f"{_SHARD}|{_UNFINISHED}"):
        tensorflow().io.gfile.remove(os.path.join(out, name))


def remove_unfinished(out: str) -> None:
    """Deletes the files of interrupted writers in a folder."""
    for name in _matching(out, _UNFINISHED):
        tensorflow().io.gfile.remove(os.path.join(out, name))


def _matching(out: str, pattern: str) -> list[str]:
    return sorted(name for name in storage.list_folder(out) if re.fullmatch(pattern, name))


def read_shard(path: str) -> Iterator[bytes]:
    """The records of a shard; tf.errors.DataLossError where it is damaged or cut short."""
    yield from tensorflow().data.TFRecordDataset(path).as_numpy_iterator()


def write_shard(path: str, examples: Iterable[bytes]) -> dict[str, Any]:
    """Writes one TFRecord file, complete or not at all.

    Returns {"examples": number, "bytes": number, "sha256": in hexadecimal}.
    """
    count = size = 0
    digest = hashlib.sha256()

    def frames() -> Iterator[bytes]:
        nonlocal count, size
        for record in examples:
            data = frame(record)
            digest.update(data)
            count, size = count + 1, size + len(data)
            yield data

    storage.write(path, frames())
    return {"examples": count, "bytes": size, "sha256": digest.hexdigest()}


def frame(record: bytes) -> bytes:
    """A record in the form of a TFRecord file: length, data, and a checksum of each."""
    length = len(record).to_bytes(8, "little")
    return b"".join([length, checksum(length), record, checksum(record)])


def checksum(data: bytes) -> bytes:
    """The 4 bytes that follow data in a TFRecord file: a CRC-32C, rotated and shifted."""
    crc = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
