"""Files that would fill the memory, or never end."""

import io
import os
import socket

import pytest

from common import limits
from common.data import files
from common.errors import DataError
from common.foreign import files as foreign
from common.text import limited_lines, text_lines


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a file, a pipe, a link to a device, and a socket; the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"content")
    os.mkfifo("pipe")
    os.symlink("/dev/zero", "device")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        yield tmp_path


def test_what_is_no_file_is_not_read(folder):
    names = ["pipe", "device", "socket"]
    assert [limits.special(name) for name in names] == ["a pipe", "a device", "a socket"]
    for name in ("file", ".", "missing", "gs://bucket/pipe", "nul\0"):
        limits.check_file(name)
    for name in names:
        with pytest.raises(DataError, match=f"^{name} is a {name}, not a file: save its content"):
            limits.check_file(name)
        with pytest.raises(DataError, match=f"^{name} is a {name}"):
            foreign.read(name)
        with pytest.raises(DataError, match=f"/{name} is a folder, a pipe or a device"):
            files.find(str(folder), f"{name}*", "records")
    os.mkfifo("manifest.json")
    assert files.read_manifest(str(folder)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a\n" * 9 + b"x" * 64, "^N, line 10 is longer than .* MiB: split it"),
        (b"\n" * 5, "^N: 5 lines in a row, up to line 5, are empty"),
        (b"a\n" + b" \r\n" * 5, "^N: 5 lines in a row, up to line 6, are empty"),
        (b"\n" * 4 + b"a\n" + b"\n" * 4 + b"x" * 63, None),
        (b"x" * 63 + b"\n" + b"y", None),
        (b"", None),
    ],
)
def test_lines_have_limits(text, words, monkeypatch):
    monkeypatch.setattr(limits, "LINE_BYTES", 64)
    monkeypatch.setattr(limits, "EMPTY_LINES", 5)
    lines = limited_lines(io.BytesIO(text), "N")
    if words is None:
        assert b"".join(lines) == text
        return
    with pytest.raises(DataError, match=words):
        list(lines)


def test_members_may_expand_as_images_and_text_do():
    assert not limits.expansion(1000, limits.FREE_BYTES)
    assert not limits.expansion(10**9, 11 * 10**9)
    fault = limits.expansion(10**6, 10**9)
    assert fault.startswith("expands from 1,000,000 to 1,000,000,000 bytes, more than 100-fold: ")


def test_only_line_feeds_end_the_lines_of_a_list():
    text = "caf\u0085e\r\n\n a\u2028b \x0bc\x0cd\n\n"
    assert text_lines(text) == ["caf\u0085e", "", "a\u2028b \x0bc\x0cd"]
    assert text_lines(" \n") == []
