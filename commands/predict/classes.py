"""Classifies pictures: what predict.py does with a classifier."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from commands.predict import drawing, outputs, sources
from commands.predict.drawing import Tile
from commands.predict.model import Leaves, Request, flag
from commands.predict.outputs import FORMATS, Row, path_cell, say, shown, text_cell
from commands.predict.sources import Picture
from common import console, limits
from common.errors import ConfigError, one_line
from common.images.input_spec import prepare_image
from common.images.photos import Jpeg
from common.text import normal_name, text_lines
from engine import model_source

PER_SHEET = 80  # pictures on a contact sheet
_flag = functools.partial(flag, "classifiers")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for classifiers."""

    formats = FORMATS

    top_k: int = _flag(5, "classes for each picture (5)", console.integer(1))
    logits: bool = _flag(False, "write logits instead of probabilities")
    embeddings: str = _flag("", "file .npy for the features, float32[files, channels]", end=".npy")
    contact_sheet: str = _flag("", "file .png: the pictures with their classes", end=".png")
    labels: str = _flag("", "file with a class name per line; default: the model's own")


class Rank(NamedTuple):
    """A class, its number from 0, and its probability or logit."""

    label: str
    number: int
    value: float


def run(request: Request, options: Options, model: model_source.Model, stdin: Iterable[str]) -> int:
    """Writes the classes of each picture; see `commands.predict.run`."""
    load = functools.partial(Classifier, model, options, request.accept_other_data)
    return sources.answer(load, request, stdin)


class Classifier(sources.PictureModel):
    """Names the classes of pictures, and counts the files in folders that are named as a class."""

    def __init__(
        self, model: model_source.Model, options: Options, accept_other_data: bool = False
    ):
        """Reads the names of the classes; ConfigError as of `read_names`."""
        super().__init__(model)
        self._options = options
        self._names = read_names(options.labels, model, accept_other_data)
        self._top_k = min(options.top_k, len(self._names))
        self._value = "logit" if options.logits else "prob"
        self._features: list[np.ndarray | None] = []
        self._tiles: list[Tile] = []
        self._named = self._right = 0

    @property
    def summary(self) -> str:
        benchmark: Any = self.model.benchmark
        return f"{len(self._names):,} classes, {benchmark.input_spec.size} px"

    @property
    def columns(self) -> Sequence[str]:
        named = [name for rank in range(self._top_k) for name in self._columns(rank)]
        return ["path", *named, "folder_label", "error"]

    def _columns(self, rank: int) -> list[str]:
        return [f"{name}_{rank + 1}" for name in ("label", self._value, "index")]

    def files(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        """The contact sheets: sheet.png, sheet_2.png, ..."""
        path = self._options.contact_sheet
        stem, end = os.path.splitext(path)
        count = -(-len(paths) // PER_SHEET) if path else 0
        every = range(1, count + 1)
        return [("contact_sheet", f"{stem}_{i}{end}" if i > 1 else path) for i in every]

    def predict(self, params: Any, model_state: Any, batch: Any) -> Any:
        return self.model.benchmark.uses.classify(params, model_state, batch["image"])

    def inputs(self, photo: Jpeg) -> Leaves:
        benchmark: Any = self.model.benchmark
        return {"image": prepare_image(photo.encoded, benchmark.input_spec)}

    def row(self, picture: Picture, result: Leaves | None) -> Row:
        """The row of a picture; keeps its features and its tile of a contact sheet, if wanted."""
        row, pixels = Row(picture.source, picture.error), None
        if result is not None and picture.inputs is not None:
            row, pixels = self._ranked(picture, result["logits"]), picture.inputs["image"]
        truth, folder = row.content.get("folder_label", ""), other_folder(row)
        self._named += bool(truth)
        self._right += bool(truth) and not folder
        if self._options.embeddings:
            self._features.append(None if result is None else result["features"])
        if self._options.contact_sheet:
            best = row.answers[0] if row.answers else Rank("", 0, 0.0)
            value = self._shown(best.value)
            self._tiles.append(Tile(picture.path, row.error, pixels, best.label, value, folder))
        return row

    def _ranked(self, picture: Picture, logits: np.ndarray) -> Row:
        """The row of a picture, for logits f32[classes]."""
        if not np.isfinite(logits).all():
            return Row(picture.source, "the model's logits are not finite: its run has diverged")
        best = np.argsort(-logits, kind="stable")[: self._top_k].tolist()
        kind, values, digits = "logit", logits.astype(np.float64), 9  # that tell float32 apart
        if not self._options.logits:
            kind, digits = "probability", 6
            values = np.exp(values - values.max())
            values /= values.sum()
        ranks = [Rank(self._names[i], i, float(f"{values[i]:.{digits}g}")) for i in best]
        folder = normal_name(os.path.basename(os.path.dirname(picture.path)))
        truth = next((name for name in self._names if normal_name(name) == folder), "")
        predictions = [{"label": r.label, "index": r.number, kind: r.value} for r in ranks]
        cells: dict[str, Any] = {"folder_label": truth}
        for number, rank in enumerate(ranks):
            values = (rank.label, rank.value, rank.number)
            cells |= zip(self._columns(number), values, strict=True)
        content = {"predictions": predictions, **({"folder_label": truth} if truth else {})}
        return Row(picture.source, "", content, [cells], ranks)

    def _shown(self, value: float) -> str:
        """A probability or logit as text for the user."""
        return f"{value:.3f}" if self._options.logits else f"{value:.1%}"

    def write(self, request: Request, paths: Sequence[str], rows: Iterator[Row]) -> None:
        """Writes the rows, the contact sheets and the features."""
        table = functools.partial(self.table, paths)
        rows = self._drawn(paths, rows)
        outputs.write_rows(request.out, request.format, rows, self.columns, table)
        if self._options.embeddings:
            # A file without a prediction has a row of nan.
            channels = max((len(row) for row in self._features if row is not None), default=0)
            nothing = np.full(channels, np.nan, np.float32)
            file = io.BytesIO()
            np.save(file, np.stack([nothing if row is None else row for row in self._features]))
            outputs.save(self._options.embeddings, [file.getvalue()])

    def _drawn(self, paths: Sequence[str], rows: Iterable[Row]) -> Iterator[Row]:
        """Passes the rows on, and draws the contact sheets on the way."""
        sheets = iter(self.files(paths))
        for done, row in enumerate(rows, 1):
            if self._tiles and (len(self._tiles) == PER_SHEET or done == len(paths)):
                _, path = next(sheets)
                outputs.save(path, [drawing.draw_sheet(self._tiles)])
                self._tiles.clear()
            yield row

    def table(self, paths: Sequence[str], rows: Iterable[Row], width: int) -> Iterator[str]:
        """Lines for a terminal of `width` columns, one for each file and one above them."""
        names = min(max([len(shown(path)) for path in paths], default=4), width // 2, 60)
        label_width = max(4, min(max(len(shown(name)) for name in self._names), 20))
        shown_k = max(1, min(self._top_k, (width - names) // (label_width + 11)))
        yield f"{'file':{names}}  {'classes, most probable first'}\n"
        for row in rows:
            ranks = [
                f"{text_cell(rank.label, label_width):{label_width}} {self._shown(rank.value):>7}"
                for rank in row.answers[:shown_k]
            ]
            text = f"ERROR {row.error}" if row.error else "  ".join(ranks)
            mark = f"  (folder: {shown(folder)})" if (folder := other_folder(row)) else ""
            yield f"{path_cell(row.source['path'], names):{names}}  {text}{mark}\n"

    def score(self) -> str:
        """The accuracy; "" without folders that are named as classes."""
        if not self._named:
            return ""
        return (
            f"top 1 accuracy {self._right / self._named:.2%}: {self._right:,} of {self._named:,} "
            "files in folders that are named as classes"
        )


def other_folder(row: Row) -> str:
    """The class whose name the folder has, if the best class is another one; else ""."""
    truth = row.content.get("folder_label", "")
    return "" if not truth or row.answers[0].label == truth else truth


def read_names(path: str, model: model_source.Model, accept_other_data: bool) -> list[str]:
    """The names of the model's classes: those of the file of --labels, else its own, else numbers.

    Raises:
      ConfigError: the file cannot be read, or has another number of lines; or it has the model's
        own names in another order, and `accept_other_data` is False.
    """
    count = model.config.num_label_classes
    own = names = model_source.class_names(model.manifest, count)
    if path:
        limits.check_file(path, ConfigError)
        try:
            text = epath.Path(path).read_bytes().decode("utf-8-sig")
        except Exception as error:  # each file system raises its own types
            raise ConfigError(f"--labels={path} cannot be read: {one_line(error)}") from error
        names = text_lines(text)
        if len(names) != count:
            raise ConfigError(
                f"--labels={path} has {len(names):,} lines, but {model.source} has "
                f"{count:,} classes; the file needs one name per line, in the order of the classes"
            )
        # Two classes may share a name, such as ImageNet's cranes.
        absent = {mine for mine, name in zip(own, names, strict=False) if name != mine}
        moved = [i for i, name in enumerate(names) if name in absent and name != own[i]]
        if moved and not accept_other_data:
            i = moved[0]
            raise ConfigError(
                f"--labels={path} has the model's own names in another order: line {i + 1} is "
                f"{names[i]!r}, class {i + 1} of {model.source} is {own[i]!r}. Leave --labels out, "
                "or go on knowingly with --accept_other_data"
            )
    elif not names:
        say("NOTE the model has no class names, so numbers stand for them; --labels names them")
    return [name or str(i) for i, name in enumerate(names or [""] * count)]
