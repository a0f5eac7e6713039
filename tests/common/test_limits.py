"""Files that would fill the memory, or never end."""

import os
import socket

import pytest

from common import limits
from common.data import files
from common.errors import DataError
from common.foreign import files as foreign


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
