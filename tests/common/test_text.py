"""Text: its encoding, where lines end and how long they may be, and names that look alike."""

import io
import unicodedata

import pytest

from common import limits
from common.errors import DataError
from common.text import (
    aligned,
    alike,
    decoded,
    is_sgm,
    limited_lines,
    normal_name,
    sgm_sentences,
    shown,
    text_lines,
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_that_names_its_encoding_is_read(encoding):
    assert decoded("кот\nпёс\n".encode(encoding), "N") == "кот\nпёс\n"


@pytest.mark.parametrize(
    ("text", "encoding"), [("a\nкот", "cp1251"), ("a\n狗", "gbk"), ("a\nblé", "cp1252")]
)
def test_other_encodings_are_refused_with_the_line_and_the_command_that_converts(text, encoding):
    with pytest.raises(DataError, match="^my names, line 2 .*iconv .*'my names'"):
        decoded(text.encode(encoding), "my names")
    with pytest.raises(DataError, match="^my names, line 8 "):
        decoded(text.encode(encoding), "my names", line=7)
    with pytest.raises(DataError, match=r"gzip -dc N\.gz \| iconv -f CP1252 -t UTF-8 > NEW$"):
        decoded(text.encode(encoding), "N.gz")
    with pytest.raises(DataError, match="^N, line 1 is not UTF-16"):
        decoded("a".encode("utf-16") + b"x", "N")
    with pytest.raises(DataError, match="^N, line 7 is not UTF-8"):  # it is within other text
        decoded("a".encode("utf-16"), "N", line=7)


def test_only_line_feeds_and_carriage_returns_end_the_lines_of_a_list():
    text = "caf\u0085e\r\n\r a\u2028b \x0bc\x0cd\n\n"
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


def test_names_that_look_the_same_have_one_form():
    name = "Jos\u00e9 Ramos"
    assert normal_name(unicodedata.normalize("NFD", f" {name}")) == name
    assert normal_name("\ufeffJos\u00e9\u00a0 Ramos\t") == name
    assert normal_name("Jo\u200bse\u2060\u0301 Ra\u00admos\u200e") == name
    assert normal_name("\u06cc\u200c\u0631") == "\u06cc\u200c\u0631"  # it parts letters of Persian
    assert normal_name("Cat") != normal_name("cat")
    assert alike(["Cat", "dog", "cat ", "Cat", "\uff23at"]) == [["Cat", "cat ", "\uff23at"]]


def test_cells_are_aligned():
    rows = [["part", "n"], ["1/8", "1,200"]]
    assert aligned(rows, {1}) == ["part      n", "1/8   1,200"]
    assert aligned(rows, ()) == ["part  n", "1/8   1,200"]


def test_sentences_of_wmts_sgm(monkeypatch):
    text = b'<doc>\n<seg id="1"> a < b\nc </seg>\n<SEG id=2>d</SEG> <seg></seg>\n</doc>'
    monkeypatch.setattr(limits, "SGM_BYTES", len(text))
    assert [*sgm_sentences(io.BytesIO(text), "N")] == [b"a < b c", b"d", b""]
    with pytest.raises(DataError, match=f"^N has more than {len(text)} bytes"):
        next(sgm_sentences(io.BytesIO(text + b"\n"), "N"))
    with pytest.raises(DataError, match="^N has no <seg>"):
        next(sgm_sentences(io.BytesIO(b"<doc></doc>"), "N"))
    names = ("a.sgm", "A.SGML", "sgm", "a.sgm.txt")
    assert [is_sgm(name) for name in names] == [True, True, False, False]


def test_paths_are_shown_without_control_characters():
    assert shown("a\x1b[1m/ä\udcff") == "a\\x1b[1m/ä\\udcff"
