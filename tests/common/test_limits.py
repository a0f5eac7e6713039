"""Files that never end."""

import os

import pytest

from common import limits
from common.data import data_manifest, files
from common.errors import DataError


def test_what_is_no_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"content")
    os.mkfifo("pipe")
    os.symlink("/dev/zero", "device")
    for name in ("file", ".", "missing", "gs://bucket/pipe", "nul\0"):
        limits.check_file(name)
    for name in ("pipe", "device"):
        with pytest.raises(DataError, match=f"^{name} is a pipe or a device, not a file"):
            limits.check_file(name)
        with pytest.raises(DataError, match=f"/{name} is a folder, a pipe or a device"):
            files.find(str(tmp_path), f"{name}*", "records")
    os.mkfifo("manifest.json")
    assert data_manifest.read_bytes(str(tmp_path)) is None
