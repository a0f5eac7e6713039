"""Weights by name, against a stand-in for the Hugging Face hub on the loopback.

The real hub is not verified.
"""

import hashlib
import http.server
import json
import re
import threading

import ml_collections
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import constants
from huggingface_hub.utils import _cache_assets

from common import foreign
from common.errors import ConfigError, DataError
from common.foreign import files
from engine.checkpoint import model_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
W = {"w": np.arange(6, dtype=np.float32)}
WEIGHTS = safetensors.numpy.save(W)
NAME = "hf-hub:timm/tiny.a1"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does; `files` are {path: bytes} of each repository."""

    files: dict
    requests: list
    cut = 0  # bytes that are missing at the end of an answer

    def log_message(self, format, *arguments):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            left_out = 0 if self.path.startswith("/api/") else self.cut
            self.wfile.write(body[: len(body) - left_out])

    def json(self, content, status=200):
        self.answer(status, json.dumps(content).encode(), Content_Type="application/json")

    def do_GET(self):
        self.requests.append((self.command, self.path))
        if parts := re.fullmatch(r"/api/models/(\w+/[\w.]+)/tree/\w+\?.*", self.path):
            rows = self.files[parts[1]].items()
            return self.json(
                [{"type": "file", "path": p, "size": len(x), "oid": p} for p, x in rows]
            )
        model = r"/(?:api/models/)?(\w+/[\w.]+)(?:/(?:revision|resolve)/(\w+)(?:/(.*))?)?"
        if not (parts := re.fullmatch(model, self.path)):
            data = self.files.get(self.path)
            return self.answer(200 if data else 404, data or b"")
        repository, revision, file = parts.groups()
        if repository == "timm/gated":
            return self.answer(403, X_Error_Code="GatedRepo")
        if repository not in self.files:
            return self.answer(401, X_Error_Code="RepoNotFound")
        if revision not in (None, "main", COMMIT):
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if not file:
            return self.json({"id": repository, "sha": COMMIT, "siblings": []})
        if (data := self.files[repository].get(file)) is None:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        return self.answer(200, data, ETag=etag, X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stand-in, which huggingface_hub takes for the hub, with an empty cache."""
    handler = type("Hub", (Handler,), {"files": {}, "requests": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_cache_assets, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "good")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    handler.files["timm/tiny.a1"] = {"model.safetensors": WEIGHTS, "config.json": b'{"a": 1}'}
    yield handler
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub(hub, monkeypatch):
    """It comes once, with its descriptions; then the cache has it, without the hub as well."""
    download = foreign.fetch(NAME)
    name, path = download
    assert name == f"{NAME}@{COMMIT}" and f"/snapshots/{COMMIT}/model.safe" in path
    assert foreign.find(NAME) == foreign.find(name) == path
    source = files.read(path)
    np.testing.assert_array_equal(source.arrays["w"], W["w"])
    assert source.beside == {"config.json": {"a": 1}}
    hub.requests.clear()
    assert foreign.fetch(name) == download and not hub.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert foreign.fetch(name) == foreign.fetch(NAME) == download and not hub.requests


def test_the_config_keeps_the_commit(hub, monkeypatch):
    config = ml_collections.ConfigDict({"init_from": NAME, "init_env": "WEIGHTS"})
    assert model_source.init_from(config) == f"{NAME}@{COMMIT}"
    monkeypatch.setenv("WEIGHTS", NAME)
    config.init_from = ""
    assert model_source.init_from(config) == f"{NAME}@{COMMIT}"


def test_weights_of_pytorch_where_there_are_no_others(hub):
    hub.files["timm/tiny.a1"] = {"pytorch_model.bin": b"PK"}
    assert foreign.fetch(NAME)[1].endswith(f"/{COMMIT}/pytorch_model.bin")


FILE = f"https://web/tiny-{hashlib.sha256(WEIGHTS).hexdigest()[:8]}.safetensors"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("hf-hub:timm", ConfigError, r"hf-hub:OWNER/NAME\[@REVISION\]"),
        ("hf-hub:timm/none", DataError, "Repository Not Found for url: .*/timm/none/"),
        ("hf-hub:timm/gated", DataError, "Cannot access gated repo for url .*/timm/gated/"),
        (f"{NAME}@v9", DataError, "Revision Not Found for url: .*/v9"),
        ("hf-hub:timm/empty", DataError, "has neither model.safetensors nor pytorch_model.bin"),
        ("https://web/tiny-00000000.pth", DataError, "another SHA-256"),
        ("https://web/gone-00000000.pth", DataError, "404"),
        ("https://web/tiny.pth", ConfigError, "NAME-HASH.pth"),
    ],
)
def test_names_without_weights(hub, name, kind, words, tmp_path):
    hub.files |= {"/tiny-00000000.pth": b"x" * 80, "timm/empty": {"README.md": b"x"}}
    name = name.replace("https://web", constants.ENDPOINT)
    with pytest.raises(kind, match=words) as refused:
        foreign.fetch(name, "--config.init_from")
    message = str(refused.value)
    assert message.startswith(f"--config.init_from={name}") and len(message.splitlines()) == 1
    assert not list(tmp_path.rglob("tiny*"))


def test_no_network(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for is_offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        for name, revision in ((NAME, ""), (f"{NAME}@v1", " --revision=v1")):
            command = f"hf download timm/tiny.a1{revision} --local-dir=tiny.a1"
            with pytest.raises(DataError, match=f"{name} cannot be downloaded: .* type {command} "):
                foreign.fetch(name)
    with pytest.raises(DataError, match="cannot be downloaded: .*refused.* type curl -LO http://"):
        foreign.fetch("http://127.0.0.1:9/tiny-00000000.pth")


def test_a_download_that_is_cut_off(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library tries again a few times
    address = FILE.replace("https://web", constants.ENDPOINT)
    hub.files |= {"timm/tiny.a1": {"model.safetensors": WEIGHTS}, FILE[11:]: WEIGHTS}
    hub.cut = 5
    for name in (NAME, address):
        with pytest.raises(DataError, match="cannot be downloaded: ") as refused:
            foreign.fetch(name)
        assert len(str(refused.value).splitlines()) == 1
    assert not list(tmp_path.rglob("*.safetensors"))
    hub.cut = 0
    foreign.fetch(NAME)
    assert (path := foreign.fetch(address)[1]).startswith(str(tmp_path))
    hub.requests.clear()
    assert foreign.fetch(address) == (address, path) and foreign.find(path) == path
    np.testing.assert_array_equal(files.read(path).arrays["w"], W["w"])
    assert not hub.requests
