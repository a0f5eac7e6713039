"""Answers one question at a time with a trained model, which stays loaded.

The results are those of predict.py: they come from the same functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine import compile_cache
from engine import mesh as meshes
from errors import ConfigError, UserError, one_line
from modes import trained
from modes.predict import boxes, classes, drawing, items, pictures, sentences, sources, texts
from modes.predict.pictures import Tally
from modes.predict.predictor import exact
from modes.predict.request import say
from ops.images import photos

_N_BEST = 3  # translations of a sentence
_TOP = 10  # items of a user


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the page shows.

    Attributes:
      columns, rows: of a table, as text.
      picture: a JPEG; b"" for none.
      error: why there is no answer, in one line; "" if there is one.
    """

    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    picture: bytes = b""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Demo:
    """A model that answers.

    Attributes:
      title: of the page.
      takes: "a photo", "a sentence" or "the id of a user".
      example: of what to type; "" for photos.
      answer: of a text; or, of photos, of the content of a file.
    """

    title: str
    takes: str
    example: str
    answer: Callable[..., Answer]


def make(model: trained.Trained, accept_other_data: bool = False) -> Demo:
    """Loads a model and compiles it.

    Raises:
      UserError: its vocabulary or its ratings are missing, it is of no kind that answers, or its
        data have other classes by now and `accept_other_data` is False.
    """
    photos.quiet()
    kinds = {"classes": _classes, "boxes": _boxes, "sentences": _sentences, "items": _items}
    uses = model.benchmark.uses
    if uses.answers not in kinds:
        raise ConfigError(
            f"{model.source} is a model of the benchmark {model.config.benchmark!r}, for which "
            f"there is no page; {uses.hint}"
        )
    model.check_data(accept_other_data, say)
    meshes.check_platform()
    compile_cache.use(model.config.compilation_cache)
    takes, example, answer = kinds[uses.answers](exact(model))
    return Demo(f"{model.config.benchmark}: {model.source}", takes, example, _one_by_one(answer))


def _one_by_one(answer: Callable[..., Answer]) -> Callable[..., Answer]:
    """Answers one question after the other; a fault of one is its answer."""
    lock = threading.Lock()

    def guarded(*question: Any) -> Answer:
        with lock:
            try:
                return answer(*question)
            except UserError as error:
                return Answer(error=one_line(error))

    return guarded


def _classes(model: trained.Trained) -> tuple[str, str, Callable[..., Answer]]:
    names = classes.class_names(classes.Options(), model, False)
    predictor, inputs = classes.opened(model, 1)
    predictor.compile(sources.warm_up(inputs))

    def answer(content: bytes) -> Answer:
        with _predicted(content, predictor, inputs) as (picture, result):
            if result is None:
                return Answer(error=picture.error)
            row = names.row(picture.path, result["logits"], "")
            rows = [
                (label, f"{value:.1%}") for label, value in zip(row.labels, row.values, strict=True)
            ]
            return Answer(("class", "probability"), rows, picture.photo.encoded, row.error)

    return "a photo", "", answer


def _boxes(model: trained.Trained) -> tuple[str, str, Callable[..., Answer]]:
    model.check_finite()
    predictor, inputs = boxes.opened(model, 1)
    predictor.compile(sources.warm_up(inputs))
    uses, categories = model.benchmark.uses, model.manifest["categories"]
    finder = boxes.Finder(uses, categories, boxes.Options(), "table")

    def answer(content: bytes) -> Answer:
        with _predicted(content, predictor, inputs) as (picture, result):
            row = finder.row(picture, result)
            if row.error:
                return Answer(error=row.error)
            rows = [
                (each.label, f"{each.score:.1%}", *(f"{x:.0f}" for x in each.bbox))
                for each in row.objects
            ]
            drawn = drawing.photo(picture.photo.encoded, row.objects)
            return Answer(("class", "score", "x", "y", "width", "height"), rows, drawn)

    return "a photo", "", answer


def _sentences(model: trained.Trained) -> tuple[str, str, Callable[..., Answer]]:
    best = min(_N_BEST, model.config.beam_size)
    uses, predictor = sentences.opened(model, sentences.Options(n_best=best), 1)

    def answer(text: str) -> Answer:
        translator = sentences.Sentences(uses, predictor)
        line = texts.Line(" ".join(text.split()))
        (row,) = translator.rows(iter([line]), 1)
        rows = [(each.text, f"{each.score:.3f}") for each in row.translations]
        return Answer(("translation", "score"), rows, error=row.error)

    return "a sentence", "A sentence.", answer


def _items(model: trained.Trained) -> tuple[str, str, Callable[..., Answer]]:
    uses, predictor = items.opened(model, items.Options(), 1)

    def answer(text: str) -> Answer:
        users = list(items.user_ids([texts.Line(text)]))[:1]
        if not users:
            return Answer(error="type the id of a user")
        (row,) = items.best_items(iter(users), _TOP, uses, predictor)
        rows = [(str(each.item), each.title, f"{each.score:.1%}") for each in row.items]
        return Answer(("item", "title", "probability"), rows, error=row.error)

    return "the id of a user", "1", answer


@contextlib.contextmanager
def _predicted(content: bytes, predictor: Any, inputs: Any) -> Iterator[tuple[Any, Any]]:
    """The picture and its row, None where the picture has an error, as predict.py has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "photo")  # the browser's name may be too long
        with open(path, "wb") as file:
            file.write(content)
        picture = sources.load(path, inputs)
        ((picture, result),) = pictures.in_batches([picture], predictor, Tally())
        yield picture, result
