"""The page to try a model on: its door, its answers, and the page itself in a headless Chromium."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from benchmarks.uses import Classes, Uses
from commands.predict import classes
from common.errors import ConfigError, DataError
from common.images.input_spec import NAMED
from engine.checkpoint import model_source
from scripts import demo
from tests.benchmarks.resnet.preparation.test_imagenet import encoded, picture
from tests.helpers.uses import stub
from tests.test_main import started

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None,
    reason="Gradio is not installed (requirements-demo.txt)",
)
MODEL = """
import json, signal, sys, types
from PIL import Image
from benchmarks import uses
from scripts import demo
from tests.helpers.uses import stub
model = types.SimpleNamespace(source="runs/cats", config=types.SimpleNamespace(benchmark="ssd"))
model.benchmark = types.SimpleNamespace(uses=stub(uses.Boxes))
"""
ANSWERS = {
    "Classes": {"cat": 0.9},
    "Sentences": "Ein Satz.",
    "Items": [[1, 2, 974, "Heat", "76.0%"]],
}
SHOW = """
for kind, answer in json.loads(sys.argv[1]).items():
    model.benchmark.uses = stub(getattr(uses, kind))
    page = demo.make_page(model, lambda text: answer)
    print(json.dumps(page(None if kind == "Classes" else "1")))
"""
# Each photo has a cat.
SERVE = """
demo.model_source.load = lambda *_: model
demo.make_answer = lambda *_: lambda path: (Image.open(path), [((9, 9, 50, 50), "cat 91%")])
signal.signal(signal.SIGINT, signal.default_int_handler)
demo.main(sys.argv[1:])
"""


def test_a_missing_gradio_is_one_line_before_a_model_is_read(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name != "gradio" and find_spec(name) or None
    )
    monkeypatch.setattr(model_source, "load", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as refused:
        demo.main(["--workdir=nowhere"])
    pip = f"{sys.executable} -m pip install -r requirements-demo.txt"
    assert refused.value.code == f"demo: the page needs Gradio: {pip}"


def test_a_port_in_use_or_a_wrong_path_is_one_line_before_a_model_is_read(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(model_source, "load", lambda *_: 1 / 0)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(SystemExit, match=f"^demo: --host=127.0.0.1 --port={port}: .*in use.*;"):
            demo.main(["--workdir=nowhere", f"--port={port}"])
    for flags in (["--workdir=s3://x"], ["--workdir=x", "--data_dir=s3://x"]):
        with pytest.raises(SystemExit, match=f"^demo: {flags[-1]}: s3:// is not supported"):
            demo.main([*flags, f"--port={port}"])


def test_a_model_without_answers_is_refused():
    model: Any = types.SimpleNamespace(
        source="run",
        benchmark=types.SimpleNamespace(uses=stub(Uses, hint="evaluate it")),
        config=ConfigDict({"benchmark": "x"}),
    )
    with pytest.raises(ConfigError, match="run is a model of the benchmark 'x'.*; evaluate it"):
        demo.make_answer(model)


def test_classes_have_bars_and_a_damaged_photo_has_a_reason(tmp_path):
    """A JPEG that is cut short keeps its bytes, as good ones do, and does not decode."""

    class Classifier(classes.Classifier):
        def __init__(self):
            self._names, self._top_k, self._options = ["a", "b", "a"], 3, classes.Options()
            self._value, self._named, self._right = "probability", 0, 0
            self._uses = stub(Classes, input_spec=NAMED["tensorflow"].at(32))

    predictor: Any = lambda rows: [{"logits": np.log([0.5, 0.3, 0.2])} for _ in rows]  # noqa: E731

    content, path = encoded(picture(1, (99, 99))), tmp_path / "x.jpg"
    path.write_bytes(content)
    bars = demo._classify(Classifier(), predictor, str(path))
    assert bars == pytest.approx({"a (0)": 0.5, "b": 0.3, "a (2)": 0.2})  # two have one name
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="damaged or cut short: it cannot be decoded"):
        demo._classify(Classifier(), predictor, str(path))


@needs_gradio
def test_the_page_shows_answers():
    """In a process of its own, because Gradio leaves sockets open."""
    output, _ = started([sys.executable, "-c", MODEL + SHOW, json.dumps(ANSWERS)]).communicate()
    nothing, text, table = map(json.loads, output.splitlines())
    assert nothing == {}  # where the photo was taken away
    assert text == ANSWERS["Sentences"] and table["data"] == ANSWERS["Items"]
    assert table["headers"] == ["user", "rank", "item", "title", "score"]


@needs_gradio
@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")
def test_chromium_shows_the_answer_and_asks_no_other_machine(tmp_path):
    """Ctrl-C ends the page, and leaves no photo behind."""
    (tmp_path / "cat.jpg").write_bytes(encoded(picture(1, (99, 99))))
    (tmp_path / "temporary").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--workdir=any", f"--port={port}", "--no_browser"]
    variables = {"TMPDIR": str(tmp_path / "temporary"), "http_proxy": "http://127.0.0.1:9"}
    with (
        started([sys.executable, "-c", MODEL + SERVE, *words], **variables) as process,
        ended(process),
    ):
        assert process.stdout.readline() == f"open http://127.0.0.1:{port} (Ctrl-C ends)\n"
        with Chromium(tmp_path / "profile") as page:
            page.open(f"http://127.0.0.1:{port}")
            page.wait("document.querySelector('input[type=file]')")
            page.choose_file("input[type=file]", str(tmp_path / "cat.jpg"))
            page.wait("document.body.innerText.includes('cat 91%')")
            assert "ssd: runs/cats" in page.evaluate("document.body.innerText")
            kinds = (f"http://127.0.0.1:{port}/", "data:", "blob:")
            assert [url for url in page.requests if not url.startswith(kinds)] == []
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert not any((tmp_path / "temporary").iterdir())


@contextlib.contextmanager
def ended(process, seconds=120):
    """Ends a process with the block, and after so many seconds."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()


class Chromium(contextlib.ExitStack):
    """A page of a headless Chromium, told what to do by the DevTools protocol over pipes."""

    def __init__(self, profile):
        super().__init__()
        (reads, self._commands), (self._answers, writes) = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "-", CHROMIUM]
            + [*flags, f"--user-data-dir={profile}"],
            pass_fds=(reads, writes),
            stderr=subprocess.DEVNULL,
        )
        self.enter_context(process)
        self.enter_context(ended(process))
        os.close(reads)
        os.close(writes)
        self._count, self._session, self._rest, self.requests = 0, {}, b"", []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        found = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        self._send("Network.enable")

    def _send(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._answers, 1 << 20)
                assert data, "Chromium has ended"
                self._rest += data
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._count:
                return answer["result"]

    def open(self, url):
        self._send("Page.navigate", url=url)

    def evaluate(self, expression):
        return self._send("Runtime.evaluate", expression=expression)["result"].get("value")

    def wait(self, expression):
        while not self.evaluate(f"Boolean({expression})"):
            time.sleep(0.1)

    def choose_file(self, selector, path):
        root = self._send("DOM.getDocument")["root"]["nodeId"]
        node = self._send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._send("DOM.setFileInputFiles", nodeId=node, files=[path])
