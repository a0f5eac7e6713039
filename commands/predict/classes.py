"""Classifies pictures: what predict.py does with a classifier.

Classes become rows for programs, lines for the user, and contact sheets: each picture as the model
sees it, with its class and probability.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from PIL import Image, ImageDraw

from commands.predict import fonts, outputs, sources
from commands.predict.model import Predictor, Request, say
from commands.predict.outputs import (
    FORMATS,
    format_rows,
    name_of,
    name_width,
    path_cell,
    path_text,
    shown,
    text_cell,
)
from commands.predict.sources import Tally
from common import limits
from common.console import Progress
from common.errors import ConfigError, one_line
from common.images.input_spec import prepare_image
from common.text import normal_name, text_lines
from engine import model_source

PER_SHEET = 80  # pictures on a contact sheet, in rows of 8 columns
_SHEET_COLUMNS = 8
_SIDE, _TEXT, _GAP = 160, 52, 12  # pixels: a picture, the lines below it, between pictures
_INK, _GREY, _RED = "#202020", "#707070", "#c01818"
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


def run(request: Request, options: Options, model: model_source.Model, stdin: Iterable[str]) -> int:
    """Writes the classes of each picture; see `commands.predict.run`."""
    started = time.monotonic()
    classes = class_names(options, model, request.accept_other_data)
    paths = sources.find_pictures(request, stdin)
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
    results = sources.predicted(paths, inputs, predictor, tally, request.threads)
    _write(request, options, classes, paths, _answers(results, classes, tally, score))
    seconds = time.monotonic() - compiled
    sources.summarize(tally, seconds, request.threads, score.line)
    return 1 if tally.errors else 0


def opened(model: model_source.Model, batch_size: int) -> tuple[Predictor, sources.Prepare]:
    """The classifier of pictures, and what makes its inputs of a photo."""
    benchmark: Any = model.benchmark
    spec, classify = benchmark.input_spec, benchmark.uses.classify

    def predict(params: Any, model_state: Any, batch: Any) -> Any:
        return classify(params, model_state, batch["image"])

    def inputs(photo: Any) -> dict[str, np.ndarray]:
        return {"image": prepare_image(photo.encoded, spec)}

    return Predictor(predict, model, batch_size, _AT_ONCE), inputs


def class_names(options: Options, model: model_source.Model, accept_other_data: bool) -> Classes:
    """The names of the model's classes: those of --labels, else its own, else numbers.

    Raises:
      ConfigError: the file of --labels cannot be read, or has another number of lines; or it has
        the model's own names in another order, and `accept_other_data` is False.
    """
    count = model.config.num_label_classes
    names = list(model_source.class_names(model.manifest, count))
    if options.labels:
        limits.check_file(options.labels, ConfigError)
        try:
            text = epath.Path(options.labels).read_bytes().decode("utf-8-sig")
        except Exception as error:  # each file system raises its own types
            reason = one_line(error)
            raise ConfigError(f"--labels={options.labels} cannot be read: {reason}") from error
        names = text_lines(text)
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


def _check_order(path: str, names: Sequence[str], model: model_source.Model) -> None:
    """Raises ConfigError if a file of names has a name of the model's own for another class."""
    own = model_source.class_names(model.manifest, len(names))
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
        text = format_rows(request.form, watched, classes.columns)
    outputs.write(request.out, text)
    if options.embeddings:
        outputs.save(options.embeddings, [_array(features)])


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
            tiles.append(Tile(answer.row, answer.pixels))
            if len(tiles) == PER_SHEET or done == total:
                outputs.save(next(sheet_paths), [draw_sheet(tiles, classes)])
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


# Rows and lines.


@dataclasses.dataclass(frozen=True)
class Row:
    """The prediction for one file.

    Attributes:
      path: of the file.
      kind: of `values`, 'probability' or 'logit'.
      error: why there is no prediction, in one line; '' if there is one.
      labels: the names of the best classes, best first.
      indices: their numbers, from 0.
      values: their probabilities, or logits.
      truth: the class whose name the folder has; '' if it has another name.
    """

    path: str
    kind: str
    error: str = ""
    labels: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    truth: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the best class is another one than the folder's name says."""
        return bool(self.truth and self.labels and self.labels[0] != self.truth)

    def content(self) -> dict[str, Any]:
        """See `outputs.Row`."""
        content: dict[str, Any] = {"path": path_text(self.path)}
        if self.error:
            return content | {"error": self.error}
        ranks = zip(self.labels, self.indices, self.values, strict=True)
        content["predictions"] = [
            {"label": label, "index": index, self.kind: value} for label, index, value in ranks
        ]
        return content | ({"folder_label": self.truth} if self.truth else {})

    def cells(self) -> list[dict[str, Any]]:
        """See `outputs.Row`; the columns are those of `Classes`."""
        cells: dict[str, Any] = {"path": path_text(self.path), "folder_label": self.truth}
        ranks = zip(self.labels, self.values, self.indices, strict=True)
        for rank, values in enumerate(ranks, 1):
            cells |= dict(zip(_rank_columns(rank, self.kind), values, strict=True))
        return [cells | {"error": self.error}]


def _rank_columns(rank: int, kind: str) -> tuple[str, str, str]:
    value = "prob" if kind == "probability" else "logit"
    return f"label_{rank}", f"{value}_{rank}", f"index_{rank}"


@dataclasses.dataclass(frozen=True)
class Classes:
    """The classes of a model, and how many of them a row names.

    Attributes:
      names: one for each class.
      top_k: how many classes a row has.
      kind: 'probability' or 'logit'.
    """

    names: list[str]
    top_k: int
    kind: str

    @property
    def columns(self) -> list[str]:
        """Of a CSV."""
        ranks = range(1, self.top_k + 1)
        named = [name for rank in ranks for name in _rank_columns(rank, self.kind)]
        return ["path", *named, "folder_label", "error"]

    def shown(self, value: float) -> str:
        """A probability or logit as text for the user."""
        return f"{value:.1%}" if self.kind == "probability" else f"{value:.3f}"

    def failed(self, path: str, error: str) -> Row:
        """The row of a file without a prediction."""
        return Row(path, self.kind, error)

    def row(self, path: str, logits: np.ndarray, folder: str) -> Row:
        """The row of a file, for logits f32[classes]."""
        if not np.isfinite(logits).all():
            return self.failed(path, "the model's logits are not finite: its run has diverged")
        best = np.argsort(-logits, kind="stable")[: self.top_k]
        values, digits = logits.astype(np.float64), 9  # which tell float32 numbers apart
        if self.kind == "probability":
            digits = 6
            values = np.exp(values - values.max())
            values /= values.sum()
        return Row(
            path=path,
            kind=self.kind,
            labels=tuple(self.names[i] for i in best),
            indices=tuple(map(int, best)),
            values=tuple(float(f"{value:.{digits}g}") for value in values[best]),
            truth=next((n for n in self.names if normal_name(n) == normal_name(folder)), ""),
        )


def table(rows: Iterator[Row], classes: Classes, paths: Sequence[str], width: int) -> Iterator[str]:
    """Lines for a terminal of `width` columns, one for each file and one above them."""
    names = name_width(paths, width)
    label_width = max(4, min(max(len(shown(name)) for name in classes.names), 20))
    shown_k = max(1, min(classes.top_k, (width - names) // (label_width + 11)))
    yield f"{'file':{names}}  {'classes, most probable first'}\n"
    for row in rows:
        ranks = [
            f"{text_cell(shown(label), label_width):{label_width}} {classes.shown(value):>7}"
            for label, value in zip(row.labels[:shown_k], row.values, strict=False)
        ]
        text = "  ".join(ranks) if not row.error else f"ERROR {row.error}"
        mark = f"  (folder: {shown(row.truth)})" if row.is_wrong else ""
        yield f"{path_cell(row.path, names):{names}}  {text}{mark}\n"


# Contact sheets.


class Tile(NamedTuple):
    """One picture of a sheet; `pixels` uint8[s, s, 3], or None if the file has an error."""

    row: Row
    pixels: np.ndarray | None


def sheets(path: str, total: int) -> list[str]:
    """The files of the contact sheets for `total` pictures: sheet.png, sheet_2.png, ...; or []."""
    stem, end = os.path.splitext(path)
    count = -(-total // PER_SHEET) if path else 0
    return [f"{stem}_{i}{end}" if i > 1 else path for i in range(1, count + 1)]


def draw_sheet(tiles: Sequence[Tile], classes: Classes) -> bytes:
    """A PNG of up to `PER_SHEET` pictures; a class that is not the folder's name is red."""
    columns = min(_SHEET_COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    size = columns * (_SIDE + _GAP) + _GAP, rows * (_SIDE + _TEXT + _GAP) + _GAP
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for i, tile in enumerate(tiles):
        y, x = divmod(i, columns)
        corner = _GAP + x * (_SIDE + _GAP), _GAP + y * (_SIDE + _TEXT + _GAP)
        _draw_tile(sheet, pen, tile, corner, classes)
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _draw_tile(
    sheet: Image.Image, pen: Any, tile: Tile, corner: tuple[int, int], classes: Classes
) -> None:
    row, (x, y) = tile.row, corner
    box = (x, y, x + _SIDE - 1, y + _SIDE - 1)
    if tile.pixels is None:
        pen.rectangle(box, fill="#eeeeee", outline=_RED)
        for i, line in enumerate(_wrapped(row.error, 8)):
            pen.text((x + 6, y + 6 + 16 * i), line, _RED, _font())
        texts = [("no prediction", _RED)]
    else:
        picture = Image.fromarray(tile.pixels)
        sheet.paste(picture.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), (x, y))
        if row.is_wrong:
            pen.rectangle(box, outline=_RED, width=3)
        value = f" {classes.shown(row.values[0])}"
        label = _fitting(
            fonts.drawable(shown(row.labels[0])), _SIDE - pen.textlength(value, _font(bold=True))
        )
        texts = [(label + value, _RED if row.is_wrong else _INK)]
        if row.is_wrong:
            texts.append((_fitting(fonts.drawable(f"folder: {shown(row.truth)}"), _SIDE), _RED))
    texts.append((_fitting(fonts.drawable(name_of(row.path)), _SIDE), _GREY))
    for i, (text, colour) in enumerate(texts):
        pen.text((x, y + _SIDE + 2 + 16 * i), text, colour, _font(i == 0, text))


_font = functools.partial(fonts.load, 13)


def _fitting(text: str, width: float) -> str:
    """The text, shortened in its middle to `width` pixels of the bold font."""
    length, short = len(text), text
    while _font(True, text).getlength(short) > width and length > 1:
        length -= 1
        short = f"{text[: length - length // 2]}…{text[len(text) - length // 2 :]}"
    return short


def _wrapped(text: str, most: int) -> list[str]:
    """Up to `most` lines that fit into a picture."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if _font().getlength(longer) <= _SIDE - 12:
            lines[-1] = longer
        else:
            lines.append(_fitting(word, _SIDE - 12))
    return [line for line in lines if line][:most]
