"""Opens a page in the browser to try a trained model on: photos, sentences, or users.

    python -m scripts.demo --workdir=runs/ssd_digits

The page is on http://127.0.0.1:8080, for this machine only, and sends nothing elsewhere. It needs
Gradio: pip install -r requirements-demo.txt. predict.py gives the same answers.
"""

import functools
import importlib.util
import io
import os
import socket
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from common import entry
from engine import environment

environment.set_defaults(TF_CPP_MIN_LOG_LEVEL="3")

# The environment decides how libraries start.
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from benchmarks.uses import Boxes, Classes, Items, Sentences  # noqa: E402
from commands import predict  # noqa: E402
from commands.predict import boxes, classes, items, sentences, sources  # noqa: E402
from commands.predict.model import Leaves, Predictor  # noqa: E402
from commands.predict.outputs import Row  # noqa: E402
from common import cli, limits  # noqa: E402
from common.errors import ConfigError, DataError, UserError, one_line  # noqa: E402
from engine import locations  # noqa: E402
from engine.checkpoint import model_source  # noqa: E402

_SIDE = 960  # pixels of the longer side of a photo with boxes, whose lines are 3 pixels wide


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    parser = cli.Parser(prog="demo", description=cli.summary(__doc__))
    add = parser.add_argument
    add("--workdir", required=True, help="the run's folder, or WORKDIR/checkpoints/STEP")
    add("--checkpoint", default="latest", help="latest, best or a step")
    add("--data_dir", help="where the vocabulary or the ratings are, if not where the run had them")
    add("--accept_other_data", action="store_true", help="though the data have other classes now")
    add("--host", default="127.0.0.1", help="the address; 0.0.0.0 lets other machines in")
    add("--port", type=cli.integer(1, 65535), default=8080, help="the port of the page")
    add("--no_browser", action="store_true", help="opens no browser")
    args = parser.parse_args(cli.underscored(sys.argv[1:] if argv is None else argv))
    try:
        if importlib.util.find_spec("gradio") is None:
            pip = f"{sys.executable} -m pip install -r requirements-demo.txt"
            raise ConfigError(f"the page needs Gradio: {pip}")
        try:
            socket.create_server((args.host, args.port)).close()
        except OSError as error:
            address = f"--host={args.host} --port={args.port}"
            raise ConfigError(
                f"{address}: {one_line(error)}; give another --port or --host"
            ) from error
        environment.show_log(sys.stderr)
        workdir = locations.check_path(args.workdir, "--workdir")
        folder = args.data_dir and locations.check_path(args.data_dir, "--data_dir")
        model = model_source.load(workdir, args.checkpoint)
        keys = {"data_dir": folder} if folder else {}
        answer = make_answer(model, args.accept_other_data, **keys)
    except UserError as error:
        sys.exit(f"demo: {error}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # of the photos that are dropped
        direct = urllib.request.getproxies().get("no", "")  # Gradio looks for its own page
        os.environ["no_proxy"] = f"{direct},localhost,{args.host}"
        page = make_page(model, answer)
        print(f"open http://{args.host}:{args.port} (Ctrl-C ends)", flush=True)
        page.launch(
            server_name=args.host,
            server_port=args.port,
            inbrowser=not args.no_browser,
            max_file_size=limits.IMAGE_BYTES,
            footer_links=[],
            quiet=True,
            run_history=False,
            share=False,
            ssr_mode=False,
        )


def make_page(model: model_source.Model, answer: Callable[[str], Any]) -> Any:
    """The page, a gradio.Interface, which shows what `answer` returns."""
    import gradio  # pyright: ignore[reportMissingImports] (optional)

    photo = gradio.Image(label="Photo", sources=["upload", "clipboard"])
    # The file as it was given: Gradio would decode it, and predict.py says what is wrong with it.
    photo.preprocess = lambda payload: payload and payload.path
    question, uses = photo, model.benchmark.uses
    if isinstance(uses, Classes):
        shown = gradio.Label(label="Classes")
    elif isinstance(uses, Boxes):
        shown = gradio.AnnotatedImage(label="Objects with scores of 30% and more")
    elif isinstance(uses, Sentences):
        question = gradio.Textbox("A sentence.", label="Sentence")
        shown = gradio.Textbox(label="Translations, the best first")
    else:
        question = gradio.Textbox("1", label="User")
        shown = gradio.Dataframe(label="Recommendations", headers=[*items.COLUMNS[:5]])

    def reply(text: str | None) -> Any:
        try:
            return None if text is None else answer(text)  # None: the photo was taken away
        except UserError as error:
            raise gradio.Error(one_line(error), duration=None, print_exception=False) from error

    return gradio.Interface(
        reply,
        question,
        shown,
        title=f"{model.config.benchmark}: {model.source}",
        live=question is photo,  # answers at once, without a button
        analytics_enabled=False,
        flagging_mode="never",
    )


def make_answer(
    model: model_source.Model, accept_other_data: bool = False, **keys: Any
) -> Callable[[str], Any]:
    """Loads a model and compiles it; UserError if it cannot answer, as in predict.py.

    The result answers the path of a photo, a sentence, or users as --user of predict.py, with what
    Gradio's component shows, or with UserError.
    """
    uses = model.benchmark.uses
    if not isinstance(uses, (Classes, Boxes, Sentences, Items)):
        raise ConfigError(
            f"{model.source} is a model of the benchmark {model.config.benchmark!r}, for which "
            f"there is no page; {uses.hint}"
        )
    model = predict.prepare(model, accept_other_data, **keys)
    if isinstance(uses, Sentences):
        options = sentences.Options(n_best=min(3, uses.beams))
        return functools.partial(_translate, sentences.Translator(model, options, 1))
    if isinstance(uses, Items):
        return functools.partial(_recommend, items.Recommender(model, items.Options(), 1))
    if isinstance(uses, Boxes):
        detector = boxes.Detector(model, boxes.Options())
        return functools.partial(_detect, detector, detector.predictor(1))
    classifier = classes.Classifier(model, classes.Options())
    return functools.partial(_classify, classifier, classifier.predictor(1))


def _classify(classifier: classes.Classifier, predictor: Predictor, path: str) -> dict[str, float]:
    picture, result = _look(classifier, predictor, path)
    best = _content(classifier.row(picture, result))["predictions"]
    names = [each["label"] for each in best]  # two classes may share a name
    return {
        name if names.count(name) == 1 else f"{name} ({each['index']})": each["probability"]
        for name, each in zip(names, best, strict=True)
    }


def _detect(
    detector: boxes.Detector, predictor: Predictor, path: str
) -> tuple[Image.Image, list[tuple[Any, str]]]:
    """The photo, and (box or mask, text) of each object."""
    picture, result = _look(detector, predictor, path)
    assert picture.photo is not None
    image = Image.open(io.BytesIO(picture.photo.encoded)).convert("RGB")
    times = _SIDE / max(image.size)
    image = image.resize([round(times * side) for side in image.size])
    objects = []
    for each in detector.objects(picture.photo, result):
        y0, x0, y1, x1 = (max(0, round(times * edge)) for edge in each.box)
        region = (x0, y0, x1, y1)
        if each.inside:
            mask = Image.fromarray(each.inside()).resize(image.size)
            region = np.asarray(mask) / 2  # half opaque
        objects.append((region, f"{each.label} {each.score:.0%}"))
    return image, objects


def _look(
    model: sources.PictureModel, predictor: Predictor, path: str
) -> tuple[sources.Picture, Leaves]:
    """A photo, and what the model computes for it."""
    picture = sources.load_picture(path, model.parts)
    if picture.error:
        raise DataError(picture.error)
    return picture, predictor([picture.parts[0]()])[0]


def _translate(translator: sentences.Translator, sentence: str) -> str:
    (row,) = translator.rows(iter([sources.Line(" ".join(sentence.split()))]), 1)
    return "\n".join(each["text"] for each in _content(row)["translations"])


def _recommend(recommender: items.Recommender, users: str) -> list[list[Any]]:
    return [
        [row.source["user"], rank, each["item"], each.get("title", ""), f"{each['score']:.1%}"]
        for row in recommender.rows(recommender.users([sources.Line(users)]))
        for rank, each in enumerate(_content(row, f"user {row.source['user']}: ")["items"], 1)
    ]


def _content(row: Row, of: str = "") -> Mapping[str, Any]:
    """What a row has; DataError if it has an error."""
    if row.error:
        raise DataError(f"{of}{row.error}")
    return row.content


if __name__ == "__main__":
    entry.run(main)
