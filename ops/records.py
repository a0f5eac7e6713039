"""Shards of TFRecords as the scripts write and check them: names, frames, files that are complete.

A split is the files `train-00000-of-01024` ... or `validation-00000-of-00128` ...; `ops.shards`
reads them for training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Protocol

import google_crc32c

from ops import files
from ops.shards import tensorflow

SPLITS = ("train", "validation")
IMAGENET = {"train": 1_281_167, "validation": 50_000}  # images; Russakovsky et al. 2015
_SHARD = r"(train|validation)-\d{5,}-of-\d{5,}"
_UNFINISHED = rf"tmp\.({_SHARD}|manifest\.json)\.[0-9a-f]{{8}}"


@dataclasses.dataclass(frozen=True)
class Written:
    """The content of a file that was just written; `sha256` is in hexadecimal."""

    count: int
    bytes: int
    sha256: str


class Examples(Protocol):
    """Serialized examples: a list, or an object that makes the i-th on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> bytes: ...


def shard_name(split: str, i: int, n: int) -> str:
    """The file name of shard i of n, counted from 0: 'train-00000-of-01024'."""
    if split not in SPLITS or not 0 <= i < n:
        raise ValueError(f"no such shard: {split} {i} of {n}")
    return f"{split}-{i:05d}-of-{n:05d}"


def shard_runs(num_examples: int, num_shards: int) -> list[range]:
    """Which examples each shard holds: consecutive runs, none empty.

    As in the original ImageNet records, each shard holds ceil(num_examples / num_shards) and the
    last one the rest: 1,023 shards of 1,252 and one of 371. With few examples per shard this would
    leave the last shards empty (9 in 8 shards: 2, 2, 2, 2, 1, 0, 0, 0) and a host that gets only
    empty shards with nothing to read. Then the sizes differ by at most 1 instead.

    Raises:
        ValueError: there are fewer examples than shards, or no shard.
    """
    if not 1 <= num_shards <= num_examples:
        raise ValueError(f"cannot fill {num_shards} shards with {num_examples} examples")
    size = -(-num_examples // num_shards)
    if size * (num_shards - 1) < num_examples:
        bounds = [min(i * size, num_examples) for i in range(num_shards + 1)]
    else:
        bounds = [i * num_examples // num_shards for i in range(num_shards + 1)]
    return [range(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def existing_shards(out: str) -> list[str]:
    """Sorted names of the train and validation shards in a folder, which need not exist."""
    return _matching(out, _SHARD)


def remove_shards(out: str) -> None:
    """Deletes a folder's train and validation shards, and the files of interrupted writers."""
    for name in _matching(out, f"{_SHARD}|{_UNFINISHED}"):
        tensorflow().io.gfile.remove(os.path.join(out, name))


def remove_unfinished(out: str) -> None:
    """Deletes the files of interrupted writers in a folder."""
    for name in _matching(out, _UNFINISHED):
        tensorflow().io.gfile.remove(os.path.join(out, name))


def _matching(out: str, pattern: str) -> list[str]:
    return sorted(name for name in list_folder(out) if re.fullmatch(pattern, name))


def list_folder(path: str) -> list[str]:
    """The names in a folder, local or gs://; none if the folder does not exist.

    Raises:
        tf.errors.OpError: the folder may not be listed, or does not answer.
    """
    return tensorflow().io.gfile.listdir(path) if is_folder(path) else []


def is_folder(path: str) -> bool:
    """Whether a folder exists, local or gs://.

    TensorFlow's own isdir also says no to a folder that may not be read or does not answer.

    Raises:
        tf.errors.OpError: the folder may not be read, or does not answer.
    """
    tf = tensorflow()
    try:
        return tf.io.gfile.stat(path).is_directory
    except tf.errors.NotFoundError:
        return False


def stray_files(out: str) -> list[str]:
    """Sorted names of files that are no shards but match readers' train-* and validation-*."""
    return _matching(out, f"(?!{_SHARD}$)(train|validation)-.*")


def read_frames(path: str, seen: Callable[[bytes], object]) -> Iterator[tuple[bytes, str]]:
    """(record, fault) of a TFRecord file in order, with all checksums verified.

    A record with a fault is followed by others if its length is known. `seen` gets every byte
    read, in order.
    """
    gfile = tensorflow().io.gfile
    left = gfile.stat(path).length
    with gfile.GFile(path, "rb") as file:
        while left:
            head = file.read(12)
            seen(head)
            length = int.from_bytes(head[:8], "little")
            if len(head) == 12 and head[8:] != checksum(head[:8]):
                yield b"", "has a wrong length checksum, and nothing behind it can be read"
                return
            if 16 + length > left:
                yield b"", "is cut short"
                return
            body = file.read(length + 4)
            seen(body)
            record, left = body[:-4], left - 16 - length
            yield record, "" if body[-4:] == checksum(record) else "has a wrong checksum"


def read_shard(path: str) -> Iterator[bytes]:
    """The records of a shard; tf.errors.DataLossError where it is damaged or cut short."""
    yield from tensorflow().data.TFRecordDataset(path).as_numpy_iterator()


def write_shards(
    out: str, split: str, examples: Examples, num_shards: int, workers: int = 1
) -> list[str]:
    """Writes a split to a local or gs:// folder; a local one is made if it is missing.

    A shard appears under its name only when it is complete; until then it is a file 'tmp.*' in the
    same folder. Shards of that name are replaced, others are left as they are.

    Args:
        out: the folder.
        split: 'train' or 'validation'.
        examples: the records; with several workers [i] is called from their threads.
        num_shards: see `shard_runs`.
        workers: shards written at a time, each in a thread.

    Returns:
        The paths of the shards.

    Raises:
        ValueError: there are fewer examples than shards.
        tf.errors.OpError: the folder cannot be written.
        Whatever making an example raises; no half-written file is left.
    """
    names = [shard_name(split, i, num_shards) for i in range(num_shards)]
    runs = shard_runs(len(examples), num_shards)
    paths = [os.path.join(out, name) for name in names]
    stop = threading.Event()

    def records(run: range) -> Iterator[bytes]:
        for i in run:
            if stop.is_set():
                raise InterruptedError("another shard failed")
            yield examples[i]

    with futures.ThreadPoolExecutor(workers) as pool:
        tasks = [
            pool.submit(write_shard, path, records(run))
            for path, run in zip(paths, runs, strict=True)
        ]
        try:
            done = futures.wait(tasks, return_when=futures.FIRST_EXCEPTION).done
            for task in done:
                task.result()
        except BaseException:  # Ctrl-C too: the threads must not write on
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return paths


def write_shard(path: str, examples: Iterable[bytes]) -> Written:
    """Writes one TFRecord file, complete or not at all: see `ops.files.write`."""
    count = size = 0
    digest = hashlib.sha256()

    def frames() -> Iterator[bytes]:
        nonlocal count, size
        for record in examples:
            data = frame(record)
            digest.update(data)
            count, size = count + 1, size + len(data)
            yield data

    files.write(path, frames())
    return Written(count, size, digest.hexdigest())


def frame(record: bytes) -> bytes:
    """A record in the form of a TFRecord file: length, data, and a checksum of each."""
    length = len(record).to_bytes(8, "little")
    return b"".join([length, checksum(length), record, checksum(record)])


def checksum(data: bytes) -> bytes:
    """The 4 bytes that follow data in a TFRecord file: a CRC-32C, rotated and shifted."""
    crc = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
