"""Data manifests: what they say, and what is refused."""

import json
import re
from typing import Any

import pytest

from common.data import data_manifest, files, storage
from common.errors import DataError
from common.preparation import writing

TWO = [{"name": "a", "examples": 3, "bytes": 2}, {"name": "b", "examples": 4, "bytes": 5}]

CONTENT = {
    "num_label_classes": 2,
    "classes": [  # in any order
        {"label": 2, "name": "bee", "id": 9, "train": 4},
        {"label": 1, "name": "ant", "id": 7, "train": 3},
    ],
    "splits": {
        "train": {
            "shards": [{"name": "a", "examples": 5, "bytes": 2}],
            "boxes": {"per_image": [1, 0, 2]} | {"single_per_image": [2, 1, 2], "only_crowds": [3]},
            "upright": "98",
        },
        "val": {"shards": [{"name": "b", "examples": 2, "bytes": 3}], "image_ids": [12, 11]},
    },
    "left_out": [{"file": "x.jpg", "reason": "is empty"}],
}


def test_everything_that_it_says(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(CONTENT))
    loaded: Any = data_manifest.load(str(tmp_path))
    assert loaded == data_manifest.DataManifest(
        ("ant", "bee"),
        {"a": 5, "b": 2},
        category_ids=(7, 9),
        boxes={"train": (1, 0, 2), "val": ()},
        image_ids=(12, 11),
        upright={"train": (True, False, False, True, True)},
        single_boxes=(2, 1, 2),
        only_crowds=(3,),
    )
    assert loaded.groups  # it does not say that there are none
    assert loaded.counts(str(tmp_path), [f"{tmp_path}/b", f"{tmp_path}/a"]) == (2, 5)
    assert loaded.counts(str(tmp_path), [f"{tmp_path}/b", f"{tmp_path}/c"]) is None


def test_a_folder_without_one(tmp_path):
    assert data_manifest.load(str(tmp_path)) is None


@pytest.mark.parametrize(("labels", "count"), [([1, 2], 3), ([0, 1], 2), ([1, 3], 2), ([1, 1], 2)])
def test_labels_count_from_one_to_their_number(labels, count):
    classes = [{"label": label, "name": "x"} for label in labels]
    data = json.dumps({"num_label_classes": count, "classes": classes, "splits": {}}).encode()
    with pytest.raises(DataError, match=re.escape("path was not written by")) as caught:
        data_manifest.parse(data, "path")
    assert "(ValueError('its labels do not count from 1'))" in str(caught.value)


@pytest.mark.parametrize("where", ["local", "gs"])
def test_a_folder_that_a_preparation_has_not_ended(tmp_path, request, where):
    """Each family opens its data with `files.find` or `data_manifest.read_bytes`."""
    root = f"{tmp_path}/set" if where == "local" else f"{request.getfixturevalue('gcs').bucket()}/s"
    storage.write(f"{root}/train-0", [b"x"])
    storage.write(f"{root}/prepare_state/plan.json", [b"null"])
    opens = (lambda: files.find(root, "train-0", "x"), lambda: data_manifest.read_bytes(f"{root}/"))
    damaged = (None, b"null", b"{}", b"5", b'"a\\nb"', b'""', b"[" * 99_999, b"\xff")
    for command in (*damaged, b'"python -m x"'):
        named = "the command that began them" if command in damaged else "`python -m x`"
        if command:
            storage.write(f"{root}/prepare_state/command.json", [command])
        for act in opens:
            with pytest.raises(DataError, match=f"{root}/? holds unfinished records: {named}"):
                act()
    storage.write(f"{root}/manifest.json", [b"{}"])
    assert [act() for act in opens] == [(f"{root}/train-0",), b"{}"]


def test_sizes_that_a_manifest_lists(tmp_path):
    storage.write(f"{tmp_path}/a", [b"12"])
    rows = [{"name": "a", "bytes": 3}, {"name": "absent", "bytes": 1}]
    for content in ({}, [], {"splits": []}, {"splits": {"x": {"shards": [{"bytes": 1}]}}}):
        storage.write(f"{tmp_path}/manifest.json", [json.dumps(content).encode()])
        data_manifest.check_sizes(str(tmp_path), [f"{tmp_path}/a"])  # says nothing of it
    storage.write(
        f"{tmp_path}/manifest.json", [json.dumps({"splits": {"x": {"shards": rows}}}).encode()]
    )
    with pytest.raises(DataError, match=f"{tmp_path}/a has 2 bytes, manifest.json lists 3: "):
        data_manifest.check_sizes(str(tmp_path), [f"{tmp_path}/b", f"{tmp_path}/a"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"examples": 6}, "was changed"),
        ({"examples": 1e999}, "was changed"),
        ({data_manifest.DIGEST: 5}, "was changed"),
        ({data_manifest.DIGEST: None}, ""),  # of another tool
        ({data_manifest.DIGEST: None, "examples": 6}, "train has 7 examples, its files 10"),
        ({data_manifest.DIGEST: None, "bytes": 1}, "train has 7 bytes, its files 6"),
        ({data_manifest.DIGEST: None, "bytes": 1e999}, "OverflowError"),
    ],
)
def test_counts_that_were_changed_are_refused(change, problem, tmp_path):
    path = tmp_path / "manifest.json"
    split = {"examples": 7, "bytes": 7, "shards": TWO}
    writing.save_data_manifest(str(tmp_path), {"splits": {"train": split}})
    content = json.loads(path.read_text())
    for key, value in change.items():
        (content if key == data_manifest.DIGEST else content["splits"]["train"]["shards"][0])[
            key
        ] = value
    if content[data_manifest.DIGEST] is None:
        del content[data_manifest.DIGEST]
    path.write_text(json.dumps(content))
    for fix in ("move it away", "the command that began them writes it again"):
        if problem:
            with pytest.raises(DataError, match=f"^{path} was not .*{problem}.*: {fix}"):
                data_manifest.read_bytes(str(tmp_path))
        else:
            assert data_manifest.read_bytes(str(tmp_path)) == path.read_bytes()
        storage.write(f"{tmp_path}/prepare_state/plan.json", [b"{}"])
        storage.write(f"{tmp_path}/prepare_state/command.json/a folder", [b""])
