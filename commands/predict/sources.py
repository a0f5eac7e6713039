"""Pictures that a user names: files, folders, patterns and gs://, read and answered in batches.

A file that cannot be used stays among them, with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from PIL import Image

from commands.predict import outputs
from commands.predict.model import Leaves, Predictor, Request, shapes
from commands.predict.outputs import Row, say, shown
from common import limits, pools
from common.console import Progress
from common.data import files
from common.data.shards import tensorflow
from common.errors import ConfigError, DataError, is_of_files, one_line
from common.images import photos
from common.images.photos import Jpeg
from engine import locations
from engine.model_source import Model

_QUALITY = 95  # of re-encoded pictures, as where own photos are prepared for training
# Names of pictures in a folder. HEIC and AVIF are not read: each gets a row that says so.
_SUFFIXES = photos.SUFFIXES
_SUFFIXES += (".heic", ".heif", ".avif")
_WAITING = 8  # batches of pictures that wait for a batch of another shape to fill


@dataclasses.dataclass(frozen=True)
class Picture:
    """A file as the model takes it, or the reason why it cannot be used.

    Attributes:
      path: of the file.
      photo: the file as a JPEG, upright; None if it could not be used.
      inputs: the arrays of `PictureModel.inputs`; None if the file could not be used.
      error: why it could not be used, in one line.
      read_seconds: of one thread.
      decode_seconds: of one thread, for decoding, cropping and resizing.
    """

    path: str
    photo: Jpeg | None = None
    inputs: Leaves | None = None
    error: str = ""
    read_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def source(self) -> dict[str, Any]:
        """See `Row`."""
        return {"path": outputs.path_text(self.path)}


# Finding the files.


def find_pictures(sources: Sequence[str], lines: Iterable[str]) -> list[str]:
    """Lists the pictures of all sources in their order; those of one source in natural order.

    Args:
      sources: files, folders (all levels; only names that end as a picture's, hidden ones not),
        patterns with * ? [], or "-", which stands for `lines`. Local or gs://.
      lines: paths of files, one each.

    Raises:
      DataError: there is no picture, or a source cannot be listed.
      ConfigError: there is no source, or one is neither local nor gs://.
    """
    if not sources:
        raise ConfigError("name a picture, a folder of pictures, or `-` for paths on stdin")
    pictures: list[str] = []
    left_out: list[str] = []
    for source in sources:
        if source == "-":
            pictures += [line for line in lines if line]
            continue
        path = locations.check_path(source, "SOURCE")
        with refusing(f"cannot list {shown(source)}"):
            matches, others = _of_one(path)
        if not matches:
            ends = f"; the {len(others)} files there have other names" if others else ""
            raise DataError(f"{shown(source)}: there is no such picture or folder of them{ends}")
        pictures += matches
        left_out += others
    if left_out:
        name = shown(left_out[0])
        say(f"NOTE left out {len(left_out):,} of the files, not named as pictures, such as {name}")
    if not pictures:
        raise DataError("no picture is named; `-` reads paths, one per line, from stdin")
    return pictures


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Where a file system fails, raises a DataError that begins with `what`."""
    try:
        yield
    except Exception as error:  # each file system raises its own types
        if not is_of_files(error):
            raise
        raise DataError(f"{what}: {one_line(error)}") from error


def _of_one(path: str) -> tuple[list[str], list[str]]:
    remote = tensorflow().io.gfile if "://" in path else None
    is_folder = remote.isdir if remote else os.path.isdir
    exists = remote.exists if remote else os.path.lexists
    if is_folder(path):
        matches = [path]
    elif exists(path) or not glob.has_magic(path):  # names may have brackets
        return ([path], []) if exists(path) else ([], [])
    elif remote:
        matches = files.matching_paths(path)
    else:
        known = files.known_part(path)
        matches = glob.glob(glob.escape(known) + path[len(known) :], recursive=True)
    pictures, others = [], []
    for match in sorted(matches, key=natural):
        inside = _walk(match, remote) if is_folder(match) else [match]
        for name in sorted(inside, key=natural):
            is_picture = name == match or name.lower().endswith(_SUFFIXES)
            (pictures if is_picture else others).append(name)
    return pictures, others


def _walk(folder: str, remote: Any) -> list[str]:
    """All files of a folder at all levels, without hidden files and folders."""
    paths: list[str] = []

    def stop(error: OSError) -> None:
        raise error

    levels = remote.walk(folder) if remote else os.walk(folder, onerror=stop)
    for level, folders, names in levels:
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "/." not in level.removeprefix(folder):  # gfile.walk has no pruning
            paths += [os.path.join(level, name) for name in names if not name.startswith(".")]
    return paths


def natural(path: str) -> list[Any]:
    """A key that sorts photo_2 before photo_10."""
    parts = re.split(r"([0-9]+)", path)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


# Reading them.


def load_picture(path: str, prepare: Callable[[Jpeg], Leaves]) -> Picture:
    """Reads a file and makes the arrays that the model expects; a fault is in the result.

    The picture is turned upright and re-encoded as where own photos are prepared for training, so
    that a photo and its record have the same pixels.
    """
    started = time.perf_counter()
    try:
        data = _read(path)
    except Exception as error:  # each file system raises its own types
        if not (is_of_files(error) or isinstance(error, photos.BadImage)):
            raise
        text = str(error)
        if not isinstance(error, photos.BadImage):  # the row has the path
            text = f"unreadable: {getattr(error, 'strerror', None) or one_line(error)}"
        return Picture(path, error=text, read_seconds=time.perf_counter() - started)
    read = time.perf_counter()
    photo, inputs, fault = None, None, ""
    try:
        photo = photos.convert(data, rotate=True, quality=_QUALITY)
        inputs = prepare(photo)
    except (photos.BadImage, DataError) as error:
        fault = str(error)
    return Picture(path, photo, inputs, fault, read - started, time.perf_counter() - read)


def _read(path: str) -> bytes:
    """The bytes of a file that begins as a picture does; others are not read further."""
    if name := limits.special(path):
        raise photos.BadImage(f"{name}, not a file: save its content as a file")
    most = limits.IMAGE_BYTES
    large = photos.BadImage(f"more than {most:,} bytes: save it as a JPEG")
    if "://" not in path and os.stat(path).st_size > most:
        raise large
    with tensorflow().io.gfile.GFile(path, "rb") if "://" in path else open(path, "rb") as file:
        head = file.read(photos.HEAD)
        if not photos.looks_like_image(head):
            raise photos.BadImage(photos.unknown(head) if head else "the file is empty")
        data = head + file.read(most)
        if len(data) > most:
            raise large
        return data


# Answering in batches.


class PictureModel:
    """A model that answers for pictures; classifiers and detectors are subclasses.

    `at_once` pictures are computed at once by a device, see `Predictor`.
    """

    at_once = 8

    def __init__(self, model: Model):
        self.model = model

    @property
    def summary(self) -> str:
        """What the line about the loaded model says of it."""
        raise NotImplementedError

    def files(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        """(flag, file) of each file that is written for some pictures, besides that of --out."""
        raise NotImplementedError

    def predict(self, params: Any, model_state: Any, batch: Any) -> Any:
        """See `Predictor`."""
        raise NotImplementedError

    def inputs(self, photo: Jpeg) -> Leaves:
        """The arrays of a batch for one photo; DataError if it cannot be decoded."""
        raise NotImplementedError

    def row(self, picture: Picture, result: Leaves | None) -> Row:
        """The row of a picture; `result` is that of `predict`, None where it has an error."""
        raise NotImplementedError

    def write(self, request: Request, paths: Sequence[str], rows: Iterator[Row]) -> None:
        """Writes the rows of all pictures."""
        raise NotImplementedError

    def score(self) -> str:
        """A line about the pictures so far; "" for none."""
        return ""

    def predictor(self, batch_size: int) -> Predictor:
        """Reads the weights."""
        return Predictor(self.predict, self.model, batch_size, self.at_once)

    def blank(self) -> Leaves:
        """The arrays of a black picture.

        One thread makes them first: TensorFlow may crash if two first use an operation.
        """
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "JPEG")
        return self.inputs(Jpeg(file.getvalue(), 8, 8, ""))


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


def answer(load: Callable[[], PictureModel], request: Request, stdin: Iterable[str]) -> int:
    """Writes an answer for each picture; see `commands.predict.run`."""
    started = time.monotonic()
    model = load()
    paths = find_pictures(request.sources, stdin)
    outputs.check_apart(paths, [*model.files(paths), ("out", request.out)])
    predictor, blank = model.predictor(request.batch_size), model.blank()
    loaded = time.monotonic()
    predictor.compile(blank)
    compiled = time.monotonic()
    say(
        f"{model.model.source}: {model.summary}; loaded in {loaded - started:.1f} s, "
        f"compiled in {compiled - loaded:.1f} s"
    )
    tally, threads = Tally(), pools.threads(*request.sources)

    def rows() -> Iterator[Row]:
        progress = Progress(len(paths))
        with ThreadPoolExecutor(threads) as pool:
            ahead = 2 * predictor.batch_size + threads
            pictures = pools.ordered(
                pool, lambda path: load_picture(path, model.inputs), paths, ahead
            )
            for picture, result in in_batches(pictures, predictor, tally):
                row = model.row(picture, result)
                tally.add(picture, row.error)
                progress.log(tally.files, f"{tally.files:,} of {len(paths):,} files")
                yield row

    model.write(request, paths, rows())
    summarize(tally, time.monotonic() - compiled, threads, model.score())
    return 1 if tally.errors else 0


def in_batches(
    pictures: Iterable[Picture], predictor: Predictor, tally: Tally
) -> Iterator[tuple[Picture, Leaves | None]]:
    """Yields each picture with its row, in order; None where the picture has an error.

    Pictures of one shape share a batch.
    """
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


def summarize(tally: Tally, seconds: float, threads: int, score: str) -> None:
    """Says how fast it was, the line `score` unless it is empty, and how many files failed."""

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
    if score:
        say(score)
    if tally.errors:
        say(f"{tally.errors:,} of {tally.files:,} files have no prediction; their rows say why")
