"""Which folders have logs of users and items, and which tables are refused with a reason."""

import pytest

from benchmarks.ncf.preparation import recognise
from common.errors import UserError
from common.preparation.folders import Folder
from tests.helpers.preparation import place

LOG = "user,item,time\n" + "".join(f"{i % 7},{i},{i + 9}\n" for i in range(30))
OTHER = "p,q\n" + "x,y\n" * 30
NOTES = {f"{i}.md": "notes" for i in range(3)}


def formats(tmp_path, files):
    return recognise.dataset_formats(place(tmp_path, files))


def test_the_largest_log_and_others_with_its_columns(tmp_path):
    small = LOG.replace("user,item", "item,user")
    files = {"b.csv": LOG, "a.csv": LOG[:99], "c.csv": small, "o.csv": OTHER}
    (found,) = formats(tmp_path, files)
    assert [name.rpartition("/")[2] for name in found[4]] == ["a.csv", "b.csv"]
    assert "a.csv, b.csv: rows of" in found[2] and "c.csv, which has users" in found[2]


@pytest.mark.parametrize(("others", "is_refused"), [(0, True), (1, True), (2, False)])
def test_tables_without_users_are_refused_if_they_are_half_of_a_folder(
    others, is_refused, tmp_path
):
    files = {"t.csv": OTHER, **dict([*NOTES.items()][:others])}
    if is_refused:
        with pytest.raises(UserError, match="t.csv has no columns whose names are known.*p, q"):
            formats(tmp_path, files)
    else:
        assert formats(tmp_path, files) == []


def test_a_single_file_that_is_no_log(tmp_path):
    place(tmp_path, {"u.csv": OTHER})
    with pytest.raises(UserError, match="the columns are 1, 2 without a header: p, q"):
        recognise.dataset_formats(Folder.open(f"{tmp_path}/u.csv"))
