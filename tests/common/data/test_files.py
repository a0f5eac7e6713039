"""The files of a split: patterns, sets of shards, what is refused."""

import json
import re

import pytest

from common.data import files
from common.errors import DataError
from common.preparation import writing


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
    files.write(f"{tmp_path}/my set/{name}", [b"x"])
    with pytest.raises(DataError) as refused:
        files.find_shards(f"{tmp_path}/my set/", "train-*", "train")
    assert (f"python -m scripts.prepare '{tmp_path}/my set' makes" in str(refused.value)) == raw
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("where", ["local", "gs"])
def test_a_folder_that_a_preparation_has_not_ended(tmp_path, request, where):
    """Each family opens its data with `find` or `read_manifest`."""
    root = f"{tmp_path}/set" if where == "local" else f"{request.getfixturevalue('gcs').bucket()}/s"
    files.write(f"{root}/train-0", [b"x"])
    files.write(f"{root}/prepare_state/plan.json", [b"null"])
    opens = (lambda: files.find(root, "train-0", "x"), lambda: files.read_manifest(f"{root}/"))
    damaged = (None, b"null", b"{}", b"5", b'"a\\nb"', b'""', b"[" * 99_999, b"\xff")
    for command in (*damaged, b'"python -m x"'):
        named = "the command that began them" if command in damaged else "`python -m x`"
        if command:
            files.write(f"{root}/prepare_state/command.json", [command])
        for act in opens:
            with pytest.raises(DataError, match=f"{root}/? holds unfinished records: {named}"):
                act()
    files.write(f"{root}/manifest.json", [b"{}"])
    assert [act() for act in opens] == [(f"{root}/train-0",), b"{}"]


def test_sizes_that_a_manifest_lists(tmp_path):
    files.write(f"{tmp_path}/a", [b"12"])
    rows = [{"name": "a", "bytes": 3}, {"name": "absent", "bytes": 1}]
    for content in ({}, [], {"splits": []}, {"splits": {"x": {"shards": [{"bytes": 1}]}}}):
        files.write(f"{tmp_path}/manifest.json", [json.dumps(content).encode()])
        files.check_sizes(str(tmp_path), [f"{tmp_path}/a"])  # says nothing of it
    files.write(
        f"{tmp_path}/manifest.json", [json.dumps({"splits": {"x": {"shards": rows}}}).encode()]
    )
    with pytest.raises(DataError, match=f"{tmp_path}/a has 2 bytes, manifest.json lists 3: "):
        files.check_sizes(str(tmp_path), [f"{tmp_path}/b", f"{tmp_path}/a"])


TWO = [{"name": "a", "examples": 3, "bytes": 2}, {"name": "b", "examples": 4, "bytes": 5}]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"examples": 6}, "was changed"),
        ({"examples": 1e999}, "was changed"),
        ({files.DIGEST: 5}, "was changed"),
        ({files.DIGEST: None}, ""),  # of another tool
        ({files.DIGEST: None, "examples": 6}, "train has 7 examples, its files 10"),
        ({files.DIGEST: None, "bytes": 1}, "train has 7 bytes, its files 6"),
        ({files.DIGEST: None, "bytes": 1e999}, "OverflowError"),
    ],
)
def test_counts_that_were_changed_are_refused(change, problem, tmp_path):
    path = tmp_path / "manifest.json"
    split = {"examples": 7, "bytes": 7, "shards": TWO}
    writing.save_manifest(str(tmp_path), {"splits": {"train": split}})
    content = json.loads(path.read_text())
    for key, value in change.items():
        (content if key == files.DIGEST else content["splits"]["train"]["shards"][0])[key] = value
    if content[files.DIGEST] is None:
        del content[files.DIGEST]
    path.write_text(json.dumps(content))
    for fix in ("move it away", "the command that began them writes it again"):
        if problem:
            with pytest.raises(DataError, match=f"^{path} was not .*{problem}.*: {fix}"):
                files.read_manifest(str(tmp_path))
        else:
            assert files.read_manifest(str(tmp_path)) == path.read_bytes()
        files.write(f"{tmp_path}/prepare_state/plan.json", [b"{}"])
        files.write(f"{tmp_path}/prepare_state/command.json/a folder", [b""])


NAMES = ["set[1]", "a*c", "a?c", "b\\c"]  # each is the pattern of another one's name, too
OTHERS = ["set1", "abc", "axc", "bc"]


@pytest.mark.parametrize("where", ["local", "gs"])
def test_names_with_signs_of_patterns(tmp_path, request, where):
    root = str(tmp_path) if where == "local" else request.getfixturevalue("gcs").bucket()
    names = NAMES if where == "local" else NAMES[:3]
    for name in (*names, *OTHERS):
        files.write(f"{root}/{name}/in/train-0", [b"x"])
        files.write(f"{root}/{name}/v[0]", [b"x"])
        files.write(f"{root}/{name}/v0", [b"x"])
    for name in names:
        folder = f"{root}/{name}"
        for patterns in ("in/train-*", "*/train-*", "in/train-0", f"{folder}/in/train-*"):
            assert files.find(folder, patterns, "records") == (f"{folder}/in/train-0",)
        assert files.find(folder, "v[0]", "file") == (f"{folder}/v[0]",)
        assert files.find(folder, "v[0-9]", "file") == (f"{folder}/v0",)
    with pytest.raises(DataError, match="no such folder"):
        files.find(f"{root}/set[12]", "v0", "file")
    assert files.find("", f"{root}/set[12]/v0", "file") == (f"{root}/set1/v0",)  # a pattern


def test_write_is_complete_or_absent(tmp_path):
    path = tmp_path / "made" / "when needed"
    files.write(str(path), [])
    assert path.read_bytes() == b""

    def parts():
        yield b"new"
        temporary, _ = sorted(path.parent.iterdir())
        assert re.fullmatch(r"tmp\.when needed\.[0-9a-f]{8}", temporary.name)
        assert path.read_bytes() == b""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write(str(path), parts())
    assert path.read_bytes() == b"" and list(path.parent.iterdir()) == [path]
    files.write(str(path), [b"new", b"er"])
    assert path.read_bytes() == b"newer" and list(path.parent.iterdir()) == [path]


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
