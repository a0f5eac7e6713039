"""Files are written completely or not at all."""

import re

import pytest

from common.data import storage
from common.errors import DataError


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


def test_sizes_and_patterns(tmp_path):
    """Brackets in the names of folders that exist are no pattern."""
    folder = tmp_path / "set [1]"
    folder.mkdir()
    for name, size in (("a-1", 3), ("a-2", 0), ("b-1", 7)):
        (folder / name).write_bytes(b"x" * size)
    paths = storage.matching_paths(f"{folder}/a-*")
    assert sorted(paths) == [f"{folder}/a-1", f"{folder}/a-2"]
    assert storage.sizes([f"{folder}/b-1", *sorted(paths)]) == [7, 3, 0]
    assert storage.existing_prefix(f"{folder}/x*/y?") == str(folder)
    assert storage.existing_prefix("n*/a", "n*") == "n*/a"  # at least the folder
    with pytest.raises(DataError, match="cannot read .*/c: "):
        storage.sizes([f"{folder}/c"])
    assert storage.list_folder(str(tmp_path)) == ["set [1]"] and storage.read("/none") is None
    assert [storage.is_folder(str(x)) for x in (folder, folder / "a-1", tmp_path / "c")] == [
        *(True, False, False)
    ]
