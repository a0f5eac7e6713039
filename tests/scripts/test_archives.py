"""Archives are unpacked completely or not at all, whatever wrote them."""

import io
import os
import shutil
import stat
import tarfile
import zipfile
from typing import Any

import pytest

from common.locks import LockError
from common.preparation.folders import Folder
from common.preparation.sources import SourceError
from scripts import archives

FILES = {f"set/{name}/é{i}.txt": bytes([i]) * 5_000 for name in ("a", "b") for i in range(9)}


def pack(path, names=FILES, mode: Any = "w"):
    """Writes an archive of some of the FILES, and one that Mac OS adds."""
    rows = {name: FILES.get(name, b"x") for name in names} | {"__MACOSX/set/._a": b"x"}
    if path.suffix.lower() == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in rows.items():
                info = zipfile.ZipInfo()
                info.filename = name.replace("/", "\\") if mode == "windows" else name
                archive.writestr(info, data)
    else:
        with tarfile.open(path, mode) as archive:
            for name, data in rows.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return str(path)


def content(folder):
    return {file.name: folder.head(file.name) for file in folder.files}


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.zip", ""), ("a.ZIP", ""), ("a.zip", "windows"), ("a.tar", "w"), ("a.tgz", "w:gz")]
    + [("a.tar.bz2", "w:bz2"), ("a.tar.xz", "w:xz")],
)
def test_all_files_are_listed_and_unpacked_once(name, mode, tmp_path):
    path, folder = pack(tmp_path / name, mode=mode), str(tmp_path / "raw" / "a")
    listed = archives.Listing.of(path, folder)
    assert listed.path == folder and content(listed) == FILES
    listed.archive.close()
    assert not (tmp_path / "raw").exists()
    archives.unpack(path, folder)
    assert content(Folder.open(folder)) == FILES
    assert [each.name for each in (tmp_path / "raw").iterdir()] == ["a"]
    (tmp_path / "raw" / "a" / "set" / "a" / "é0.txt").write_bytes(b"kept")
    archives.unpack(path, folder)
    assert content(Folder.open(folder))["set/a/é0.txt"] == b"kept"


def test_another_archive_of_the_same_name(tmp_path):
    folder = str(tmp_path / "raw" / "archive")
    (tmp_path / "other").mkdir()
    archives.unpack(pack(tmp_path / "archive.zip"), folder)
    other = pack(tmp_path / "other" / "archive.zip", [*FILES][:3])
    with pytest.raises(SourceError, match="archive.*which has other files"):
        archives.unpack(other, folder)


@pytest.mark.parametrize(
    ("fault", "ending"),
    [(fault, ending) for fault in ("html", "cut") for ending in (".zip", ".tar", ".tgz")]
    + [("encrypted", ".zip"), ("between", ".tar"), ("header", ".tar")],
)
def test_nothing_half_made(fault, ending, tmp_path):
    path, folder = tmp_path / f"a{ending}", tmp_path / "raw" / "a"
    pack(path, mode="w:gz" if ending == ".tgz" else "w")
    data = path.read_bytes()
    if fault == "html":
        path.write_bytes(b"<!DOCTYPE html>")
    elif fault == "cut":
        path.write_bytes(data[: len(data) // 2 // 512 * 512])
    elif fault in ("between", "header"):  # the end of a member, where tarfile sees no damage
        with tarfile.open(path) as archive:
            at = archive.getmembers()[9].offset
        path.write_bytes(data[:at] + (b"x" * 512 + data[at + 512 :] if fault == "header" else b""))
    else:
        at = data.index(b"PK\1\2")
        path.write_bytes(data[: at + 8] + b"\1" + data[at + 9 :])
    with pytest.raises(SourceError, match=rf"a{ending} is damaged.*: get it again"):
        archives.unpack(str(path), str(folder))
    assert not folder.parent.exists()


def test_nothing_leads_out_of_the_folder(tmp_path, capsys):
    """CVE-2025-4517: a link through names of more than PATH_MAX passes Python's filter "data"."""
    victim, folder = tmp_path / "victim", tmp_path / "raw" / "a"
    victim.write_bytes(b"untouched")
    deep, steps = "d" * 247, "abcdefghijklmnop"

    def add(name, kind: Any = tarfile.REGTYPE, to="", data=b""):
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, to, len(data)
        archive.addfile(info, io.BytesIO(data))

    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        add("set/a/1.txt", data=b"1")
        inner = ""
        for step in steps:
            add(f"{inner}{deep}", tarfile.DIRTYPE)
            add(f"{inner}{step}", tarfile.SYMTYPE, deep)
            inner += f"{deep}/"
        far = "/".join([*steps, "l" * 254])
        add(far, tarfile.SYMTYPE, "../" * len(steps))
        add("escape", tarfile.SYMTYPE, f"{far}/../..")
        add("flag", tarfile.LNKTYPE, "escape/victim")
        add("flag", data=b"2")
        add("../victim", data=b"3")
        add("/set/b/4.txt", data=b"4")
        add("set/../../../victim", data=b"5")
        add("same.txt", tarfile.LNKTYPE, "./set/a/1.txt")
        add("linked.txt", tarfile.SYMTYPE, "set/a/1.txt")
        add("set/pipe", tarfile.FIFOTYPE)
        add("set/disk", tarfile.BLKTYPE)
    expected = {"flag": b"2", "same.txt": b"1", "set/a/1.txt": b"1", "set/b/4.txt": b"4"}
    listed = archives.Listing.of(str(tmp_path / "a.tar"), str(folder))
    assert content(listed) == expected
    listed.archive.close()
    archives.unpack(str(tmp_path / "a.tar"), str(folder))
    made = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    stamp = made.pop(".unpacked")
    assert {name: path.read_bytes() for name, path in made.items()} == expected
    assert not any(path.is_symlink() for path in folder.rglob("*")) and stamp.exists()
    assert {path.stat().st_nlink for path in made.values()} == {1}
    assert victim.read_bytes() == b"untouched"
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert len(lines) == 2 and all("a.tar: 24 links, devices or names" in line for line in lines)


def test_links_and_outside_names_in_a_zip(tmp_path, capsys):
    path, folder = tmp_path / "a.zip", tmp_path / "raw" / "a"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a/1", "link", "../x", "..\\x", "/b"):
            info = zipfile.ZipInfo()
            info.filename = name
            info.external_attr = stat.S_IFLNK << 16 if name == "link" else 0
            archive.writestr(info, b"/etc/passwd")
    archives.unpack(str(path), str(folder))
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    assert files == [".unpacked", "a/1", "b"] and not (tmp_path / "raw" / "x").exists()
    lines = capsys.readouterr().out
    assert "3 links, devices or names that are too long or lead out of its folder: link" in lines


@pytest.mark.parametrize("act", [archives.unpack, archives.Listing.of])
@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_names_that_no_disk_takes(act, name, tmp_path, capsys):
    path, folder = pack(tmp_path / name, ["a", "x/" + "é" * 130]), tmp_path / "raw" / "a"
    if listed := act(path, str(folder)):
        listed.archive.close()
    left_out = f"left out of {path}: 1 links, devices or names that are too long"
    assert left_out in capsys.readouterr().out


def test_files_that_are_there_twice_and_folders_of_windows(tmp_path, capsys):
    """`tar cf a.tar cat cat/1` stores a hard link to itself."""
    links = {"cat/1": "./cat/1", "late": "cat/1"}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("cat/1", *links):
            info = tarfile.TarInfo(name)
            is_file = not archive.getmembers()
            info.size, info.linkname = int(is_file), "" if is_file else links[name]
            info.type = tarfile.REGTYPE if is_file else tarfile.LNKTYPE
            archive.addfile(info, io.BytesIO(b"1"))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        for name in ("set\\", "set\\cat\\", "set\\cat\\1"):
            archive.writestr(name, b"1" * name.endswith("1"))
    for name, expected in (("a.tar", [*links]), ("b.zip", ["set/cat/1"])):
        folder = str(tmp_path / "raw" / name)
        listed = archives.Listing.of(str(tmp_path / name), folder)
        archives.unpack(str(tmp_path / name), folder)
        assert content(listed) == content(Folder.open(folder)) == dict.fromkeys(expected, b"1")
        listed.archive.close()
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize("names", [[], ["__MACOSX/a", ".DS_Store"]])
def test_an_archive_without_files(names, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    for act in (archives.unpack, archives.Listing.of):
        with pytest.raises(SourceError, match=r"a\.zip holds no files"):
            act(str(tmp_path / "a.zip"), str(tmp_path / "raw" / "a"))
    assert not (tmp_path / "raw").exists()


def test_an_archive_is_unpacked_by_one_process(tmp_path, monkeypatch):
    """The second one is refused, and unpacks what one that was killed has left."""
    path, folder = pack(tmp_path / "a.zip"), tmp_path / "raw" / "a"
    copy = shutil.copyfileobj

    def second(*streams):
        monkeypatch.setattr(shutil, "copyfileobj", copy)
        with pytest.raises(LockError, match=f"process {os.getpid()} on .* unpacks to {folder}"):
            archives.unpack(path, str(folder))
        copy(*streams)

    monkeypatch.setattr(shutil, "copyfileobj", second)
    archives.unpack(path, str(folder))
    assert content(Folder.open(str(folder))) == FILES
    shutil.rmtree(folder)
    (tmp_path / "raw" / "tmp.a" / "set").mkdir(parents=True)
    (tmp_path / "raw" / "tmp.a.lock").write_text("{}")
    archives.unpack(path, str(folder))
    assert content(Folder.open(str(folder))) == FILES
    assert [each.name for each in folder.parent.iterdir()] == ["a"]
