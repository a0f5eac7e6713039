"""The pairs of texts, and what is printed while they are read."""

import collections
from typing import Any, NamedTuple

import pytest

from benchmarks.translation.preparation.pairs import TextInput


class Numbered(NamedTuple):
    """A file of one pair."""

    number: int

    def __str__(self) -> str:
        return f"file {self.number}"

    def pairs(self) -> list[tuple[str, str]]:
        return [("a", "b")]


@pytest.mark.parametrize("total", [0, 1, 19, 20, 21, 500])
def test_a_list_of_files_has_at_most_twenty_lines(total, capsys):
    text: Any = object.__new__(TextInput)
    text._inputs = {"train": [Numbered(number) for number in range(total)]}
    assert [*text._read("train", collections.Counter())] == [("a", "b")] * total
    lines = capsys.readouterr().out.splitlines()
    shown = total if total <= 20 else 19
    assert lines[:shown] == [f"train: file {number}" for number in range(shown)]
    assert lines[shown:] == ([] if total <= 20 else [f"... and {total - 19} more"])
