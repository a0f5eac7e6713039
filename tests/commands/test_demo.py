"""The door of the page to try a model on."""

import importlib.util
import socket
import types
from typing import Any, cast

import numpy as np
import pytest
from ml_collections import ConfigDict

from commands import demo as demos
from commands.demo import make_demo
from commands.predict import classes
from common.errors import ConfigError
from common.images.input_spec import NAMED, prepare_image
from engine import model_source
from scripts import demo
from tests.benchmarks.resnet.preparation.test_imagenet import encoded, picture


def test_a_missing_nicegui_is_one_line_before_a_model_is_read(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name != "nicegui" and find_spec(name) or None
    )
    monkeypatch.setattr(model_source, "load", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as refused:
        demo.main(["--workdir=nowhere"])
    assert str(refused.value) == "demo: the page needs NiceGUI: pip install 'nicegui>=3.18,<4'"


def test_a_port_in_use_is_one_line_before_a_model_is_read(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(model_source, "load", lambda *_: 1 / 0)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(SystemExit, match=f"^demo: --host=127.0.0.1 --port={port}: .*in use.*;"):
            demo.main(["--workdir=nowhere", f"--port={port}"])


def test_a_model_without_answers_is_refused():
    uses = types.SimpleNamespace(answers="", hint="evaluate it")
    model: Any = types.SimpleNamespace(
        source="run",
        benchmark=types.SimpleNamespace(uses=uses),
        config=ConfigDict({"benchmark": "x"}),
    )
    with pytest.raises(ConfigError, match="run is a model of the benchmark 'x'.*; evaluate it"):
        make_demo(model)


def test_a_damaged_photo_is_named_and_not_shown(monkeypatch):
    """A JPEG that is cut short keeps its bytes, as good ones do, and does not decode."""

    class Classifier(classes.Classifier):
        def __init__(self, *_):
            self._names, self._top_k, self._options = ["a", "b"], 2, classes.Options()
            self._value, self._named, self._right = "probability", 0, 0

        def inputs(self, photo):
            return {"image": prepare_image(photo.encoded, NAMED["tensorflow"].at(32))}

    logits = {"logits": np.array([0.0, 1.0])}
    monkeypatch.setattr(Classifier, "predictor", lambda *_: lambda rows: [logits for _ in rows])
    monkeypatch.setattr(classes, "Classifier", Classifier)
    answer, whole = demos._classes(cast(Any, None)), encoded(picture(1, (99, 99)))
    assert answer(whole).picture and "b " in answer(whole).text
    text, shown = answer(whole[: len(whole) // 2])
    assert "ERROR damaged or cut short: it cannot be decoded" in text and shown == b""
