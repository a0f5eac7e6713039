"""What a manifest says of a checkpoint's arrays, and what differs between two manifests."""

import types
import zlib
from typing import Any

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
    copies = manifest.host_copies(tree)
    assert manifest.checksums(copies) == dict.fromkeys(sorted(tree), zlib.crc32(x.tobytes()))
    assert copies == {}  # their memory is free again

    def pieces(name):
        return [piece.tobytes() for piece in manifest.array_pieces(tree[name])]

    assert pieces("all") == [x.tobytes()]
    assert pieces("cut") == [x[i : i + 2].tobytes() for i in range(0, 16, 2)]


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
@pytest.mark.parametrize("shape", [(), (7, 5), (300, 1000), (0, 3)])
def test_copies_outlive_the_donation_of_their_arrays(shape, dtype, count):
    """On CPUs they are views: jax must not write the next step's values there."""
    value = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    mesh = sharding.make(BATCH_AXES, 1, jax.devices()[:count])
    place = sharding.replicated(mesh)
    double = jax.jit(lambda x: x + x, donate_argnums=0, out_shardings=place)
    x = double(jax.device_put(value, place))
    copies, expected = manifest.host_copies({"x": x}), zlib.crc32((value + value).tobytes())
    for _ in range(3):
        x = double(x)
    x.block_until_ready()
    assert manifest.checksums(copies) == {"x": expected}


@pytest.mark.parametrize("is_replicated", [True, False])
def test_an_array_of_which_other_processes_hold_pieces_has_no_checksum(is_replicated, monkeypatch):
    class Array:
        """What one of two processes sees."""

        is_fully_replicated, is_fully_addressable = is_replicated, False

        @property
        def addressable_shards(self):
            return [types.SimpleNamespace(data=own)]

    own = jnp.arange(3)
    monkeypatch.setattr(manifest, "jax", types.SimpleNamespace(Array=Array))
    assert manifest.checksums(manifest.host_copies({"w": Array()})) == {
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


@pytest.mark.parametrize(
    ("then", "now", "line"),
    [
        (["a", "b", ""], ["a", "b"], None),
        (["a", "b"], ["a", "x", "c"], "entry 1 of k (2 differ; 2 then, 3 now): 'b' in the ch"),
        (
            ["a", "b", "c"],
            ["a"],
            "entry 1 of k (2 differ; 3 then, 1 now): 'b' in the checkpoint, noth",
        ),
        (["a", "b"], ["b", "a"], "entry 0 of k (2 differ): 'a' in the checkpoint, 'b' in the data"),
        (3, 4, "k: 3 in the checkpoint, 4 in the data"),
        (None, 4, None),
        ([""], ["a"], None),  # an imported model knows no names
    ],
)
def test_what_means_something_else(then, now, line):
    found = manifest.other_meaning({"k": then, "other": 1}, {"k": now})
    assert len(found) == (line is not None) and (not line or found[0].startswith(line))


def test_what_was_asked_for_otherwise():
    then = {"config": {"a": 1, "b": {"c": 2}}, "n": 5}
    assert manifest.changes(then, {"config": {"a": 1, "b": {"c": 3}}, "n": 6}) == [
        "config.b.c was 2, is now 3",
        "n was 5, is now 6",
    ]


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (None, ""),
        (32, ""),
        (16, "--config.bn_span=16/64 keeps 16"),
        (24, "averaged over 24 photos"),
    ],
)
def test_other_batches_of_batch_norm_are_noted(then, words):
    """64 photos on 4 devices."""
    programs: Any = types.SimpleNamespace(norm_examples=32, examples_per_pass=64)
    programs.benchmark = types.SimpleNamespace(unit="photos")
    programs.mesh = types.SimpleNamespace(size=4)
    note = manifest.norm_change(programs, then, {"mean": jnp.zeros(2)})
    assert words in note and bool(note) == bool(words)
    assert manifest.norm_change(programs, then, {"count": jnp.zeros(2, int)}) == ""


def test_a_manifest_describes_arrays():
    good = {"tree": {}, "checksums": {}, "step": 3}
    manifest.check_manifest(good)
    for bad, words in (
        ([], "no arrays"),
        ({"tree": {}}, "no arrays"),
        ({**good, "tree": 1}, "tree: 1"),
    ):
        with pytest.raises(ValueError, match=words):
            manifest.check_manifest(bad)
