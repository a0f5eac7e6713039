"""A page to try a trained model on: what `python -m scripts.demo` opens in a browser.

A `Demo` answers one question at a time with a model that stays loaded. Its results are those of
predict.py: they come from the same functions. NiceGUI, which is not among the requirements of
training, shows them; all that the page loads comes from this machine.
"""

import base64
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from commands.predict import boxes, classes, items, sentences, sources, texts
from commands.predict.model import Leaves, prepare
from common import limits
from common.errors import ConfigError, UserError, one_line
from engine import model_source

_N_BEST = 3  # translations of a sentence
_TOP = 10  # items of a user


class Answer(NamedTuple):
    """What the page shows: a table, a JPEG if there is one, or why there is no answer."""

    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    picture: bytes = b""
    error: str = ""


class Demo(NamedTuple):
    """A model that answers: texts such as `example`; or, where that is "", contents of files."""

    title: str
    takes: str  # "a photo", "a sentence" or "the id of a user"
    example: str
    answer: Callable[[Any], Answer]


def make_demo(model: model_source.Model, accept_other_data: bool = False) -> Demo:
    """Loads a model and compiles it; UserError if it cannot answer, as in predict.py."""
    kinds: dict[str, tuple[str, str, Any]] = {
        "classes": ("a photo", "", _classes),
        "boxes": ("a photo", "", _boxes),
        "sentences": ("a sentence", "A sentence.", _sentences),
        "items": ("the id of a user", "1", _items),
    }
    uses = model.benchmark.uses
    if uses.answers not in kinds:
        raise ConfigError(
            f"{model.source} is a model of the benchmark {model.config.benchmark!r}, for which "
            f"there is no page; {uses.hint}"
        )
    takes, example, make = kinds[uses.answers]
    answer = make(prepare(model, accept_other_data))
    lock = threading.Lock()  # one question after the other

    def guarded(question: Any) -> Answer:
        with lock:
            try:
                return answer(question)
            except UserError as error:
                return Answer(error=one_line(error))

    return Demo(f"{model.config.benchmark}: {model.source}", takes, example, guarded)


def _classes(model: model_source.Model) -> Callable[[bytes], Answer]:
    classifier = classes.Classifier(model, classes.Options())
    predicted = _predicted(classifier)

    def answer(content: bytes) -> Answer:
        picture, result = predicted(content)
        row = classifier.row(picture, result)
        if row.error or picture.photo is None:
            return Answer(error=row.error)
        found = row.content["predictions"]
        rows = [(each["label"], f"{each['probability']:.1%}") for each in found]
        return Answer(("class", "probability"), rows, picture.photo.encoded)

    return answer


def _boxes(model: model_source.Model) -> Callable[[bytes], Answer]:
    detector = boxes.Detector(model, boxes.Options())
    predicted = _predicted(detector)

    def answer(content: bytes) -> Answer:
        picture, result = predicted(content)
        if result is None or picture.photo is None:
            return Answer(error=picture.error)
        objects = detector.objects(picture.photo, result)
        rows = [
            (each.label, f"{each.score:.1%}", *(f"{x:.0f}" for x in each.entry()["bbox"]))
            for each in objects
        ]
        drawn = boxes.draw_objects(picture.photo.encoded, objects)
        return Answer(("class", "score", "x", "y", "width", "height"), rows, drawn)

    return answer


def _predicted(
    model: sources.PictureModel,
) -> Callable[[bytes], tuple[sources.Picture, Leaves | None]]:
    """Loads the model; returns what makes a picture and its results of the content of a file."""
    predictor = model.predictor(1)

    def predicted(content: bytes) -> tuple[sources.Picture, Leaves | None]:
        picture = sources.make_picture("photo", content, model.inputs)
        return picture, None if picture.inputs is None else predictor([picture.inputs])[0]

    return predicted


def _sentences(model: model_source.Model) -> Callable[[str], Answer]:
    best = min(_N_BEST, model.config.beam_size)
    translator = sentences.Translator(model, sentences.Options(n_best=best), 1)

    def answer(text: str) -> Answer:
        line = texts.Line(" ".join(text.split()))
        (row,) = translator.rows(iter([line]), 1)
        rows = [(each["text"], f"{each['score']:.3f}") for each in row.content["translations"]]
        return Answer(("translation", "score"), rows, error=row.error)

    return answer


def _items(model: model_source.Model) -> Callable[[str], Answer]:
    recommender = items.Recommender(model, items.Options(top=_TOP), 1)

    def answer(text: str) -> Answer:
        users = list(recommender.users([texts.Line(text)]))[:1]
        if not users:
            return Answer(error="type the id of a user")
        (row,) = recommender.rows(iter(users))
        rows = [
            (str(each["item"]), each.get("title", ""), f"{each['score']:.1%}")
            for each in row.content.get("items", ())
        ]
        return Answer(("item", "title", "probability"), rows, error=row.error)

    return answer


# The page.


def serve(demo: Demo, host: str, port: int, opens: bool) -> None:
    """Serves the page until Ctrl-C; `opens` shows it in the user's browser."""
    from nicegui import ui  # pyright: ignore[reportMissingImports] (optional)

    ui.run(
        lambda: build_page(demo),
        host=host,
        port=port,
        title=demo.title,
        show=opens,
        reload=False,
        show_welcome_message=False,
        uvicorn_logging_level="warning",
    )


def build_page(demo: Demo) -> None:
    """Draws the page for one visitor."""
    from nicegui import run, ui  # pyright: ignore[reportMissingImports] (optional)

    ui.label(demo.title).classes("text-xl")

    async def show(question: Any) -> None:
        shown.clear()
        with shown:
            ui.spinner()
        answer = await run.io_bound(demo.answer, question)
        shown.clear()
        with shown:
            _show_answer(ui, answer)

    async def upload(event: Any) -> None:
        await show(await event.file.read())
        drop.reset()

    if demo.example:
        field = ui.input(demo.takes, value=demo.example).classes("w-full")
        field.on("keydown.enter", lambda: show(field.value))
        ui.button("Answer", on_click=lambda: show(field.value))
    else:
        drop = ui.upload(
            label=f"Drop {demo.takes} here",
            auto_upload=True,
            max_file_size=limits.IMAGE_BYTES,
            on_upload=upload,
            on_rejected=lambda: ui.notify(f"larger than {limits.IMAGE_BYTES:,} bytes"),
        )
    shown = ui.column().classes("w-full")


def _show_answer(ui: Any, answer: Answer) -> None:
    """Shows an answer with NiceGUI's `ui`."""
    if answer.error:
        ui.label(answer.error).classes("text-negative")
        return
    if answer.picture:
        data = base64.b64encode(answer.picture).decode()
        ui.image(f"data:image/jpeg;base64,{data}").classes("max-w-2xl")
    if not answer.rows:
        ui.label("nothing found")
        return
    columns = [
        {"name": name, "label": name, "field": name, "align": "left"} for name in answer.columns
    ]
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    ui.table(columns=columns, rows=rows)
