"""Classifies pictures with a trained model: what predict.py does."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from etils import epath

import start
from engine import compile_cache, terminal
from engine import mesh as meshes
from engine import paths as user_paths
from errors import ConfigError, DataError, one_line
from modes import trained
from modes.predict import outputs, sources
from modes.predict.classifier import Classifier
from modes.predict.outputs import Answer, Request
from modes.predict.rows import Classes, Row
from modes.predict.sources import Picture
from ops import parallel
from ops.images import photos


@dataclasses.dataclass
class Tally:
    """Sums over the files of a run; the seconds of threads are added up."""

    files: int = 0
    errors: int = 0
    named: int = 0  # files in folders that are named as a class
    right: int = 0  # of these
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    device_seconds: float = 0.0

    def add(self, row: Row, picture: Picture) -> None:
        """Counts one file."""
        self.files += 1
        self.errors += bool(row.error)
        self.named += bool(row.truth)
        self.right += bool(row.truth) and not row.is_wrong
        self.read_seconds += picture.read_seconds
        self.decode_seconds += picture.decode_seconds


def run(request: Request, lines: Iterable[str]) -> int:
    """Writes a prediction for each file; returns the exit code: 1 if a file has none.

    `lines` are the paths that the source "-" stands for.

    Raises:
      UserError: a mistake that the person can mend; before any picture is read.
    """
    photos.quiet()
    terminal.start(sys.stderr)
    started = time.monotonic()
    for flag in ("out", "embeddings", "contact_sheet"):
        _check_output(getattr(request, flag), f"--{flag}")
    model = _open(request)
    benchmark: Any = model.benchmark
    if not benchmark.uses.classifies:
        raise ConfigError(
            f"{model.source} is a model of the benchmark {model.config.benchmark!r}, which does "
            f"not classify pictures; {benchmark.uses.hint}"
        )
    classes = _classes(request, model)
    paths = _find(request, lines)
    _check_apart(request, paths)
    meshes.check_platform()
    compile_cache.use(model.config.compilation_cache)
    spec = benchmark.input_spec
    classifier = Classifier(model, spec.size, request.batch_size)
    sources.warm_up(spec)
    loaded = time.monotonic()
    classifier.compile()
    compiled = time.monotonic()
    _say(
        f"{model.source}: {len(classes.names):,} classes, {spec.size} px; loaded in "
        f"{loaded - started:.1f} s, compiled in {compiled - loaded:.1f} s"
    )
    tally = Tally()
    with ThreadPoolExecutor(request.threads) as pool:
        ahead = 2 * classifier.batch_size + request.threads
        pictures = parallel.ordered(pool, lambda path: sources.load(path, spec), paths, ahead)
        outputs.write(request, classes, paths, _answers(pictures, classifier, classes, tally))
    _summarize(tally, time.monotonic() - compiled, request.threads)
    return 1 if tally.errors else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_output(path: str, flag: str) -> None:
    """Refuses a file that cannot be written, before anything is computed."""
    if path:
        user_paths.check(path, flag)
        if epath.Path(path).is_dir():
            raise ConfigError(f"{flag}={path} is a folder; name a file in it")
        start.check_folder(os.path.dirname(path) or ".", flag)


def _check_apart(request: Request, paths: Sequence[str]) -> None:
    """Refuses to write over one of the pictures.

    Raises:
      ConfigError: a file to write is one of `paths`.
    """
    pictures = {_place(path) for path in paths}
    sheets = outputs.sheets(request.contact_sheet, len(paths))
    for flag, written in (("contact_sheet", sheets), ("out", [request.out])):
        if over := next((path for path in written if path and _place(path) in pictures), ""):
            raise ConfigError(
                f"--{flag}={getattr(request, flag)}: {over} is one of the pictures to classify, "
                "and would be overwritten; write to another folder"
            )


def _place(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)


def _open(request: Request) -> trained.Trained:
    if request.recipe is None:
        return trained.load(request.model, request.checkpoint)
    foreign = trained.load_foreign(request.model, request.recipe, "--model")
    if foreign and request.checkpoint != "latest":
        raise ConfigError(
            f"--checkpoint={request.checkpoint}: --model={request.model} is a single model, not "
            "the workdir of a run; leave --checkpoint out"
        )
    return foreign or trained.load(request.model, request.checkpoint, "--model")


def _find(request: Request, lines: Iterable[str]) -> list[str]:
    """The paths of all files."""
    paths, others = sources.find(request.sources, lines)
    if others:
        name = sources.shown(others[0])
        _say(f"NOTE left out {len(others):,} of the files, not named as pictures, such as {name}")
    if not paths:
        raise DataError("no picture is named; `-` reads paths, one per line, from stdin")
    return paths


def _classes(request: Request, model: trained.Trained) -> Classes:
    """The names of the model's classes: those of --labels, else its own, else numbers.

    Raises:
      ConfigError: the file of --labels cannot be read, or has another number of lines.
    """
    count = model.config.num_label_classes
    names = list(trained.class_names(model.manifest, count))
    if request.labels:
        try:
            text = epath.Path(request.labels).read_bytes().decode("utf-8-sig")
        except Exception as error:  # each file system raises its own types
            reason = one_line(error)
            raise ConfigError(f"--labels={request.labels} cannot be read: {reason}") from error
        names = [line.strip() for line in text.rstrip().splitlines()]
        if len(names) != count:
            raise ConfigError(
                f"--labels={request.labels} has {len(names):,} lines, but {model.source} has "
                f"{count:,} classes; the file needs one name per line, in the order of the classes"
            )
    elif not names:
        _say("NOTE the model has no class names, so numbers stand for them; --labels names them")
    names = [name or str(i) for i, name in enumerate(names or [""] * count)]
    return Classes(names, min(request.top_k, count), request.kind)


def _answers(
    pictures: Iterator[Picture], classifier: Classifier, classes: Classes, tally: Tally
) -> Iterator[Answer]:
    """Classifies the pictures in batches; yields one answer for each, in their order."""
    batch: list[Picture] = []
    usable = 0
    for picture in pictures:
        batch.append(picture)
        usable += picture.pixels is not None
        if usable == classifier.batch_size:
            yield from _answers_of(batch, classifier, classes, tally)
            batch, usable = [], 0
    if batch:
        yield from _answers_of(batch, classifier, classes, tally)


def _answers_of(
    batch: list[Picture], classifier: Classifier, classes: Classes, tally: Tally
) -> Iterator[Answer]:
    images = [picture.pixels for picture in batch if picture.pixels is not None]
    started = time.perf_counter()
    results = iter(zip(*classifier(images), strict=True)) if images else iter(())
    tally.device_seconds += time.perf_counter() - started
    for picture in batch:
        row, features = Row(picture.path, error=picture.error), None
        if picture.pixels is not None:
            logits, features = next(results)
            row = classes.row(picture.path, logits, picture.folder)
        tally.add(row, picture)
        yield Answer(row, picture.pixels, features)


def _summarize(tally: Tally, seconds: float, threads: int) -> None:
    """Tells how fast it was, how many files failed, and how many classes were right."""

    def rate(busy: float) -> str:
        return f"{tally.files / max(busy, 1e-9):,.0f}"

    reading, decoding = tally.read_seconds / threads, tally.decode_seconds / threads
    _say(
        f"{tally.files:,} files in {seconds:.1f} s: {rate(seconds)} images/s; alone, reading would "
        f"reach {rate(reading)} and decoding {rate(decoding)} ({threads} threads), the "
        f"devices ({jax.device_count()}) {rate(tally.device_seconds)}"
    )
    if tally.named:
        share = tally.right / tally.named
        _say(
            f"top 1 accuracy {share:.2%}: {tally.right:,} of {tally.named:,} files in folders that "
            "are named as classes"
        )
    if tally.errors:
        _say(f"{tally.errors:,} of {tally.files:,} files have no prediction; their rows say why")
