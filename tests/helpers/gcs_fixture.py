"""The fixture `gcs`: this process and its children see the server of gcs_server.py as gs://."""

import importlib
import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest

# Variables that would lead around the server. libcurl prefers the lower-case ones.
_HIDDEN = (
    *("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "NO_GCE_CHECK"),
    *("https_proxy", "http_proxy", "all_proxy", "no_proxy", "ALL_PROXY"),
)


class Cloud:
    """The server from a test's point of view; `env` is what makes clients find it."""

    def __init__(self, port: int, folder: Path):
        self._url = f"http://127.0.0.1:{port}/_fake/"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._buckets = 0
        address, authority = f"127.0.0.1:{port}", str(folder / "ca.pem")
        (folder / "gcloud").mkdir()
        self.env = {
            "HTTPS_PROXY": f"http://{address}",
            "NO_PROXY": "127.0.0.1,localhost",
            "CURL_CA_BUNDLE": authority,  # TensorFlow
            "TENSORSTORE_CA_BUNDLE": authority,
            "REQUESTS_CA_BUNDLE": authority,  # google-auth, google-cloud-storage
            "SSL_CERT_FILE": authority,
            "GCE_METADATA_HOST": address,  # TensorFlow, google-auth
            "GCE_METADATA_IP": address,  # google-auth
            "GCE_METADATA_ROOT": address,  # TensorStore
            "CLOUDSDK_CONFIG": str(folder / "gcloud"),  # hides a developer's own credentials
        }

    def _ask(self, method: str, door: str, body: bytes | None = None) -> bytes:
        url = self._url + urllib.parse.quote(door)
        with self._open(urllib.request.Request(url, body, method=method)) as answer:
            return answer.read()

    def reset(self) -> None:
        self._ask("POST", "reset")

    def bucket(self, mode: str = "full") -> str:
        """A new bucket, as gs://NAME. Never a name again: clients remember what they have seen."""
        self._buckets += 1
        name = f"bucket-{self._buckets}"
        self.permit(f"gs://{name}", mode)
        return f"gs://{name}"

    def permit(self, bucket: str, mode: str) -> None:
        """Sets what a bucket permits: none, read, objects (no buckets.get) or full."""
        self._ask("POST", "modes", json.dumps({bucket.removeprefix("gs://"): mode}).encode())

    def fault(self, pattern: str, **kind: Any) -> None:
        """Adds a Fault; the first one that matches "METHOD /path?query" counts."""
        self._ask("POST", "faults", json.dumps({"pattern": pattern, **kind}).encode())

    def hits(self) -> list[int]:
        """How often each fault has struck."""
        return [fault["hits"] for fault in json.loads(self._ask("GET", "faults"))]

    def struck(self) -> list[str]:
        """The patterns of the faults that have struck."""
        return [f["pattern"] for f in json.loads(self._ask("GET", "faults")) if f["hits"]]

    def clear_faults(self, pattern: str = "") -> None:
        """Ends the faults with this pattern, or all; requests that they hold are never done."""
        self._ask("DELETE", f"faults/{pattern}")

    def log(self) -> list[tuple[str, int, str]]:
        """("METHOD /path?query", status or 0 if cut, user agent) of every request."""
        return [tuple(row) for row in json.loads(self._ask("GET", "log"))]

    def names(self, folder: str) -> list[str]:
        """The objects under gs://BUCKET or gs://BUCKET/FOLDER, relative to it."""
        bucket, _, prefix = folder.removeprefix("gs://").partition("/")
        prefix = prefix and prefix.rstrip("/") + "/"
        entries = json.loads(self._ask("GET", "buckets"))[bucket]
        return [name.removeprefix(prefix) for name in entries if name.startswith(prefix)]

    def read(self, path: str) -> bytes:
        """An object's bytes, without any client."""
        return self._ask("GET", "objects/" + path.removeprefix("gs://"))

    def write(self, path: str, data: bytes) -> None:
        """Makes an object, without any client."""
        self._ask("PUT", "objects/" + path.removeprefix("gs://"), data)

    def delete(self, path: str) -> None:
        self._ask("DELETE", "objects/" + path.removeprefix("gs://"))

    def upload(self, folder: str, to: str) -> None:
        for path in Path(folder).iterdir():
            self.write(f"{to}/{path.name}", path.read_bytes())


@pytest.fixture(scope="session")
def gcs_process(tmp_path_factory):
    """The server; one for the session, because TensorStore reads its authority only once."""
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("google.cloud.storage")  # warns of what only gRPC needs
    folder = tmp_path_factory.mktemp("gcs")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.gcs_server", str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        yield Cloud(int(process.stdout.readline()), folder)
    process.wait()


@pytest.fixture
def gcs(gcs_process, monkeypatch):
    """An empty cloud, which the environment points to."""
    for name in _HIDDEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in gcs_process.env.items():
        monkeypatch.setenv(name, value)
    gcs_process.reset()
    yield gcs_process
    gcs_process.clear_faults()


# TensorFlow reads these two when it is imported: its retries would take minutes.
os.environ["GCS_RETRY_CONFIG_INIT_DELAY_TIME_US"] = "10000"
os.environ["GCS_RETRY_CONFIG_MAX_DELAY_TIME_US"] = "100000"
