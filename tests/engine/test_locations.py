"""Paths that a user may type: what each is taken for, and what is refused in one line."""

import concurrent.futures
import os
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.errors import CheckpointError, ConfigError, visible
from engine import locations
from engine.checkpoint.checkpointer import Checkpointer


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        *((f"gs:{slashes}bucket/run", "gs://bucket/run$") for slashes in ("/", "", "///")),
        *((path, "gs://BUCKET/FOLDER$") for path in ("gs://", "gs:")),
        ("s3://bucket/run", "s3:// is not supported"),
        ("GS://bucket/run", "GS:// is not supported"),
        ("file:///home/run", "file:// is not supported"),
    ],
)
def test_another_scheme_is_refused(path, problem):
    for check in (locations.check_path, locations.check_results_folder):
        with pytest.raises(ConfigError, match=rf"^\$TPU_MODEL_DIR={path}: .*{problem}"):
            check(path, "$TPU_MODEL_DIR")


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        *((path, path) for path in ("gs://bucket/a b/c", "gs://bucket", "a:b", "//data", "")),
        ("2026-11-22T10:00/data", "2026-11-22T10:00/data"),
        ("~/data", "/home/me/data"),
    ],
)
def test_what_is_accepted(path, taken, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert locations.check_path(path, "x") == taken


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("gs://bucket/run/", "gs://bucket/run/"),
        ("gs://bucket/a:/b", "gs://bucket/a:/b"),
        ("~/run/", "/home/me/run"),
        ("run", "/work/run"),
        ("a:b/c", "/work/a:b/c"),
    ],
)
def test_a_folder_for_results_is_absolute(path, taken, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(os, "getcwd", lambda: "/work")
    assert locations.check_results_folder(path, "x") == taken


# --- All libraries take a path as it is, or one line refuses it.

PRINTABLE = [f"a{c}b" for c in string.punctuation + string.whitespace if c != "/"]
ODD = ["a ", "a.", "~", "a/~", "%41", "[ab]", "{a,b}", "gs:", "a:", "ä", "日本", "😀", "e\u0301"]
ODD += ["a//b", "./a", "a/../b", "-a"]


@pytest.mark.parametrize("name", [*PRINTABLE, *ODD])
def test_a_local_folder_holds_checkpoints_or_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    try:
        folder = locations.check_results_folder(name, "--workdir")
    except ConfigError as error:
        assert any(c in name for c in "\\[]*?:\t\n\r\x0b\x0c"), error
        assert visible(f"--workdir={name}") in str(error)
        return
    checkpoints = Checkpointer(f"{folder}/checkpoints", keep=1, best=lambda: None)
    array = jax.device_put(jnp.arange(8.0))
    checkpoints.save(1, {"w": array}, {"o": array}, {})
    checkpoints.wait()
    spec = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=array.sharding)
    restored = checkpoints.restore(1, {"model": {"w": spec}})
    checkpoints.close()
    np.testing.assert_array_equal(restored["model"]["w"], np.arange(8))
    inside = sum(len(files) for _, _, files in os.walk(folder))
    assert inside == sum(len(files) for _, _, files in os.walk(tmp_path)) > 5


# --- Whether a folder can be written to.


@pytest.mark.parametrize("name", ["file/below", "file", "nul\0", "nowhere://bucket/folder"])
def test_check_folder_says_what_cannot_be(name, tmp_path):
    (tmp_path / "file").write_text("text")
    path = name if "://" in name else f"{tmp_path}/{name}"
    with pytest.raises(CheckpointError) as caught:
        locations.check_folder(path)
    assert str(caught.value).startswith(visible(f"cannot write to --workdir={path}: "))
    assert len(str(caught.value).splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_check_folder_of_many_hosts_at_once(tmp_path):
    folder = str(tmp_path / "new" / "folder")
    with concurrent.futures.ThreadPoolExecutor(16) as hosts:
        list(hosts.map(locations.check_folder, [folder] * 300))
    assert os.listdir(folder) == []
