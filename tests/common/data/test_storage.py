"""Files are written completely or not at all."""

import re

import pytest

from common.data import storage


def test_write_is_complete_or_absent(tmp_path):
    path = tmp_path / "made" / "when needed"
    storage.write(str(path), [])
    assert path.read_bytes() == b""

    def parts():
        yield b"new"
        temporary, _ = sorted(path.parent.iterdir())
        assert re.fullmatch(r"tmp\.when needed\.[0-9a-f]{8}", temporary.name)
        assert path.read_bytes() == b""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.write(str(path), parts())
    assert path.read_bytes() == b"" and list(path.parent.iterdir()) == [path]
    storage.write(str(path), [b"new", b"er"])
    assert path.read_bytes() == b"newer" and list(path.parent.iterdir()) == [path]
