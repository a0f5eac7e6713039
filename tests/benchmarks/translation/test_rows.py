"""The data manifest of pairs of sentences: what it says of files, and what is none."""

import copy
import json
from typing import Any

import pytest

from benchmarks.translation import rows
from common.errors import DataError

ROWS = [
    {"name": "a", "examples": 3, "bytes": 2, "sha256": "f0", "pairs": 7, "tokens": [10, 8]},
    {"name": "b", "examples": 1, "bytes": 4, "sha256": "f1", "pairs": 2, "tokens": [6, 5]},
]
CONTENT = {
    "kind": "translation",
    "length": 256,
    "vocabulary": {"file": "vocab.subwords", "sha256": "ab", "size": 33708},
    "splits": {"train": {"shards": ROWS[:1]}, "dev": {"shards": ROWS[1:]}},
}


def write(folder, content):
    (folder / "manifest.json").write_text(json.dumps(content))
    return str(folder)


def test_everything_that_it_says(tmp_path):
    loaded: Any = rows.load_manifest(write(tmp_path, CONTENT))
    shards = {
        "a": rows.ManifestShard(3, 2, "f0", 7, (10, 8)),
        "b": rows.ManifestShard(1, 4, "f1", 2, (6, 5)),
    }
    assert loaded == rows.DataManifest(256, "vocab.subwords", "ab", 33708, shards)
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"1234")
    paths = [f"{tmp_path}/b", f"{tmp_path}/a"]
    assert loaded.describe(f"{tmp_path}/", paths) == [shards["b"], shards["a"]]
    assert loaded.describe(str(tmp_path), [*paths, f"{tmp_path}/c"]) is None
    (tmp_path / "a").write_bytes(b"123")
    assert loaded.describe(str(tmp_path), paths) is None


def test_none_and_those_of_other_data(tmp_path):
    assert rows.load_manifest(str(tmp_path)) is None
    assert rows.load_manifest(write(tmp_path, {"num_label_classes": 4, "classes": []})) is None
    assert rows.load_manifest(write(tmp_path, CONTENT | {"kind": "speech"})) is None


@pytest.mark.parametrize("missing", ["length", "vocabulary", "splits", "tokens"])
def test_another_form_is_one_line(tmp_path, missing):
    content = copy.deepcopy(CONTENT)
    del (content["splits"]["train"]["shards"][0] if missing == "tokens" else content)[missing]
    with pytest.raises(DataError, match=f"^{tmp_path}/manifest.json is not .*'{missing}'"):
        rows.load_manifest(write(tmp_path, content))
