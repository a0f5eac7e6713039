"""Makes the shards of packed pairs in processes; the pairs wait in local files, one per shard.

The processes do not import TensorFlow; the main process writes their results to the output.
"""

import dataclasses
import hashlib
import multiprocessing
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import process
from typing import Any

import numpy as np

from benchmarks.translation.preparation import packing
from benchmarks.translation.vocabulary import EOS, Vocabulary, load_vocabulary
from common.data import records
from common.data.order import hash64
from common.errors import UserError

OPEN_ROWS = 512
_BUFFERED = 32 << 20  # bytes of pairs in memory before they go to the files
_HEAD = struct.Struct("<II")
_vocabularies: dict[str, Vocabulary] = {}  # of this process, by path


@dataclasses.dataclass(frozen=True)
class Job:
    """One shard to make.

    Attributes:
        pairs: the local file with its pairs.
        vocabulary: local path; "" if the pairs are ids already.
        length: positions of a row.
        max_tokens: pairs with more on a side are left out, EOS included.
        seed: of the order.
        number: of the shard.
    """

    pairs: str
    vocabulary: str
    length: int
    max_tokens: int
    seed: int
    number: int

    @property
    def records(self) -> str:
        """The local file that takes the records."""
        return f"{self.pairs}.records"


class Spool:
    """Deals pairs to local files, one for each shard, so that the shards are equally large.

    Of each `shards` consecutive pairs every shard gets one, in an order drawn from the seed.
    """

    def __init__(self, folder: str, shards: int, seed: int, wanted: Iterable[int]):
        """wanted: the numbers of the shards whose pairs are needed."""
        self._folder, self._shards, self._seed = folder, shards, seed
        self._parts: dict[int, list[bytes]] = {number: [] for number in wanted}
        self._size = self._count = 0
        self._deal = np.zeros(0, np.int64)

    def path(self, number: int) -> str:
        """The file of a shard's pairs."""
        return os.path.join(self._folder, f"pairs-{number:05d}")

    def add(self, source: bytes, target: bytes) -> None:
        """Adds the next pair."""
        position = self._count % (self._shards * 1024)
        if not position:
            groups = self._count // self._shards + np.arange(1024)[:, None]
            draws = hash64(self._seed, 1, groups, np.arange(self._shards))
            self._deal = draws.argsort(axis=1).ravel()
        self._count += 1
        parts = self._parts.get(int(self._deal[position]))
        if parts is None:
            return
        parts += (_HEAD.pack(len(source), len(target)), source, target)
        self._size += len(source) + len(target)
        if self._size > _BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Writes what is in memory."""
        for number, parts in self._parts.items():
            with open(self.path(number), "ab") as file:
                file.writelines(parts)
            parts.clear()
        self._size = 0


def read(path: str) -> Iterator[tuple[bytes, bytes]]:
    """The pairs in a file of `Spool`."""
    with open(path, "rb") as file:
        while head := file.read(_HEAD.size):
            source, target = _HEAD.unpack(head)
            yield file.read(source), file.read(target)


def make(job: Job) -> dict[str, Any]:
    """Encodes, shuffles and packs the pairs of a shard, and writes its records locally.

    Returns:
        {"examples", "bytes", "sha256", "pairs", "tokens": [inputs, targets], "long": left out,
        "longest": tokens of the longest side that was seen, "read": pairs}.
    """
    encode = encoder(job.vocabulary)
    pairs, long, longest = [], 0, 0
    for pair in read(job.pairs):
        ids = tuple(map(encode, pair))
        most = max(map(len, ids))
        longest = max(longest, most)
        if most > job.max_tokens:
            long += 1
        else:
            pairs.append(ids)
    tokens = [sum(len(pair[side]) for pair in pairs) for side in (0, 1)]
    facts = {"pairs": len(pairs), "tokens": tokens, "long": long, "longest": longest}
    shuffled = (pairs[i] for i in _permutation(len(pairs), job.seed, 2, job.number))
    packed = packing.pack(shuffled, job.length, OPEN_ROWS)
    rows = [packing.serialize_example(row) for row in packed]
    digest, size = hashlib.sha256(), 0
    with open(job.records, "wb") as file:
        for i in _permutation(len(rows), job.seed, 3, job.number):
            frame = records.frame(rows[i])
            digest.update(frame)
            size += file.write(frame)
    written = {"examples": len(rows), "bytes": size, "sha256": digest.hexdigest()}
    return {**written, **facts, "read": len(pairs) + long}


def encoder(vocabulary: str) -> Callable[[bytes], list[int]]:
    """What makes the ids, with EOS, of a side of a pair; `vocabulary` as in `Job`."""
    if not vocabulary:
        return lambda data: np.frombuffer(data, "<i4").tolist()
    if vocabulary not in _vocabularies:
        _vocabularies[vocabulary] = load_vocabulary(vocabulary)
    encode = _vocabularies[vocabulary].encode
    return lambda data: [*encode(data.decode().strip()), EOS]


def as_bytes(ids: np.ndarray) -> bytes:
    """Ids, with EOS, as a side of a pair."""
    return ids.astype("<i4").tobytes()


def _permutation(size: int, *key: int) -> list[int]:
    return hash64(*key, np.arange(size)).argsort(kind="stable").tolist()


class Pool:
    """Processes that make shards; one worker is a thread of this process."""

    def __init__(self, workers: int):
        """Starts the processes.

        Raises:
          UserError: this machine, perhaps a container, has no shared memory for them.
        """
        self._workers, self._pool = workers, futures.ThreadPoolExecutor(1)
        if workers > 1:
            # TensorFlow's threads do not survive a fork.
            context = multiprocessing.get_context("spawn")
            try:
                self._pool = futures.ProcessPoolExecutor(workers, context, _start)
            except OSError as error:  # processes share semaphores there
                raise UserError(
                    f"--workers={workers}: several processes need /dev/shm ({error.strerror}): "
                    "give the container one (docker run --shm-size=1g), or take --workers=1"
                ) from error

    def make(self, job: Job) -> dict[str, Any]:
        """`make`, called by threads.

        Raises:
            UserError: a process ended before its shard was made.
        """
        try:
            return self._pool.submit(make, job).result()
        except process.BrokenProcessPool as error:
            raise UserError(
                f"one of --workers={self._workers} processes was killed, perhaps for lack of "
                "memory: take fewer, and the same command continues"
            ) from error

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


def _start() -> None:
    """Ends a worker with the main process; Ctrl-C is the main process's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
