"""Public data sets from a server on the loopback that stands in for their publishers'."""

import functools
import gzip
import hashlib
import http.server
import pathlib
import threading

import pytest

from common.errors import DataError
from scripts import public_sets

TEXTS = {"train.de.gz": b"Ein Hund.\n" * 99, "train.en.gz": b"A dog.\n" * 99}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The files that were asked for, of the sets "pairs" and "ratings", in an empty folder."""
    web, asked = tmp_path / "web", []
    web.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            asked.append(self.path.removeprefix("/"))

    handler = functools.partial(Handler, directory=web)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    for name, text in TEXTS.items():
        (web / name).write_bytes(gzip.compress(text))
    (web / "ratings.zip").write_bytes(b"PK")
    rest = "captions", "for research", 1.3, f"http://127.0.0.1:{server.server_port}"
    pairs = public_sets.PublicSet(*rest, {name: digest(text) for name, text in TEXTS.items()})
    ratings = public_sets.PublicSet(*rest, {"ratings.zip": digest(b"PK")}, "ncf")
    monkeypatch.setattr(public_sets, "SETS", {"pairs": pairs, "ratings": ratings})
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.chdir(tmp_path)
    yield asked
    server.shutdown()
    server.server_close()


def raw() -> dict[str, bytes]:
    paths = pathlib.Path("data/raw").rglob("*")
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def test_files_come_once_and_unpacked(asked, capsys):
    assert public_sets.get("pairs") == "data/raw/pairs"
    assert public_sets.get("ratings") == "data/raw/ratings.zip"
    texts = {name.removesuffix(".gz"): text for name, text in TEXTS.items()}
    assert raw() == texts | {"ratings.zip": b"PK"} and asked == [*TEXTS, "ratings.zip"]
    line = capsys.readouterr().out.splitlines()[0]
    assert all(word in line for word in ("pairs", "for research", "1.3 MB", "http://127.0.0.1:"))
    public_sets.get("pairs")
    assert len(asked) == 3


def test_files_that_were_put_there_by_hand(asked):
    folder = pathlib.Path("data/raw/pairs")
    folder.mkdir(parents=True)
    for name, text in TEXTS.items():
        (folder / name[:-3]).write_bytes(text)
    assert public_sets.get("pairs") == "data/raw/pairs" and not asked


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_file_of_other_content(by_hand, asked):
    place = pathlib.Path("data/raw" if by_hand else "web", "ratings.zip")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"other")
    with pytest.raises(DataError, match=f"SHA-256, {digest(b'other')}, than {digest(b'PK')}") as no:
        public_sets.get("ratings")
    assert ("delete it" in str(no.value)) == by_hand
    assert raw() == ({"ratings.zip": b"other"} if by_hand else {})


@pytest.mark.parametrize(
    ("name", "file", "folder", "quickstart"),
    [
        ("pairs", "{train.de.gz,train.en.gz}", "data/raw/pairs", ""),
        ("ratings", "ratings.zip", "data/raw", " ncf"),
    ],
)
def test_no_network(name, file, folder, quickstart, asked, monkeypatch):
    """The line says what to type elsewhere, and which command needs no data; nothing is left."""
    offline = public_sets.SETS[name]._replace(address="http://127.0.0.1:9")
    monkeypatch.setitem(public_sets.SETS, name, offline)
    with pytest.raises(DataError, match="cannot be read: .*refused") as refused:
        public_sets.get(name)
    (line,) = str(refused.value).splitlines()
    assert f"`curl -O 'http://127.0.0.1:9/{file}'`" in line and f" {folder} " in line
    assert f"`bash scripts/quickstart.sh{quickstart}`" in line and raw() == {}


@pytest.mark.parametrize("name", public_sets.SETS)
def test_the_table(name):
    one = public_sets.SETS[name]
    assert all(len(bytes.fromhex(digits)) == 32 for digits in one.files.values())
    assert one.address.startswith("https://") and not one.address.endswith("/")
