"""The mesh, what it refuses in words, and the feed of batches."""

import itertools
import types
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.base import BATCH_AXES
from engine import mesh as meshes
from errors import DeviceError


@pytest.mark.parametrize(
    ("group_size", "shape"), [(1, (8, 1)), (2, (4, 2)), (8, (1, 8)), (0, (1, 8))]
)
def test_groups_are_neighbours(group_size, shape):
    mesh = meshes.make(BATCH_AXES, group_size)
    assert mesh.axis_names == BATCH_AXES
    assert [[d.id for d in group] for group in mesh.devices] == np.arange(8).reshape(shape).tolist()


@pytest.mark.parametrize("group_size", [3, 5, 16, -1, -8])
def test_group_size_must_divide_the_devices(group_size):
    with pytest.raises(
        DeviceError, match=rf"^config.bn_span={group_size} does not divide the 8 devices.*$"
    ):
        meshes.make(BATCH_AXES, group_size)


@pytest.mark.parametrize("batch_size", [8, 64, 1000])
def test_even_batches_pass(batch_size):
    meshes.check_batch(meshes.make(BATCH_AXES, 1), "eval_batch_size", batch_size)


@pytest.mark.parametrize(
    ("key", "batch_size", "parts", "unit", "near"),
    [
        ("train_batch_size", 1001, 1, 8, (1000, 1008)),
        ("train_batch_size", 1000, 2, 16, (992, 1008)),
        ("train_batch_size", 1024, 3, 24, (1008, 1032)),
        ("eval_batch_size", 5, 1, 8, (8, 16)),
        ("eval_batch_size", 0, 1, 8, (8, 16)),
        ("eval_batch_size", -8, 1, 8, (8, 16)),
    ],
)
def test_uneven_batches_are_refused_with_a_remedy(key, batch_size, parts, unit, near):
    mesh = meshes.make(BATCH_AXES, 1)
    with pytest.raises(DeviceError) as caught:
        meshes.check_batch(mesh, key, batch_size, parts)
    micro = f" x {parts} micro-batches" if parts > 1 else ""
    assert str(caught.value) == (
        f"config.{key}={batch_size} cannot be divided among 8 devices{micro} on 1 host(s): "
        f"use a multiple of {unit}, such as {near[0]} or {near[1]}"
    )
    for size in near:
        meshes.check_batch(mesh, key, size, parts)


def test_two_cores_with_the_same_coordinates_are_one_chip():
    ids = itertools.count()

    def core(process, *coords):
        return types.SimpleNamespace(id=next(ids), process_index=process, coords=list(coords))

    def count(*devices):
        fake: Any = types.SimpleNamespace(devices=np.array(devices, dtype=object).reshape(-1, 1))
        return meshes.num_chips(fake)

    v3 = [core(0, x, y, 0) for x in range(2) for y in range(2) for _ in range(2)]
    assert count(*v3) == 4
    v4 = [core(process, x, 0, process) for process in range(2) for x in range(4)]
    assert count(*v4) == 8
    assert count(core(0, 0, 0, 0), core(1, 0, 0, 0)) == 2  # two slices count alike
    assert count(*jax.devices()) == 8  # these have no coordinates


# --- The feed.


class Source:
    """Batches of 8 rows, each named by its number; counts how many were taken."""

    def __init__(self, numbers):
        self.taken = 0
        self.batches = [{"x": np.full((8, 2), n), "y": np.arange(8) + n} for n in numbers]

    def __iter__(self):
        for batch in self.batches:
            self.taken += 1
            yield batch


def numbers(feed):
    return [int(np.asarray(batch["x"])[0, 0]) for batch in feed]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_feed_keeps_the_order_and_ends(ahead, count):
    feed = meshes.Feed(Source(range(count)), meshes.make(BATCH_AXES, 2), ahead)
    assert numbers(feed) == list(range(count))
    assert numbers(feed) == []


def test_feed_reads_ahead_and_no_further():
    source = Source(range(9))
    batches = iter(meshes.Feed(source, meshes.make(BATCH_AXES, 2), ahead=2))
    assert source.taken == 0
    taken = [(next(batches), source.taken)[1] for _ in range(9)]
    assert taken == [3, 4, 5, 6, 7, 8, 9, 9, 9]


def test_feed_spreads_rows_over_all_devices_in_order():
    mesh = meshes.make(BATCH_AXES, 2)
    (batch,) = meshes.Feed(Source([5]), mesh)
    assert set(batch) == {"x", "y"}
    assert batch["x"].sharding == meshes.batch_sharding(mesh)
    np.testing.assert_array_equal(batch["y"], np.arange(8) + 5)
    rows = {shard.device.id: np.asarray(shard.data) for shard in batch["y"].addressable_shards}
    assert {device: row.tolist() for device, row in rows.items()} == {i: [5 + i] for i in range(8)}


def test_feed_copies_a_repeated_batch_once(monkeypatch):
    copy, copied = jax.make_array_from_process_local_data, []
    monkeypatch.setattr(
        jax,
        "make_array_from_process_local_data",
        lambda sharding, value: copied.append(value) or copy(sharding, value),
    )
    source = Source([1, 1])
    a, b = source.batches  # equal, but not the same object
    source.batches = [a, a, a, b, a]
    assert numbers(meshes.Feed(source, meshes.make(BATCH_AXES, 2))) == [1] * 5
    want = [a["x"], a["y"], b["x"], b["y"], a["x"], a["y"]]
    assert [id(value) for value in copied] == [id(value) for value in want]


def test_feed_counts_the_seconds_spent_waiting(monkeypatch):
    now = 100.0
    monkeypatch.setattr(meshes.time, "monotonic", lambda: now)

    def slow():
        nonlocal now
        for batch in Source(range(3)).batches:
            now += 5
            yield batch

    feed = meshes.Feed(slow(), meshes.make(BATCH_AXES, 2), ahead=0)
    for i, _ in enumerate(feed, 1):
        now += 1000  # the caller's own time
        assert feed.waited == 5 * i
    assert feed.waited == 15
