"""Classifies pictures: what predict.py does with a classifier."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from errors import ConfigError, one_line
from modes import trained
from modes.predict import outputs, pictures, sheet, sources
from modes.predict.class_rows import Classes, Row, table
from modes.predict.pictures import Tally
from modes.predict.predictor import Predictor
from modes.predict.request import Request, say
from modes.predict.rows import FORMATS, lines
from ops import limits
from ops.images.prepared import prepare
from ops.progress import Progress

_AT_ONCE = 8  # images, see `Predictor`


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for classifiers."""

    formats = FORMATS
    files = (("embeddings", ".npy"), ("contact_sheet", ".png"))  # flags that name a file to write

    top_k: int = 5
    logits: bool = False
    embeddings: str = ""
    contact_sheet: str = ""
    labels: str = ""


class Answer(NamedTuple):
    """A row with the picture as the model saw it and its features; None where it has an error."""

    row: Row
    pixels: np.ndarray | None  # uint8[size, size, 3]
    features: np.ndarray | None  # f32[channels]


@dataclasses.dataclass
class Score:
    """Counts the files in folders that are named as a class."""

    named: int = 0
    right: int = 0

    def add(self, row: Row) -> None:
        """Counts one file."""
        self.named += bool(row.truth)
        self.right += bool(row.truth) and not row.is_wrong

    def line(self) -> str:
        """The accuracy; '' without such folders."""
        if not self.named:
            return ""
        return (
            f"top 1 accuracy {self.right / self.named:.2%}: {self.right:,} of {self.named:,} files "
            "in folders that are named as classes"
        )


def run(request: Request, options: Options, model: trained.Trained, stdin: Iterable[str]) -> int:
    """Writes the classes of each picture; see `modes.predict.run`."""
    started = time.monotonic()
    classes = class_names(options, model, request.accept_other_data)
    paths = pictures.find(request, stdin)
    written = [("contact_sheet", path) for path in sheets(options.contact_sheet, len(paths))]
    outputs.check_apart(paths, [*written, ("out", request.out)])
    predictor, inputs = opened(model, request.batch_size)
    blank = sources.warm_up(inputs)
    loaded = time.monotonic()
    predictor.compile(blank)
    compiled = time.monotonic()
    benchmark: Any = model.benchmark
    size = benchmark.input_spec.size
    say(
        f"{model.source}: {len(classes.names):,} classes, {size} px; loaded in "
        f"{loaded - started:.1f} s, compiled in {compiled - loaded:.1f} s"
    )
    tally, score = Tally(), Score()
    results = pictures.predicted(paths, inputs, predictor, tally, request.threads)
    _write(request, options, classes, paths, _answers(results, classes, tally, score))
    seconds = time.monotonic() - compiled
    pictures.summarize(tally, seconds, request.threads, score.line)
    return 1 if tally.errors else 0


def opened(model: trained.Trained, batch_size: int) -> tuple[Predictor, sources.Prepare]:
    """The classifier of pictures, and what makes its inputs of a photo."""
    benchmark: Any = model.benchmark
    spec, classify = benchmark.input_spec, benchmark.uses.classify

    def predict(params: Any, model_state: Any, batch: Any) -> Any:
        return classify(params, model_state, batch["image"])

    def inputs(photo: Any) -> dict[str, np.ndarray]:
        return {"image": prepare(photo.encoded, spec)}

    return Predictor(predict, model, batch_size, _AT_ONCE), inputs


def class_names(options: Options, model: trained.Trained, accept_other_data: bool) -> Classes:
    """The names of the model's classes: those of --labels, else its own, else numbers.

    Raises:
      ConfigError: the file of --labels cannot be read, or has another number of lines; or it has
        the model's own names in another order, and `accept_other_data` is False.
    """
    count = model.config.num_label_classes
    names = list(trained.class_names(model.manifest, count))
    if options.labels:
        limits.check_file(options.labels, ConfigError)
        try:
            text = epath.Path(options.labels).read_bytes().decode("utf-8-sig")
        except Exception as error:  # each file system raises its own types
            reason = one_line(error)
            raise ConfigError(f"--labels={options.labels} cannot be read: {reason}") from error
        names = limits.text_lines(text)
        if len(names) != count:
            raise ConfigError(
                f"--labels={options.labels} has {len(names):,} lines, but {model.source} has "
                f"{count:,} classes; the file needs one name per line, in the order of the classes"
            )
        if not accept_other_data:
            _check_order(options.labels, names, model)
    elif not names:
        say("NOTE the model has no class names, so numbers stand for them; --labels names them")
    names = [name or str(i) for i, name in enumerate(names or [""] * count)]
    return Classes(names, min(options.top_k, count), "logit" if options.logits else "probability")


def _check_order(path: str, names: Sequence[str], model: trained.Trained) -> None:
    """Raises ConfigError if a file of names has a name of the model's own for another class."""
    own = trained.class_names(model.manifest, len(names))
    # Two classes may share a name, such as ImageNet's cranes.
    absent = {mine for mine, name in zip(own, names, strict=False) if name != mine}
    moved = [i for i, name in enumerate(names) if name in absent and name != own[i]]
    if moved:
        i = moved[0]
        raise ConfigError(
            f"--labels={path} has the model's own names in another order: line {i + 1} is "
            f"{names[i]!r}, class {i + 1} of {model.source} is {own[i]!r}. Leave --labels out, or "
            "go on knowingly with --accept_other_data"
        )


def _answers(
    results: Iterable[tuple[Any, Any]], classes: Classes, tally: Tally, score: Score
) -> Iterator[Answer]:
    for picture, result in results:
        if result is None:
            answer = Answer(classes.failed(picture.path, picture.error), None, None)
        else:
            row = classes.row(picture.path, result["logits"], picture.folder)
            answer = Answer(row, picture.inputs["image"], result["features"])
        tally.add(picture, answer.row.error)
        score.add(answer.row)
        yield answer


def _write(
    request: Request,
    options: Options,
    classes: Classes,
    paths: Sequence[str],
    answers: Iterator[Answer],
) -> None:
    """Writes all answers, the contact sheets and the features."""
    features: list[np.ndarray | None] = []
    watched = _watch(options, classes, answers, len(paths), features)
    if request.form == "table":
        text = table(watched, classes, paths, shutil.get_terminal_size().columns)
    else:
        text = lines(request.form, watched, classes.columns)
    outputs.write(request.out, text)
    if options.embeddings:
        outputs.save(options.embeddings, [_array(features)])


def sheets(path: str, total: int) -> list[str]:
    """The files of the contact sheets for `total` pictures: sheet.png, sheet_2.png, ...; or []."""
    stem, end = os.path.splitext(path)
    count = -(-total // sheet.PER_SHEET) if path else 0
    return [f"{stem}_{i}{end}" if i > 1 else path for i in range(1, count + 1)]


def _watch(
    options: Options,
    classes: Classes,
    answers: Iterator[Answer],
    total: int,
    features: list[np.ndarray | None],
) -> Iterator[Row]:
    """Passes the rows on; draws the contact sheets and keeps the features on the way."""
    progress, tiles = Progress(total), []
    sheet_paths = iter(sheets(options.contact_sheet, total))
    for done, answer in enumerate(answers, 1):
        if options.embeddings:
            features.append(answer.features)
        if options.contact_sheet:
            tiles.append(sheet.Tile(answer.row, answer.pixels))
            if len(tiles) == sheet.PER_SHEET or done == total:
                outputs.save(next(sheet_paths), [sheet.draw(tiles, classes)])
                tiles = []
        progress.log(done, f"{done:,} of {total:,} files")
        yield answer.row


def _array(features: list[np.ndarray | None]) -> bytes:
    """A .npy file f32[files, channels]; a file without a prediction has a row of nan."""
    channels = max((len(row) for row in features if row is not None), default=0)
    nothing = np.full(channels, np.nan, np.float32)
    file = io.BytesIO()
    np.save(file, np.stack([nothing if row is None else row for row in features]))
    return file.getvalue()
