"""The files of a split: patterns, sets of shards, what is refused."""

import pytest

from common.data import files, storage
from common.errors import DataError


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("train-*", ["train-0", "train-1"]),
        ("train-*,train/train-*", ["train-0", "train-1", "train/train-2"]),
        (" train-1 , train-?, train-1,", ["train-0", "train-1"]),
        ("{folder}/other-*,train-0", ["other-0", "train-0"]),
        ("train/*", ["train/train-2"]),
    ],
)
@pytest.mark.parametrize("slash", ["", "/"])
def test_find(tmp_path, patterns, expected, slash):
    (tmp_path / "train").mkdir()
    for name in ("train-1", "train-0", "other-0", "validation-0", "train/train-2"):
        (tmp_path / name).touch()
    paths = files.find(f"{tmp_path}{slash}", patterns.format(folder=tmp_path), "records")
    assert paths == tuple(str(tmp_path / name) for name in expected)


FAULTS = {
    "": "no file there matches",
    "/absent": "there is no such folder",
    "/file": "it is a file",
}


@pytest.mark.parametrize("folder", FAULTS)
def test_find_nothing(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=f"no seeds in '{tmp_path}{folder}': {FAULTS[folder]}"):
        files.find(f"{tmp_path}{folder}", "a*,b*", "seeds")


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("train-images/a.jpg", True),
        ("u.data", True),
        (".git/x", False),
        ("a-00000-of-00001", False),
    ],
)
def test_raw_data_are_answered_with_the_command_that_prepares_them(name, raw, tmp_path):
    storage.write(f"{tmp_path}/my set/{name}", [b"x"])
    with pytest.raises(DataError) as refused:
        files.find_shards(f"{tmp_path}/my set/", "train-*", "train")
    assert (f"python -m scripts.prepare '{tmp_path}/my set' makes" in str(refused.value)) == raw
    assert len(str(refused.value).splitlines()) == 1


NAMES = ["set[1]", "a*c", "a?c", "b\\c"]  # each is the pattern of another one's name, too
OTHERS = ["set1", "abc", "axc", "bc"]


@pytest.mark.parametrize("where", ["local", "gs"])
def test_names_with_signs_of_patterns(tmp_path, request, where):
    root = str(tmp_path) if where == "local" else request.getfixturevalue("gcs").bucket()
    names = NAMES if where == "local" else NAMES[:3]
    for name in (*names, *OTHERS):
        storage.write(f"{root}/{name}/in/train-0", [b"x"])
        storage.write(f"{root}/{name}/v[0]", [b"x"])
        storage.write(f"{root}/{name}/v0", [b"x"])
    for name in names:
        folder = f"{root}/{name}"
        for patterns in ("in/train-*", "*/train-*", "in/train-0", f"{folder}/in/train-*"):
            assert files.find(folder, patterns, "records") == (f"{folder}/in/train-0",)
        assert files.find(folder, "v[0]", "file") == (f"{folder}/v[0]",)
        assert files.find(folder, "v[0-9]", "file") == (f"{folder}/v0",)
    with pytest.raises(DataError, match="no such folder"):
        files.find(f"{root}/set[12]", "v0", "file")
    assert files.find("", f"{root}/set[12]/v0", "file") == (f"{root}/set1/v0",)  # a pattern


def test_the_one_file_that_matches(tmp_path):
    for name in ("a-1", "a-2", "a-3", "b"):
        (tmp_path / name).touch()
    assert files.find_one("/", f"{tmp_path}/b", "seeds", "seed_file") == f"{tmp_path}/b"
    with pytest.raises(DataError, match=r"^config.seed_file='a-\*' matches 3 files, .*/a-2: name"):
        files.find_one(str(tmp_path), "a-*", "seeds", "seed_file")


def test_bytes_of_records_by_at_most_64_files(tmp_path):
    """Of 64 files all count; of 65 every other one, 33 of 3 bytes and 2 records each."""
    paths = [str(tmp_path / str(i)) for i in range(65)]
    for i, path in enumerate(paths):
        (tmp_path / path).write_bytes(bytes(3 if i % 2 == 0 else 9))
    assert files.bytes_of(10, paths, [2, 7] * 32 + [2]) == 10 * 33 * 3 // (33 * 2)
    assert files.bytes_of(10, paths[:64], [2, 7] * 32) == 10 * 32 * 12 // (32 * 9)
    assert files.bytes_of(5, paths[:1], [0]) == 15


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-00000-of-00003", "train-00002-of-00003"], "1 of 3 files are missing, number 1"),
        (["train-00000-of-00001", "train-00000-of-00002"], "two sets of shards lie together"),
        (["train-00001-of-00003", "train-00003-of-00003"], "1 of 3 files are missing, number 2"),
        (["a/train-00001-of-00002", "b/train-00000-of-00001"], r"a/train-\*: 1 of 2 files"),
    ],
)
def test_a_set_of_shards_that_is_not_whole_is_refused(names, message):
    with pytest.raises(DataError, match=message):
        files.check_complete(names)


def test_whole_sets_and_other_names_pass():
    files.check_complete(["a/train-00000-of-00002", "a/train-00001-of-00002"])
    files.check_complete(["a/train-00000-of-00001", "b/train-00000-of-00001", "more.tfrecord"])
    # Those of MLPerf's reference for translation count from 1.
    files.check_complete([f"wmt32k-encoded-train-{k:05d}-of-00003" for k in (1, 2, 3)])
    files.check_complete(["wmt32k-encoded-dev-00001-of-00001"])


def test_unfinished_copies_are_not_read(tmp_path):
    for name in ("train-00000-of-00001", "train-00000-of-00001.tmp", "train-copy.part"):
        (tmp_path / name).write_text("")
    paths = files.find(str(tmp_path), "train-*", "train records")
    assert paths == (f"{tmp_path}/train-00000-of-00001",)
