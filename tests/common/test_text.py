"""Lines of text: where they end, and how long they may be."""

import io

import pytest

from common import limits
from common.errors import DataError
from common.text import limited_lines, text_lines


def test_only_line_feeds_end_the_lines_of_a_list():
    text = "caf\u0085e\r\n\n a\u2028b \x0bc\x0cd\n\n"
    assert text_lines(text) == ["caf\u0085e", "", "a\u2028b \x0bc\x0cd"]
    assert text_lines(" \n") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a\n" * 9 + b"x" * 64, "^N, line 10 is longer than .* MiB: split it"),
        (b"\n" * 4 + b"a\n" + b"\n" * 4 + b"x" * 63, None),
        (b"x" * 63 + b"\n" + b"y", None),
        (b"", None),
    ],
)
def test_lines_have_limits(text, words, monkeypatch):
    monkeypatch.setattr(limits, "LINE_BYTES", 64)
    lines = limited_lines(io.BytesIO(text), "N")
    if words is None:
        assert b"".join(lines) == text
        return
    with pytest.raises(DataError, match=words):
        list(lines)
