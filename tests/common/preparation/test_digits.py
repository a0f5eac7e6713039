"""The handwritten digits: some of them are the first of the complete set."""

import collections

import pytest

from common.preparation import digits
from scripts import prepare
from tests.common.preparation import test_schema


def test_some_digits_are_the_first_images_of_the_complete_set():
    every, small = digits.examples(), digits.examples(range(5, 10), per_class=20)
    parsed = {split: list(map(test_schema.parse, rows)) for split, rows in small.items()}
    complete = {split: list(map(test_schema.parse, rows)) for split, rows in every.items()}
    labels = collections.Counter(row["image/class/label"] for row in parsed["train"])
    assert labels == dict.fromkeys(range(1, 6), 20)
    for split, rows in complete.items():
        names = [row["image/filename"] for row in rows if row["image/class/label"] > 5]
        kept = [row["image/filename"] for row in parsed[split]]
        assert kept == [name for name in names if name in kept]
        if split == "validation":
            assert kept == names
        for digit in range(5, 10):
            own = [name for name in names if name.startswith(b"digit_%d" % digit)]
            taken = [name for name in kept if name.startswith(b"digit_%d" % digit)]
            assert taken == own[: len(taken)]
    assert {row["image/class/synset"] for row in parsed["train"]} == {
        b"digit_%d" % digit for digit in range(5, 10)
    }


@pytest.mark.parametrize("flags", [["--digits=9-5"], ["--digits=5"], ["--per_class=1"]])
def test_odd_tasks_are_refused(flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare.make("digits", ["--out", str(tmp_path), *flags])
    assert "must be" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
