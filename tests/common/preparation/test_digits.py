"""The handwritten digits: some of them are the first of the complete set."""

import pytest

from common.preparation import digits
from scripts import prepare
from tests.common.preparation import test_schema


def test_some_digits_are_the_first_images_of_the_complete_set():
    every, small = digits.examples(), digits.examples(range(5, 10), per_class=20)
    for split, records in every.items():
        rows = [row for row in map(test_schema.parse, records) if row["image/class/label"] > 5]
        kept = list(map(test_schema.parse, small[split]))
        for label in range(1, 6):  # of 5 to 9
            names = [row["image/filename"] for row in rows if row["image/class/label"] == label + 5]
            assert all(name.startswith(b"digit_%d_" % (label + 4)) for name in names)
            own = [row["image/filename"] for row in kept if row["image/class/label"] == label]
            assert own == (names[:20] if split == "train" else names)
        assert len(kept) == (100 if split == "train" else len(rows))


@pytest.mark.parametrize("flags", [["--digits=9-5"], ["--digits=5"], ["--per_class=1"]])
def test_odd_tasks_are_refused(flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare.make("digits", ["--out", str(tmp_path), *flags])
    assert "must be" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
