"""A folder that a preparation claims: what an interruption leaves there."""

import os
import shutil
import sys

import numpy as np
import pytest

from benchmarks.resnet.preparation import digits
from common.data import data_manifest, files, records
from common.errors import DataError, UserError
from common.preparation import writing
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
