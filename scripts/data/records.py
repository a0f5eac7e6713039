"""The ImageNet TFRecord schema of the TPU tutorials, and complete-or-absent shards of it.

One file per shard, `train-00000-of-01024` or `validation-00000-of-00128`; one `tf.train.Example`
per image. Labels are 1-based: 0 is left to a background class, and readers subtract 1.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import struct
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, Protocol

import google_crc32c

SPLITS = ("train", "validation")
_SHARD = r"(train|validation)-\d{5,}-of-\d{5,}"
_UNFINISHED = rf"tmp\.({_SHARD}|manifest\.json)\.[0-9a-f]{{8}}"


@dataclasses.dataclass(frozen=True)
class Written:
    """What a file holds that was just written: `sha256` in hexadecimal."""

    count: int
    bytes: int
    sha256: str


class Examples(Protocol):
    """Serialized examples: a list, or anything that makes the i-th when asked for it."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> bytes: ...


def tensorflow() -> Any:
    """TensorFlow, imported at first use: that takes up to 10 seconds."""
    import tensorflow

    return tensorflow


def tensorflow_defaults(block_mb: int = 64, log_level: int = 1) -> None:
    """Sets what TensorFlow reads at its import and the environment leaves open.

    For command lines, before the import.

    Args:
        block_mb: what one request reads of a gs:// file, in MiB; every open file buffers as much.
        log_level: 1 hides TensorFlow's notes about this processor, 3 the decoders' own lines too.
    """
    defaults = {
        "TF_CPP_MIN_LOG_LEVEL": log_level,
        "TF_ENABLE_ONEDNN_OPTS": 0,  # its note knows no level
        "GCS_READ_CACHE_BLOCK_SIZE_MB": block_mb,
        # Seconds without a byte until a request is tried again, ten times before it is an error.
        "GCS_REQUEST_IDLE_TIMEOUT_SECS": 30,
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, str(value))


def example(
    encoded: bytes,
    label: int,
    synset: str,
    filename: str,
    height: int,
    width: int,
    text: str = "",
) -> bytes:
    """One image as a serialized tf.train.Example; the same arguments give the same bytes.

    Args:
        encoded: an RGB image as JPEG.
        label: 1 for the first class.
        synset: the class's WordNet id, 'n01440764', or another short name of the class.
        filename: of the original image, without folders.
        height: in pixels, and so width.
        text: the class in words; '' leaves the key image/class/text out.

    Raises:
        ValueError: the label is below 1, or the image is no JPEG.
    """
    if label < 1:
        raise ValueError(f"labels start at 1, got {label} ({filename})")
    if not encoded.startswith(b"\xff\xd8"):
        raise ValueError(f"not a JPEG: {filename}")
    train = tensorflow().train

    def ints(value: int):
        return train.Feature(int64_list=train.Int64List(value=[value]))

    def string(value: bytes):
        return train.Feature(bytes_list=train.BytesList(value=[value]))

    feature = {
        "image/height": ints(height),
        "image/width": ints(width),
        "image/colorspace": string(b"RGB"),
        "image/channels": ints(3),
        "image/class/label": ints(label),
        "image/class/synset": string(synset.encode()),
        "image/format": string(b"JPEG"),
        "image/filename": string(filename.encode()),
        "image/encoded": string(encoded),
    }
    if text:
        feature["image/class/text"] = string(text.encode())
    message = train.Example(features=train.Features(feature=feature))
    return message.SerializeToString(deterministic=True)  # else the order of the keys is free


def shard_name(split: str, i: int, n: int) -> str:
    """The file name of shard i of n, counted from 0: 'train-00000-of-01024'."""
    if split not in SPLITS or not 0 <= i < n:
        raise ValueError(f"no such shard: {split} {i} of {n}")
    return f"{split}-{i:05d}-of-{n:05d}"


def shard_runs(num_examples: int, num_shards: int) -> list[range]:
    """Which examples each shard holds: consecutive runs, none empty.

    Like the original, ceil(num_examples / num_shards) in each and the rest in the last: 1,023
    shards of 1,252 and one of 371 for ImageNet. With few examples per shard that leaves the last
    shards empty (9 in 8 shards: 2, 2, 2, 2, 1, 0, 0, 0), and a host that is dealt only those
    would have nothing to read; then the examples are spread evenly instead: sizes differ by 1.

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
    """Deletes the train and validation shards in a folder, and what stopped writers left there."""
    for name in _matching(out, f"{_SHARD}|{_UNFINISHED}"):
        tensorflow().io.gfile.remove(os.path.join(out, name))


def remove_unfinished(out: str) -> None:
    """Deletes what stopped writers left in a folder."""
    for name in _matching(out, _UNFINISHED):
        tensorflow().io.gfile.remove(os.path.join(out, name))


def _matching(out: str, pattern: str) -> list[str]:
    return sorted(name for name in list_folder(out) if re.fullmatch(pattern, name))


def list_folder(path: str) -> list[str]:
    """The names in a folder, local or gs://; none if it is not there.

    Raises:
        tf.errors.OpError: it may not be listed, or does not answer.
    """
    return tensorflow().io.gfile.listdir(path) if is_folder(path) else []


def is_folder(path: str) -> bool:
    """Whether there is such a folder, local or gs://.

    TensorFlow's own isdir says no, too, of a folder that may not be read or does not answer.

    Raises:
        tf.errors.OpError: it may not be read, or does not answer.
    """
    tf = tensorflow()
    try:
        return tf.io.gfile.stat(path).is_directory
    except tf.errors.NotFoundError:
        return False


def stray_files(out: str) -> list[str]:
    """Sorted names of the files that readers' patterns train-* and validation-* would match,
    though they are no shards."""
    return [name for name in _matching(out, "(train|validation)-.*") if not is_shard(name)]


def is_shard(name: str) -> bool:
    """Whether a file's name is that of a shard."""
    return bool(re.fullmatch(_SHARD, name))


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
            if len(head) < 12:
                yield b"", "is cut short"
                return
            length, crc = struct.unpack("<QI", head)
            if crc != masked_crc(head[:8]):
                yield b"", "has a wrong length checksum, and nothing behind it can be read"
                return
            if 16 + length > left:
                yield b"", "is cut short"
                return
            body = file.read(length + 4)
            seen(body)
            record, left = body[:-4], left - 16 - length
            fine = body[-4:] == struct.pack("<I", masked_crc(record))
            yield record, "" if fine else "has a wrong checksum"


def read_shard(path: str) -> Iterator[bytes]:
    """The records of a shard; tf.errors.DataLossError where it is damaged or cut short."""
    yield from tensorflow().data.TFRecordDataset(path).as_numpy_iterator()


def write_shards(
    out: str, split: str, examples: Examples, num_shards: int, workers: int = 1
) -> list[str]:
    """Writes a split to a local or gs:// folder, which is made if need be.

    A shard appears under its name when it is complete, never before; until then it is a file
    'tmp.*' beside it. Shards of that name are replaced, others are left as they are.

    Args:
        out: the folder.
        split: 'train' or 'validation'.
        examples: each what `example` gives; with several workers [i] is called from their threads.
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
    if "://" not in out:  # object stores have no folders, and a missing bucket would hang makedirs
        tensorflow().io.gfile.makedirs(out)
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
    """Writes one TFRecord file, which appears under its name when it is complete.

    Whatever making an example raises leaves no file; a file of that name is replaced.
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

    write_file(path, frames())
    return Written(count, size, digest.hexdigest())


def write_file(path: str, parts: Iterable[bytes]) -> None:
    """Writes a local or gs:// file, complete or not at all; one of that name is replaced."""
    gfile = tensorflow().io.gfile
    folder, name = os.path.split(path)
    # Its own name for each writer, and one that readers' train-* and validation-* do not match.
    temporary = os.path.join(folder, f"tmp.{name}.{uuid.uuid4().hex[:8]}")
    try:
        with gfile.GFile(temporary, "wb") as file:
            file.write(b"")  # opens it: a file without parts must come to be, too
            for part in parts:
                file.write(part)
        gfile.rename(temporary, path, overwrite=True)
    except BaseException:
        with contextlib.suppress(tensorflow().errors.OpError):  # the first error is told
            if gfile.exists(temporary):
                gfile.remove(temporary)
        raise


def frame(record: bytes) -> bytes:
    """A record as it lies in a TFRecord file: length, data, and a masked CRC-32C of each."""
    length = struct.pack("<Q", len(record))
    return b"".join(
        (
            length,
            struct.pack("<I", masked_crc(length)),
            record,
            struct.pack("<I", masked_crc(record)),
        )
    )


def masked_crc(data: bytes) -> int:
    """The checksum of TFRecord files, 32 bits: a CRC-32C, rotated and shifted."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
