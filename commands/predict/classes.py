"""Classifies pictures: what predict.py does with a classifier."""

import dataclasses
import functools
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from PIL import Image

from benchmarks.exhibits import heated, sigmoid
from benchmarks.uses import Classes
from commands.predict import outputs, sources
from commands.predict.drawings import Drawings, Pen, enlarged
from commands.predict.model import Batch, Leaves, Request
from commands.predict.outputs import Row, path_cell, say, text_cell
from commands.predict.sources import Picture
from common.errors import ConfigError, one_line
from common.images.input_spec import prepare_image
from common.images.photos import Jpeg
from common.text import decoded, normal_name, shown, text_lines
from engine import locations
from engine.checkpoint import model_source

FORMATS = outputs.FORMATS
_TOP = 5  # classes that are written for a picture
_THRESHOLD = 0.5  # a label with a larger probability is written, where there may be several


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of predict.py for classifiers."""

    top_k: int | None = None
    threshold: float | None = None
    logits: bool = False
    embeddings: str = ""
    heatmap: str = ""
    labels: str = ""


def run(request: Request, options: Options, model: model_source.Model) -> int:
    """Writes the classes of each picture; returns the exit code."""
    if options.embeddings:
        if not options.embeddings.endswith(".npy"):
            raise ConfigError(f"--embeddings={options.embeddings}: must end with .npy")
        locations.check_file(options.embeddings, "--embeddings")
    uses = model.benchmark.uses
    if options.threshold is not None and not (isinstance(uses, Classes) and uses.several):
        raise ConfigError(
            f"--threshold={options.threshold}: pictures have one label for {model.source}, which "
            "is always the most probable class; --top_k chooses how many are written"
        )
    return sources.answer(lambda: Classifier(model, options, request.accept_other_data), request)


class Classifier(sources.PictureModel):
    """Names the classes of pictures, and counts the files in folders that are named as a class."""

    def __init__(
        self, model: model_source.Model, options: Options, accept_other_data: bool = False
    ):
        """Reads the names of the classes; ConfigError if `read_names` refuses --labels."""
        uses = model.benchmark.uses
        assert isinstance(uses, Classes)
        self._uses = uses
        self._names = read_names(options.labels, model, self._uses.num_classes, accept_other_data)
        size = self._uses.input_spec.size
        super().__init__(model, f"{len(self._names):,} classes, {size} px", self._uses.at_once)
        self._options = options
        usual = len(self._names) if uses.several else _TOP
        self._top_k = min(options.top_k or usual, len(self._names))
        self._least = _THRESHOLD if options.threshold is None else options.threshold
        self._value = "logit" if options.logits else "probability"
        self._number = ".3f" if options.logits else ".1%"  # how people read it
        self._joined = "logits" if options.logits else "probabilities"  # of several labels
        self._features: list[np.ndarray | None] = []
        self._named = self._right = 0
        self._drawings = Drawings(options.heatmap, "heatmap")

    def files(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        return self._drawings.files(paths)

    def predict(self, params: Any, model_state: Any, batch: Batch) -> Batch:
        rows = self._uses.classify(params, model_state, batch["image"])
        if not self._options.heatmap:
            return rows
        best = jnp.argmax(rows["logits"], axis=-1)
        heat = self._uses.heat_maps(params, model_state, batch["image"], best)
        if heat is None:
            raise ConfigError(
                f"--heatmap={self._options.heatmap}: the benchmark "
                f"{self.model.config.benchmark!r} has no heat maps"
            )
        return {**rows, "heat": heat}

    def inputs(self, photo: Jpeg) -> Leaves:
        return {"image": prepare_image(photo.encoded, self._uses.input_spec)}

    def row(self, picture: Picture, result: Leaves | None) -> Row:
        """The row of a picture; keeps its features, if wanted."""
        row = Row(picture.source, picture.error)
        if result is not None:
            row = self._ranked(picture, result["logits"])
            if self._options.heatmap and not row.error:
                self._draw(picture, result["logits"], result["heat"])
        truth = row.content.get("folder_label", "")
        self._named += bool(truth)
        self._right += bool(truth) and not other_folder(row)
        if self._options.embeddings:
            self._features.append(None if result is None else result["features"])
        return row

    def _values(self, logits: np.ndarray) -> np.ndarray:
        """float64[classes] of the logits f32[classes]: their probabilities, or, if asked, they."""
        values = logits.astype(np.float64)
        if self._options.logits:
            return values
        if self._uses.several:
            return sigmoid(values)
        shares = np.exp(values - values.max())
        return shares / shares.sum()

    def _ranked(self, picture: Picture, logits: np.ndarray) -> Row:
        """The row of a picture, for logits f32[classes]."""
        if not np.isfinite(logits).all():
            return Row(picture.source, "the model's logits are not finite: its run has diverged")
        best = np.argsort(-logits, kind="stable")[: self._top_k].tolist()
        if self._uses.several:
            best = [i for i in best if sigmoid(logits[i]) > self._least]
        # So many digits tell float32 values apart.
        values, digits = self._values(logits), 9 if self._options.logits else 6
        predictions = [
            {"label": self._names[i], "index": i, self._value: float(f"{values[i]:.{digits}g}")}
            for i in best
        ]
        folder = normal_name(os.path.basename(os.path.dirname(picture.path)))
        names = () if self._uses.several else self._names
        truth = next((name for name in names if normal_name(name) == folder), "")
        named = {"folder_label": truth} if truth else {}
        return Row(picture.source, "", {"predictions": predictions, **named})

    def _draw(self, picture: Picture, logits: np.ndarray, heat: np.ndarray) -> None:
        """Writes the photo with the heat map of its best class, f32[size, size]."""
        assert picture.photo is not None
        image, _ = enlarged(Image.open(io.BytesIO(picture.photo.encoded)).convert("RGB"))
        image, best = heated(image, heat, self._uses.input_spec), int(np.argmax(logits))
        text = f"{self._names[best]} {self._values(logits)[best]:{self._number}}"
        Pen(image).tag(0, 0, text, "black")
        self._drawings.save(picture.path, image)

    def write(self, request: Request, paths: Sequence[str], rows: Iterator[Row]) -> None:
        """Writes the rows, and the features."""
        table = functools.partial(self.table, paths)
        ranked = [name for rank in range(self._top_k) for name in self._columns(rank)]
        columns = ["path", *ranked, "folder_label", "error"]
        if self._uses.several:
            columns = ["path", "labels", self._joined, "error"]
        outputs.write_rows(request.out, request.format, rows, columns, self._cells, table)
        if self._options.embeddings:
            # A file without a prediction has a row of nan.
            channels = max((len(row) for row in self._features if row is not None), default=0)
            nothing = np.full(channels, np.nan, np.float32)
            file = io.BytesIO()
            np.save(file, np.stack([nothing if row is None else row for row in self._features]))
            outputs.save(self._options.embeddings, [file.getvalue()])

    def _columns(self, rank: int) -> list[str]:
        """The columns of a CSV for the class of a rank, which counts from 0."""
        value = "logit" if self._options.logits else "prob"
        return [f"{name}_{rank + 1}" for name in ("label", value, "index")]

    def _cells(self, row: Row) -> list[dict[str, Any]]:
        """The one line of a CSV for a picture, by column."""
        if self._uses.several:
            pairs = [(each["label"], str(each[self._value])) for each in row.content["predictions"]]
            labels, values = zip(*pairs, strict=True) if pairs else ((), ())
            return [{"labels": "|".join(labels), self._joined: "|".join(values)}]
        cells = {"folder_label": row.content.get("folder_label", "")}
        for rank, each in enumerate(row.content["predictions"]):
            values = (each["label"], each[self._value], each["index"])
            cells |= zip(self._columns(rank), values, strict=True)
        return [cells]

    def table(self, paths: Sequence[str], rows: Iterable[Row], width: int) -> Iterator[str]:
        """Lines for a terminal of `width` columns, one for each file and one above them."""
        names = min(max([len(shown(path)) for path in paths], default=4), width // 2, 60)
        label_width = max(4, min(max(len(shown(name)) for name in self._names), 20))
        shown_k = max(1, min(self._top_k, (width - names) // (label_width + 11)))
        head, none = "classes, most probable first", ""
        if self._uses.several:
            none = f"no label above {self._least:.0%}"
            head = f"labels above {self._least:.0%}, most probable first"
        yield f"{'file':{names}}  {head}\n"
        for row in rows:
            ranks = []
            for each in row.content.get("predictions", ())[:shown_k]:
                label = text_cell(each["label"], label_width)
                ranks.append(f"{label:{label_width}} {each[self._value]:>7{self._number}}")
            text = f"ERROR {row.error}" if row.error else "  ".join(ranks) or none
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
    return "" if not truth or row.content["predictions"][0]["label"] == truth else truth


def read_names(path: str, model: model_source.Model, count: int, accepts: bool) -> list[str]:
    """The names of the `count` classes: from the file of --labels, else the data, else numbers.

    ConfigError if the file cannot be read, or has another number of lines, or, unless that is what
    the user `accepts`, has the model's names in another order.
    """
    own = names = model_source.class_names(model.manifest, count)
    if path:
        try:
            data = epath.Path(path).read_bytes()
        except Exception as error:  # each file system raises its own types
            raise ConfigError(f"--labels={path} cannot be read: {one_line(error)}") from error
        names = text_lines(decoded(data, path, ConfigError))
        if len(names) != count:
            raise ConfigError(
                f"--labels={path} has {len(names):,} lines, but {model.source} has "
                f"{count:,} classes; the file needs one name per line, in the order of the classes"
            )
        # Two classes may share a name, such as ImageNet's cranes.
        olds, news = [*map(normal_name, own)], [*map(normal_name, names)]
        absent = {old for old, name in zip(olds, news, strict=False) if name != old}
        moved = [i for i, name in enumerate(news) if name in absent and name != olds[i]]
        if moved and not accepts:
            i = moved[0]
            raise ConfigError(
                f"--labels={path} has the model's names in another order: line {i + 1} is "
                f"{names[i]!r}, class {i + 1} of {model.source} is {own[i]!r}. Leave --labels out, "
                "or go on knowingly with --accept_other_data"
            )
    elif not names:
        say("NOTE the model has no class names, so numbers stand for them; --labels names them")
    return [name or str(i) for i, name in enumerate(names or [""] * count)]
