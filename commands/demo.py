"""A page to try a trained model on: what `python -m scripts.demo` opens in a browser.

A `Demo` answers one question at a time with a model that stays loaded. Its answers are the tables
of predict.py. NiceGUI, which is not among the requirements of training, shows them; all that the
page loads comes from this machine.
"""

import base64
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from commands.predict import boxes, classes, items, sentences, sources, texts
from commands.predict.model import prepare
from common import limits
from common.errors import ConfigError, UserError, one_line
from engine import model_source

_N_BEST = 3  # translations of a sentence
_WIDTH = 80  # columns of a table


class Answer(NamedTuple):
    """What the page shows: lines of text, and a JPEG if there is one."""

    text: str
    picture: bytes = b""


class Demo(NamedTuple):
    """A model that answers texts such as `example` or, where that is "", the contents of files."""

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
                return Answer(one_line(error))

    return Demo(f"{model.config.benchmark}: {model.source}", takes, example, guarded)


def _classes(model: model_source.Model) -> Callable[[bytes], Answer]:
    classifier = classes.Classifier(model, classes.Options())
    predictor = classifier.predictor(1)

    def answer(content: bytes) -> Answer:
        picture = sources.make_picture("photo", content, classifier.inputs)
        result = None if picture.inputs is None else predictor([picture.inputs])[0]
        rows = [classifier.row(picture, result)]
        text = "".join(classifier.table(["photo"], rows, _WIDTH))
        return Answer(text, picture.photo.encoded if result and picture.photo else b"")

    return answer


def _boxes(model: model_source.Model) -> Callable[[bytes], Answer]:
    detector = boxes.Detector(model, boxes.Options())
    predictor = detector.predictor(1)

    def answer(content: bytes) -> Answer:
        picture = sources.make_picture("photo", content, detector.inputs)
        result = None if picture.inputs is None else predictor([picture.inputs])[0]
        text = "".join(boxes.table([detector.row(picture, result)], _WIDTH))
        if result is None or picture.photo is None:
            return Answer(text)
        objects = detector.objects(picture.photo, result)
        return Answer(text, boxes.draw_objects(picture.photo.encoded, objects))

    return answer


def _sentences(model: model_source.Model) -> Callable[[str], Answer]:
    best = min(_N_BEST, model.config.beam_size)
    translator = sentences.Translator(model, sentences.Options(n_best=best), 1)

    def answer(text: str) -> Answer:
        (row,) = translator.rows(iter([texts.Line(" ".join(text.split()))]), 1)
        return Answer(row.error or "".join(sentences.plain_text(best, [row], _WIDTH)))

    return answer


def _items(model: model_source.Model) -> Callable[[str], Answer]:
    recommender = items.Recommender(model, items.Options(), 1)

    def answer(text: str) -> Answer:
        users = recommender.users([texts.Line(text)])
        found = "".join(items.table(recommender.rows(users), _WIDTH))
        return Answer(found or "type the id of a user")

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
            if answer.picture:
                data = base64.b64encode(answer.picture).decode()
                ui.image(f"data:image/jpeg;base64,{data}").classes("max-w-2xl")
            ui.label(answer.text).classes("whitespace-pre font-mono")

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
