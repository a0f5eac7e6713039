"""What a manifest says of a checkpoint's arrays, and what differs between two manifests."""

import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.base import BATCH_AXES
from engine import sharding
from engine.checkpoint import manifest
from engine.checkpoint.manifest import describe_arrays


def test_describe_names_every_leaf():
    pair = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), {"b": np.zeros((), np.int32), "none": None}
    tree = {"a": pair, "empty": {}, "t": optax.TraceState(trace=[np.zeros(4, bool)])}
    assert describe_arrays(tree) == {
        "a/0": "bfloat16[2,3]",
        "a/1/b": "int32[]",
        "t/trace/0": "bool[4]",
    }


def test_placeholders_are_what_was_described():
    description = {"a/0": "bfloat16[2,3]", "a/1/b": "int32[]", "t": "bool[4]"}
    tree = manifest.placeholders(description)
    assert describe_arrays(tree) == description
    assert tree["a"]["0"].strides == (0, 0) and not tree["t"].any()


def test_checksums_are_of_the_bytes():
    """However the array lies on the devices of this process."""
    x = np.arange(16, dtype=np.float32)
    mesh = sharding.make(BATCH_AXES, 2)
    tree = {
        "host": x,
        "one": jnp.asarray(x),  # on one device
        "all": jax.device_put(x, sharding.replicated(mesh)),
        "cut": jax.device_put(x, sharding.batch_sharding(mesh)),
    }
    assert manifest.checksums(tree) == dict.fromkeys(sorted(tree), zlib.crc32(x.tobytes()))
    assert manifest.array_pieces(tree["all"]) == [x.tobytes()]
    assert manifest.array_pieces(tree["cut"]) == [x[i : i + 2].tobytes() for i in range(0, 16, 2)]


@pytest.mark.parametrize("is_replicated", [True, False])
def test_an_array_of_which_other_processes_hold_pieces_has_no_checksum(is_replicated, monkeypatch):
    class Array:
        """What one of two processes sees."""

        is_fully_replicated, is_fully_addressable = is_replicated, False

        def addressable_data(self, index):
            return [own][index]

    own = jnp.arange(3)
    monkeypatch.setattr(manifest, "jax", types.SimpleNamespace(Array=Array))
    assert manifest.checksums({"w": Array()}) == {
        "w": zlib.crc32(np.asarray(own).tobytes()) if is_replicated else None
    }


def test_arrays_that_differ_are_listed():
    saved = {"a": "int32[]", "b": "float32[2]", "c": "float32[3]"}
    wanted = {"c": "float32[3]", "b": "float32[4]", "d": "bool[1]"}
    assert list(manifest.array_differences(saved, wanted)) == [
        "a: the checkpoint has int32[], the config wants nothing",
        "b: the checkpoint has float32[2], the config wants float32[4]",
        "d: the checkpoint has nothing, the config wants bool[1]",
    ]
