"""Writes the predictions: as text, as a contact sheet, and the features as an array."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from errors import OutputError, is_of_files, one_line
from modes.predict import rows, sheet
from modes.predict.rows import Classes, Row
from ops import files
from ops.progress import Progress


@dataclasses.dataclass(frozen=True)
class Request:
    """What a person asks for; predict.py explains each flag.

    Attributes:
      sources: as for `sources.find`.
      model: a workdir or a checkpoint; or a file or folder of another library's weights.
      recipe: for such weights, see `trained.load_foreign`; None where `model` is a workdir.
      kind: "probability" or "logit".
      format: one of `rows.FORMATS`, or "table".
      out: the file of predictions; "" writes them to the standard output.
      threads: that read and decode.
    """

    sources: Sequence[str]
    model: str
    recipe: Any
    checkpoint: str
    top_k: int
    kind: str
    format: str
    out: str
    embeddings: str
    contact_sheet: str
    labels: str
    batch_size: int
    threads: int


class Answer(NamedTuple):
    """A row with the picture as the model saw it and its features; None where it has an error."""

    row: Row
    pixels: np.ndarray | None  # uint8[size, size, 3]
    features: np.ndarray | None  # f32[channels]


def write(
    request: Request, classes: Classes, paths: Sequence[str], answers: Iterator[Answer]
) -> None:
    """Writes all answers; the files are there completely or not at all.

    Raises:
      OutputError: a file cannot be written.
    """
    features: list[np.ndarray | None] = []
    watched = _watch(request, classes, answers, len(paths), features)
    if request.format == "table":
        width = shutil.get_terminal_size().columns
        text = rows.table(watched, classes, paths, width)
    else:
        text = rows.lines(request.format, watched, classes)
    if request.out:
        _save(request.out, (line.encode() for line in text))
    else:
        for line in text:
            sys.stdout.buffer.write(line.encode())
            sys.stdout.buffer.flush()
    if request.embeddings:
        _save(request.embeddings, [_array(features)])


def sheets(path: str, total: int) -> list[str]:
    """The files of the contact sheets for `total` pictures: sheet.png, sheet_2.png, ...; or []."""
    stem, end = os.path.splitext(path)
    count = -(-total // sheet.PER_SHEET) if path else 0
    return [f"{stem}_{i}{end}" if i > 1 else path for i in range(1, count + 1)]


def _watch(
    request: Request,
    classes: Classes,
    answers: Iterator[Answer],
    total: int,
    features: list[np.ndarray | None],
) -> Iterator[Row]:
    """Passes the rows on; draws the contact sheets and keeps the features on the way."""
    progress, tiles = Progress(total), []
    sheet_paths = iter(sheets(request.contact_sheet, total))
    for done, answer in enumerate(answers, 1):
        if request.embeddings:
            features.append(answer.features)
        if request.contact_sheet:
            tiles.append(sheet.Tile(answer.row, answer.pixels))
            if len(tiles) == sheet.PER_SHEET or done == total:
                _save(next(sheet_paths), [sheet.draw(tiles, classes)])
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


def _save(path: str, parts: Iterator[bytes] | list[bytes]) -> None:
    try:
        files.write(path, parts)
    except Exception as error:
        if not is_of_files(error):
            raise
        raise OutputError(f"cannot write {path}: {one_line(error)}") from error
    print(f"wrote {path}", file=sys.stderr, flush=True)
