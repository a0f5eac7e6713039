"""Times and names in tables of users and items."""

import datetime

import numpy as np
import pyarrow
import pytest

from benchmarks.ncf.preparation import values
from common.preparation.sources import SourceError

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def read(*cells, skip=1):
    found, form = values.seconds(pyarrow.chunked_array([pyarrow.array(cells)]), "t.csv", skip)
    return found.tolist(), form


@pytest.mark.parametrize(
    ("number", "seconds", "form"),
    [
        (99_999_999_999, None, "seconds"),  # beyond the year 2105
        (100_000_000_000, 100_000_000, "milliseconds"),
        (99_999_999_999_999, 99_999_999_999, "milliseconds"),
        (1_500_000_000_999, 1_500_000_000, "milliseconds"),
        (1_500_000_000_999_999, 1_500_000_000, "microseconds"),
        (1_500_000_000_999_000_000, 1_500_000_000, "nanoseconds"),
        (2**32 - 1, 2**32 - 1, "seconds"),
        (2**32, None, "seconds"),
        (80_000, 80_000, "seconds"),
        (19_999, 19_999, "seconds"),
    ],
)
def test_what_a_number_counts(number, seconds, form):
    if seconds is None or seconds >= 2**32:
        with pytest.raises(SourceError, match="^t.csv, line 5: the time is not from 1970 to 2105"):
            read("1", str(number), skip=3)
    else:
        assert read(str(number)) == ([seconds], f"{form} since 1970")


def test_days_of_a_spreadsheet():
    """Its day 25,569 is 1970-01-01; 43,831.75 is 2020-01-01, 18:00."""
    found, form = read("43831.75", "25569", "75000")
    new_year = datetime.datetime(2020, 1, 1, 18, tzinfo=datetime.UTC)
    assert found == [(new_year - EPOCH).total_seconds(), 0, (75_000 - 25_569) * 86_400]
    assert "days since 1900" in form


@pytest.mark.parametrize(
    ("cells", "grain"),
    [
        (["2020-01-31", "2020-02-01"], values.DAY),
        (["2020-01-31 00:00", "2020-02-01 00:00"], values.MIDNIGHT),
        (["2020-01-31 00:00", "2020-02-01 00:01"], values.FINE),
        (["86400", "172800"], values.DAY),
        (["86400", "172801"], values.FINE),
        (["12:30", "01:15"], values.CLOCK),
        (["soon", "later"], values.UNKNOWN),
        (["é"], values.UNKNOWN),
        ([], values.UNKNOWN),
    ],
)
def test_how_finely_times_are_told(cells, grain):
    assert values.grain(cells) == grain


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("2020-02-29T06:07:08", (2020, 2, 29, 6, 7, 8)),
        ("2020/02/29", (2020, 2, 29)),
        ("29.02.2020 06:07", (2020, 2, 29, 6, 7)),
        ("Feb 29, 2020 06:07:08 PM", (2020, 2, 29, 18, 7, 8)),
        ("2020-02-29 06:07:08.999+0200", (2020, 2, 29, 4, 7, 8)),
    ],
)
def test_dates(text, when):
    wanted = (datetime.datetime(*when, tzinfo=datetime.UTC) - EPOCH).total_seconds()
    assert read(text)[0] == [wanted]


def test_a_date_with_two_meanings_and_an_unknown_one_are_refused():
    with pytest.raises(SourceError, match="may be .*%d/%m/%Y.* or .*%m/%d/%Y"):
        read("01/02/2020")
    assert read("01/13/2020", "01/02/2020")[1] == "%m/%d/%Y"
    with pytest.raises(SourceError, match="^t.csv, line 4: unknown time 'soon'"):
        read("2020-01-31", "2020-01-31", "soon")


def test_names_are_numbered_by_first_appearance(capsys):
    parts = [["b", "a", None, "b"], ["a", " a", "", "7.0", "7"]]
    codes, names = values.encode("user", [pyarrow.array(x).dictionary_encode() for x in parts])
    assert codes.tolist() == [0, 1, -1, 0, 1, 1, -1, 2, 2]
    assert names.to_pylist() == ["b", "a", "7"]
    assert "joined with it: 1 (" in capsys.readouterr().out


def test_repeated_rows_and_sorted_numbers(capsys):
    columns = np.array([3, 1, 3, 1, 3]), np.array([5, 2, 5, 3, 5])
    assert values.are_repeated(*columns).tolist() == [True, False, True, False, False]
    assert "left out: 2" in capsys.readouterr().out
    assert not values.are_repeated(np.arange(4)).any() and not capsys.readouterr().out
    assert values.unique(np.array([5, -1, 5, 5, 0, -1])).tolist() == [-1, 0, 5]
