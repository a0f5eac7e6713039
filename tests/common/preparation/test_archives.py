"""Archives are unpacked completely or not at all, whatever wrote them."""

import io
import tarfile
import zipfile
from typing import Any

import pytest

from common.preparation import archives
from common.preparation.folders import Folder
from common.preparation.sources import SourceError

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
    + [("encrypted", ".zip"), ("outside", ".tar"), ("device", ".tgz")]
    + [("between", ".tar"), ("header", ".tar")],
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
    elif fault == "encrypted":
        at = data.rindex(b"PK\1\2")
        path.write_bytes(data[: at + 8] + b"\1" + data[at + 9 :])
    else:
        with tarfile.open(path, "w:gz" if ending == ".tgz" else "w") as archive:
            info = tarfile.TarInfo("../x" if fault == "outside" else "x")
            info.type = tarfile.REGTYPE if fault == "outside" else tarfile.FIFOTYPE
            archive.addfile(info)
    with pytest.raises(SourceError, match=rf"a{ending} is damaged.*: get it again"):
        archives.unpack(str(path), str(folder))
    assert [*folder.parent.glob("*")] == [] and not (tmp_path / "x").exists()
