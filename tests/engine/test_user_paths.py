"""Paths that a person may type: all libraries take them as they are, or one line refuses them."""

import os
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine import paths
from engine.checkpoint import Checkpointer
from errors import ConfigError, visible

PRINTABLE = [f"a{c}b" for c in string.punctuation + string.whitespace if c != "/"]
ODD = ["a ", "a.", "~", "a/~", "%41", "[ab]", "{a,b}", "gs:", "a:", "ä", "日本", "😀", "e\u0301"]
ODD += ["a//b", "./a", "a/../b", "-a"]


@pytest.mark.parametrize("name", [*PRINTABLE, *ODD])
def test_a_local_folder_holds_checkpoints_or_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    try:
        folder = paths.check_writable(name, "--workdir")
    except ConfigError as error:
        assert any(c in name for c in "\\[]:\t\n\r\x0b\x0c"), error
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
