"""Runs a model on the pictures that a person names, in batches, and says how fast it was."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from errors import ConfigError, DataError
from modes.predict import sources
from modes.predict.predictor import Leaves, Predictor, shapes
from modes.predict.request import Request, say
from modes.predict.sources import Picture, Prepare
from ops import parallel

_WAITING = 8  # batches of pictures that wait for a batch of another shape to fill


@dataclasses.dataclass
class Tally:
    """Sums over the files of a run; the seconds of threads are added up."""

    files: int = 0
    errors: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    device_seconds: float = 0.0

    def add(self, picture: Picture, error: str) -> None:
        """Counts one file."""
        self.files += 1
        self.errors += bool(error)
        self.read_seconds += picture.read_seconds
        self.decode_seconds += picture.decode_seconds


def find(request: Request, stdin: Iterable[str]) -> list[str]:
    """The paths of all pictures; `stdin` are those that the source "-" stands for.

    Raises:
      UserError: there is none, or a source cannot be listed.
    """
    if not request.sources:
        raise ConfigError("name a picture, a folder of pictures, or `-` for paths on stdin")
    paths, others = sources.find(request.sources, stdin)
    if others:
        name = sources.shown(others[0])
        say(f"NOTE left out {len(others):,} of the files, not named as pictures, such as {name}")
    if not paths:
        raise DataError("no picture is named; `-` reads paths, one per line, from stdin")
    return paths


def predicted(
    paths: Sequence[str], prepare: Prepare, predictor: Predictor, tally: Tally, threads: int
) -> Iterator[tuple[Picture, Leaves | None]]:
    """Yields each picture with its row, in order; None where the picture has an error."""
    with ThreadPoolExecutor(threads) as pool:
        ahead = 2 * predictor.batch_size + threads
        pictures = parallel.ordered(pool, lambda path: sources.load(path, prepare), paths, ahead)
        yield from in_batches(pictures, predictor, tally)


def in_batches(
    pictures: Iterable[Picture], predictor: Predictor, tally: Tally
) -> Iterator[tuple[Picture, Leaves | None]]:
    """As `predicted`; pictures of one shape share a batch."""
    waiting: list[list[Any]] = []  # [picture, row or None], in their order
    groups: dict[Any, list[list[Any]]] = {}  # of `waiting`, those without a row, by shape

    def compute(group: list[list[Any]]) -> None:
        started = time.perf_counter()
        rows = predictor([picture.inputs for picture, _ in group])
        tally.device_seconds += time.perf_counter() - started
        for i, entry in enumerate(group):
            entry[1] = {name: values[i] for name, values in rows.items()}
        group.clear()

    def ready() -> Iterator[tuple[Picture, Leaves | None]]:
        while waiting and (waiting[0][1] is not None or waiting[0][0].inputs is None):
            picture, row = waiting.pop(0)
            yield picture, row

    for picture in pictures:
        waiting.append(entry := [picture, None])
        if picture.inputs is not None:
            group = groups.setdefault(shapes(picture.inputs), [])
            group.append(entry)
            if len(group) == predictor.batch_size:
                compute(group)
        if len(waiting) > _WAITING * predictor.batch_size:
            for group in filter(None, groups.values()):
                compute(group)
        yield from ready()
    for group in filter(None, groups.values()):
        compute(group)
    yield from ready()


def summarize(tally: Tally, seconds: float, threads: int, score: Callable[[], str]) -> None:
    """Says how fast it was, the line `score()` unless it is empty, and how many files failed."""

    def rate(busy: float) -> str:
        return f"{tally.files / max(busy, 1e-9):,.0f}"

    reading, decoding = tally.read_seconds / threads, tally.decode_seconds / threads
    line = f"{tally.files:,} file{'s' * (tally.files != 1)} in {seconds:.1f} s"
    if tally.device_seconds:
        line += (
            f": {rate(seconds)} images/s; alone, reading would reach {rate(reading)} and decoding "
            f"{rate(decoding)} ({threads} threads), the devices ({jax.device_count()}) "
            f"{rate(tally.device_seconds)}"
        )
    say(line)
    if line := score():
        say(line)
    if tally.errors:
        say(f"{tally.errors:,} of {tally.files:,} files have no prediction; their rows say why")
