"""The door of the page to try a model on."""

import importlib.util
import socket
import types
from typing import Any

import pytest
from ml_collections import ConfigDict

from commands.demo import make_demo
from common.errors import ConfigError
from engine import model_source
from scripts import demo


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
