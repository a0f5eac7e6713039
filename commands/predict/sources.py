"""Sources that a user names: lines of text; and pictures, read and answered in batches.

A picture or a line that cannot be used stays in the list, with the reason.
"""

import collections
import contextlib
import dataclasses
import glob
import io
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from etils import epath
from PIL import Image

from commands.predict.model import Batch, Leaves, Part, Predictor, Request
from commands.predict.outputs import Row, say
from common import pools
from common.data import storage
from common.errors import ConfigError, DataError, count, is_of_files, one_line
from common.images import photos
from common.images.photos import Jpeg
from common.progress import Progress
from common.tensorflow import tensorflow
from common.text import is_sgm, path_text, sgm_sentences, shown
from engine import locations
from engine.checkpoint.model_source import Model

_QUALITY = 95  # of re-encoded pictures, as where photos are prepared for training
_SUFFIXES = (*photos.SUFFIXES, ".heic", ".heif")  # HEIC is not read: its row says so
_BATCHES = 4  # batches that are read at once, so that pictures of one shape share a batch
# A word with a slash, or with an ending such as .txt, is meant as a file.
_LIKE_A_PATH = re.compile(r"\S*(/|\\|\.[A-Za-z][A-Za-z0-9]{0,4}$)\S*")
_SHOWN = 100  # characters of a line that cannot be read


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Where a file system fails, raises a DataError that begins with `what`."""
    try:
        yield
    except Exception as error:  # each file system raises its own types
        if not is_of_files(error):
            raise
        raise DataError(f"{what}: {one_line(error)}") from error


def check_apart(paths: Sequence[str], written: Iterable[tuple[str, str]]) -> None:
    """Raises ConfigError if one of (flag, path) of the files to write is one of the inputs."""
    inputs = {os.path.realpath(path) for path in paths}  # paths of buckets stay different
    for flag, path in written:
        if path and os.path.realpath(path) in inputs:
            raise ConfigError(
                f"--{flag}: {path} is one of the inputs, and would be overwritten; "
                "write to another folder"
            )


# Lines of text.


class Line(NamedTuple):
    """A line without the white space around it, or the reason why it cannot be used."""

    text: str
    error: str = ""
    place: str = ""  # where it is, if not a line of its own


def read_lines(sources: Sequence[str], what: str, out: str) -> Iterator[Line]:
    """Checks that the files among some sources are there; returns the lines of all in their order.

    A source is a file, local or gs://, "-" for the standard input, or a line itself. `what` says
    for the message what such a line may be; "" if all are files. DataError if a file is a folder or
    is missing; ConfigError if it is the file `out`, which will be written.
    """
    files: list[str] = []
    for source in sources:
        is_path = bool(_LIKE_A_PATH.fullmatch(source))
        if source == "-" or ("://" in source and not is_path):
            continue
        if "://" in source:
            locations.check_path(source, "SOURCE")
        with refusing(f"cannot read {shown(source)}"):
            path = epath.Path(source)
            if path.is_dir():
                raise DataError(f"{shown(source)} is a folder: name the files in it")
            if path.exists():
                files.append(source)
            elif is_path or not what:
                hint = f"; {what} without a blank can come on stdin" if what else ""
                raise DataError(f"{shown(source)}: there is no such file{hint}")
    check_apart(files, [("out", out)])

    def lines() -> Iterator[Line]:
        for source in sources:
            if source == "-":
                yield from map(parse, iter(_typed, b"") if sys.stdin.isatty() else sys.stdin.buffer)
            elif source not in files:
                yield parse(os.fsencode(source))
            else:
                with refusing(f"cannot read {shown(source)}"), _open(source) as file:
                    is_set = is_sgm(source)  # else only "\n" ends a line
                    yield from map(parse, sgm_sentences(file, shown(source)) if is_set else file)

    return lines()


def _open(path: str) -> Any:
    return io.BytesIO(epath.Path(path).read_bytes()) if "://" in path else open(path, "rb")


def _typed() -> bytes:
    """The line that the user types after a prompt; b"" at the end."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.buffer.readline()


def parse(data: bytes) -> Line:
    """The text in the bytes of a line."""
    try:
        text = data.decode().strip().removeprefix("\ufeff")  # as in training
        if "\0" not in text:
            return Line(text)
        reason = "not UTF-8 but UTF-16, or no text: it has zero bytes"
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{data[error.start]:02x} at position {error.start + 1}"
    return Line(shown(path_text(os.fsdecode(data[:_SHOWN].strip()))), reason)


# Finding pictures.


@dataclasses.dataclass(frozen=True)
class Picture:
    """A file as an upright JPEG and in the parts that the model sees; or why it cannot be used."""

    path: str
    photo: Jpeg | None = None
    parts: Sequence[Part] = ()
    error: str = ""

    @property
    def source(self) -> dict[str, Any]:
        """The path as the source of a `Row`."""
        return {"path": path_text(self.path)}


def find_pictures(sources: Sequence[str], lines: Iterable[str]) -> list[str]:
    """Lists the pictures of all sources; the pictures of one source are in natural order.

    A source is a file, a folder (all levels; only names that end as a picture's, hidden ones not),
    a pattern with * ? [], or "-", which stands for the paths in `lines`. Local or gs://.
    """
    if not sources:
        raise ConfigError("name a picture, a folder of pictures, or `-` for paths on stdin")
    pictures: list[str] = []
    for source in sources:
        if source == "-":
            pictures += [line for line in lines if line]
            continue
        path = locations.check_path(source, "SOURCE")
        with refusing(f"cannot list {shown(source)}"):
            matches = _of_one(path)
        if not matches:
            raise DataError(f"{shown(source)}: there is no such picture, or no picture in it")
        pictures += matches
    if not pictures:
        raise DataError("no picture is named; `-` reads paths, one per line, from stdin")
    return pictures


def _of_one(path: str) -> list[str]:
    """The pictures that a file, a folder or a pattern means."""
    remote = tensorflow().io.gfile if "://" in path else None
    is_folder = remote.isdir if remote else os.path.isdir
    exists = remote.exists if remote else os.path.lexists
    if is_folder(path) or exists(path):  # names may have brackets
        matches = [path]
    elif remote:
        matches = storage.matching_paths(path) if glob.has_magic(path) else []
    else:
        parent = storage.existing_prefix(path)
        matches = glob.glob(glob.escape(parent) + path[len(parent) :], recursive=True)
    pictures = []
    for match in sorted(matches, key=natural):
        if is_folder(match):
            inside = sorted(_walk(match, remote), key=natural)
            pictures += [name for name in inside if name.lower().endswith(_SUFFIXES)]
        else:
            pictures.append(match)
    return pictures


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


def load_picture(path: str, prepare: Callable[[Jpeg], Sequence[Part]]) -> Picture:
    """Reads a picture, with the parts that the model expects; an error is in the result.

    It is turned upright and re-encoded as where photos are prepared for training, so that a photo
    and its record have the same pixels.
    """
    try:
        with tensorflow().io.gfile.GFile(path, "rb") if "://" in path else open(path, "rb") as file:
            data = file.read(photos.HEAD)
            if photos.looks_like_image(data):
                data += file.read()
    except Exception as error:  # each file system raises its own types
        if not is_of_files(error):
            raise
        reason = getattr(error, "strerror", None) or one_line(error)  # the row has the path
        return Picture(path, error=f"unreadable: {reason}")
    head, photo = data[: photos.HEAD], None
    if not photos.looks_like_image(head):
        return Picture(path, error=photos.unknown(head) if head else "the file is empty")
    try:
        photo = photos.convert(data, rotate=True, quality=_QUALITY)
        return Picture(path, photo, prepare(photo))
    except photos.BadImage as error:
        return Picture(path, photo, error=str(error))
    except DataError:  # whose reason is the decoder's own
        return Picture(path, photo, error="damaged or cut short: it cannot be decoded")


# Answering in batches.


class PictureModel:
    """A model that answers for pictures; classifiers and detectors are subclasses.

    `summary` is for the line that says it is loaded; a device computes `at_once` pictures at once.
    """

    has_parts = False  # whether pictures have several parts, which need memory

    def __init__(self, model: Model, summary: str, at_once: int):
        self.model, self.summary, self.at_once = model, summary, at_once

    def files(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        """(flag, file) of each file that is written for some pictures, besides --out."""
        del paths
        return []

    def predict(self, params: Any, model_state: Any, batch: Batch) -> Batch:
        """The rows, arrays [b, ...], of a batch on the devices."""
        raise NotImplementedError

    def inputs(self, photo: Jpeg) -> Leaves:
        """The arrays of a batch for one photo; DataError if it cannot be decoded."""
        raise NotImplementedError

    def parts(self, photo: Jpeg) -> Sequence[Part]:
        """The parts of a photo, most often the photo alone; DataError if it cannot be decoded."""
        inputs = self.inputs(photo)
        return [lambda: inputs]

    def joined(self, picture: Picture, results: Sequence[Leaves]) -> Leaves:
        """The result for a picture, from those for its parts."""
        return results[0]

    def row(self, picture: Picture, result: Leaves | None) -> Row:
        """The row of a picture with the `result` of `predict`; None where it has an error."""
        raise NotImplementedError

    def write(self, request: Request, paths: Sequence[str], rows: Iterator[Row]) -> None:
        """Writes the rows of all pictures."""
        raise NotImplementedError

    def score(self) -> str:
        """A line about the pictures so far; "" for nothing."""
        return ""

    def predictor(self, batch_size: int) -> Predictor:
        """Reads the weights, and compiles for a black picture, which has the commonest shape.

        It is decoded before other threads decode: TensorFlow may crash if two threads are the first
        to use an operation.
        """
        predictor = Predictor(self.predict, self.model, batch_size, self.at_once)
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "JPEG")
        predictor.compile(self.inputs(Jpeg(file.getvalue(), 8, 8, "")))
        return predictor


def answer(load: Callable[[], PictureModel], request: Request) -> int:
    """Writes an answer for each picture; returns the exit code: 1 if a picture has no answer."""
    started = time.monotonic()
    model = load()
    paths = find_pictures(request.sources, _stdin_lines())
    check_apart(paths, [*model.files(paths), ("out", request.out)])
    predictor = model.predictor(request.batch_size)
    ready = time.monotonic()
    say(f"{model.model.source}: {model.summary}; loaded and compiled in {ready - started:.1f} s")
    done, errors, threads = 0, 0, pools.threads(*request.sources)

    def rows() -> Iterator[Row]:
        nonlocal done, errors
        progress, at_once = Progress(len(paths)), _BATCHES * predictor.batch_size
        waiting: collections.deque[Picture] = collections.deque()
        results: collections.deque[Leaves] = collections.deque()  # for the parts of those waiting
        with ThreadPoolExecutor(threads) as pool:
            ahead = threads if model.has_parts else at_once + threads
            pictures = pools.ordered(
                pool, lambda path: load_picture(path, model.parts), paths, ahead
            )

            def parts() -> Iterator[Part]:
                for picture in pictures:
                    waiting.append(picture)
                    yield from picture.parts

            inputs = pools.ordered(pool, lambda part: part(), parts(), at_once + threads)
            while (chunk := list(itertools.islice(inputs, at_once))) or waiting:
                results.extend(predictor(chunk))
                while waiting and len(results) >= (number := len(waiting[0].parts)):
                    picture, own = waiting.popleft(), [results.popleft() for _ in range(number)]
                    row = model.row(picture, model.joined(picture, own) if own else None)
                    done, errors = done + 1, errors + bool(row.error)
                    yield row
                share = len(results) / len(waiting[0].parts) if waiting else 0
                progress.log(done + share, f"{done:,} of {len(paths):,} files")

    model.write(request, paths, rows())
    seconds = time.monotonic() - ready
    rate = len(paths) / max(seconds, 1e-9)
    pace = f"{rate:,.0f} images/s" if rate >= 1 else f"{1 / rate:,.1f} s an image"
    say(f"{count(len(paths), 'file')} in {seconds:.1f} s: {pace}")
    if score := model.score():
        say(score)
    if errors:
        say(f"{errors:,} of {len(paths):,} files have no prediction; their rows say why")
    return 1 if errors else 0


def _stdin_lines() -> Iterator[str]:
    """The paths on stdin; bytes that are not UTF-8 stay as they are in file names."""
    for line in sys.stdin.buffer:
        yield os.fsdecode(line.rstrip(b"\r\n"))
