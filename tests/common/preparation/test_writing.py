"""A folder that a preparation claims: what an interruption leaves there."""

import os
import shutil
import sys
import types
from typing import Any

import numpy as np
import pytest

from benchmarks.resnet.preparation import digits
from common.data import data_manifest, files, records
from common.errors import DataError, UserError
from common.preparation import writing
from common.preparation.sources import SourceError
from common.preparation.writing import repeated_images
from common.tensorflow import tensorflow
from scripts import prepare
from tests.helpers.preparation import leaves

OLD, NEW = ({"settings": {"seed": seed}, "input": {}} for seed in (1, 2))


def fill(out):
    """A finished set of the plan OLD."""
    state = writing.State(out)
    state.claim(OLD, False)
    for i in range(2):
        name = records.shard_name("train", i, 2)
        state.write(f"{name}.json", records.write_shard(f"{out}/{name}", [b"old"]))
    writing.save_data_manifest(out, {"of": "OLD"})


def test_no_moment_of_a_claim_leaves_a_set_that_looks_complete(tmp_path, monkeypatch):
    """It is the old set, or one that every reader refuses; and the new command can continue."""
    gfile, moment = tensorflow().io.gfile, 0
    monkeypatch.setattr(sys, "argv", ["old"])
    complete = refused = 0
    kept = {name: getattr(gfile, name) for name in ("rename", "remove", "rmtree")}

    class Killed(BaseException):
        pass

    while True:
        out, calls = str(tmp_path / str(moment)), []
        sys.argv[1:] = ["old"]
        fill(out)
        sys.argv[1:] = ["new"]
        old = [*files.find(out, "train-*", "x")]

        def call(name, *arguments, calls=calls, moment=moment, **more):
            if len(calls) == moment:
                raise Killed
            calls.append(name)
            kept[name](*arguments, **more)

        for name in kept:
            monkeypatch.setattr(gfile, name, lambda *a, name=name, **m: call(name, *a, **m))
        try:
            writing.State(out).claim(NEW, True)
            break
        except Killed:
            pass
        finally:
            monkeypatch.undo()
        try:
            assert [*files.find(out, "train-*", "x")] == old
            assert data_manifest.read_bytes(out) == b'{\n "of": "OLD"\n}\n'
            complete += 1
        except DataError as error:
            assert "unfinished records: `python -m scripts.prepare new` finishes" in str(error)
            refused += 1
        writing.State(out).claim(NEW, True)
        assert records.existing_shards(out) == []
        moment += 1
    assert complete == 3 and refused > 4  # of the command, the mark, and with the manifest
    assert sorted(os.listdir(f"{out}/prepare_state")) == ["command.json", "plan.json"]


def test_a_set_of_0_3_0_is_recognised(tmp_path):
    """Its plan has the flags' names of then."""
    settings = {"seed": 1, "val_shards": 2, "val_fraction": 0.3}
    writing.State(tmp_path).claim({"settings": settings, "input": {}}, False)
    (tmp_path / records.shard_name("train", 0, 2)).touch()
    now = {"seed": 1, "validation_shards": 2, "validation_fraction": 0.3}
    writing.State(tmp_path).claim({"settings": now, "input": {}}, False)
    now["validation_fraction"] = 0.4
    with pytest.raises(UserError, match=r"\(changed: --validation_fraction\)"):
        writing.State(tmp_path).claim({"settings": now, "input": {}}, False)


def test_two_preparations_of_one_folder(tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "out")
    seen = []

    def prepare_again(*_):
        if not seen:
            seen.append(leaves("digits", [f"--out={out}"], capsys))
        return {"train": [], "validation": []}

    monkeypatch.setattr(digits, "make", lambda *_: True)
    monkeypatch.setattr(digits, "examples", prepare_again)
    prepare.make("digits", [f"--out={out}"])
    ((code, line),) = seen
    assert code == 1 and f"process {os.getpid()} on " in line and f"prepares {out} already" in line
    assert not os.path.exists(out)


def test_digits_of_other_settings_are_no_mixture(tmp_path, monkeypatch):
    few, all_ = (digits.examples(per_class=n) for n in (20, 0))
    assert digits.make(str(tmp_path), few)

    def full(*_):
        raise OSError("no space")

    monkeypatch.setattr(writing, "save", full)
    with pytest.raises(OSError, match="no space"):
        digits.make(str(tmp_path), all_)
    assert {name.split("-")[0] for name in records.existing_shards(str(tmp_path))} == {"validation"}


def test_ratings_do_not_join_another_set(tmp_path):
    out = str(tmp_path / "out")
    fill(out)
    with pytest.raises(UserError, match="already holds train-00000-of-00002 of another data set"):
        prepare.make("ratings", [f"--out={out}", "--users=100", "--items=200", "--ratings=3000"])
    shutil.rmtree(out)


@pytest.mark.parametrize(
    ("asked", "usual", "images", "mib", "count"),
    [
        (5, 1024, 5, 1, 5),
        (0, 8, 512, 0, 8),  # 64 for each of the usual files
        (0, 40, 2559, 0, 8),
        (0, 0, 2000, 0, 8),
        (0, 0, 127, 0, 7),  # 16 for each at least
        (0, 0, 15, 0, 1),
        (0, 0, 1600, 100, 100),
    ],
)
def test_the_number_of_files(asked, usual, images, mib, count):
    size = mib * writing._SHARD_BYTES // 1600
    files = [types.SimpleNamespace(size=size)] * images
    source: Any = types.SimpleNamespace(files=files)
    assert writing.num_shards(asked, "shards", source, np.arange(images), usual) == count
    with pytest.raises(SourceError, match="^--shards: 2,561 files .* 2,560 images"):
        writing.num_shards(2561, "shards", source, np.arange(2560), 0)


def test_the_manifest_counts_and_the_first_files_are_named(capsys):
    def shard(split, number, examples, classes, left_out=(), changed=()):
        facts = dict.fromkeys(writing.FACTS, 0) | {"examples": examples, "bytes": 10 * examples}
        row = {"split": split, "name": f"{split}-{number}", "classes": classes}
        return {**row, **facts, "left_out": [*left_out], "changed": [*changed]}

    results = [
        shard("train", 0, 5, {"1": 3, "2": 2}, [["b", "cut short"]]),
        shard("train", 1, 4, {"2": 4}, changed=[[f"c{i}", "grey"] for i in range(7)]),
        shard("validation", 0, 1, {"1": 1}),
    ]
    classes = {1: {"name": "cat"}, 2: {"name": "dog"}}
    content = writing.manifest_content({"x": 1}, classes, results, [("a", "no image")])
    assert content["classes"] == [
        {"name": "cat", "train": 3, "validation": 1},
        {"name": "dog", "train": 6, "validation": 0},
    ]
    sums = {name: (row["examples"], row["bytes"]) for name, row in content["splits"].items()}
    assert sums == {"train": (9, 90), "validation": (1, 10)} and content["x"] == 1
    assert [row["file"] for row in content["left_out"]] == ["a", "b"]
    writing.report(content)
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == ["left out: a: no image", "left out: b: cut short", "re-encoded: c0: grey"]
    assert len(out) == 8 and out[-1].startswith("re-encoded: 2 more; all are in")


def test_only_missing_and_torn_shards_are_written(tmp_path, capsys):
    """7 images in 2 files, 3 in 1; in order, whatever the number of threads."""

    def make(split, k):
        return f"{split} {k}".encode(), (k % 2,), {"digests": [k]}

    out, splits = str(tmp_path), {"train": (7, 2), "validation": (3, 1)}
    writing.State(out).write("plan.json", {})
    first = writing.write(out, splits, make, 5)
    assert [(row["split"], row["examples"]) for row in first] == [
        *[("train", 4), ("train", 3), ("validation", 3)]
    ] or [row["examples"] for row in first] == [3, 4, 3]
    assert sum(row["classes"].get("1", row["classes"].get(1, 0)) for row in first) == 3 + 1
    digests = [[k for (k, *_) in row["digests"]] for row in first]
    assert digests[0] + digests[1] == [*range(7)] and digests[2] == [0, 1, 2]
    torn = tmp_path / first[1]["name"]
    torn.write_bytes(torn.read_bytes()[:-1])
    asked = []
    again = writing.write(out, splits, lambda *k: asked.append(k) or make(*k), 1)
    assert again == first and asked == [("train", k) for k in digests[1]]
    assert "continuing: 2 of 3 shards are finished" in capsys.readouterr().out


def repeated(rows):
    digests, labels, splits = map(np.array, zip(*rows, strict=True))
    return repeated_images(digests, labels, splits, lambda i: f"file {i}")


def test_a_photo_under_two_labels_is_told_first():
    rows = [
        *[("a", 1, "train"), ("b", 1, "train"), ("a", 1, "train"), ("c", 2, "train")],
        *[("c", 2, "validation"), ("d", 1, "train"), ("d", 2, "validation"), ("e", 1, "train")],
    ]
    two, both, several = repeated(rows)
    assert "two labels" in two and "file 5 = file 6" in two
    assert "both splits" in both and "file 3 = file 4" in both
    assert "in one split" in several and "file 0 = file 2" in several
    assert repeated(rows[3:4]) == []


def test_few_of_many_are_named():
    (line,) = repeated([(i % 9, 1, 0) for i in range(90)])
    assert line.startswith("9 images are") and line.endswith("; and 6 more")
    assert line.count(" = ") == 9
