"""The mesh, what it refuses in words, and the prefetched of batches; what is said of TPUs and GPUs.

No test has a GPU: the driver's files are made up, in the form of NVIDIA's.
"""

import itertools
import math
import os
import re
import subprocess
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.base import BATCH_AXES
from common.errors import DeviceError
from engine import devices, sharding, step
from tests.device import models


@pytest.mark.parametrize(
    ("group_size", "shape"), [(1, (8, 1)), (2, (4, 2)), (8, (1, 8)), (0, (1, 8))]
)
def test_groups_are_neighbours(group_size, shape):
    mesh = sharding.make(BATCH_AXES, group_size)
    assert mesh.axis_names == BATCH_AXES
    assert [[d.id for d in group] for group in mesh.devices] == np.arange(8).reshape(shape).tolist()


@pytest.mark.parametrize(
    ("span", "count", "size"),
    [
        *((0, 8, 8), ("0", 8, 8), ("4", 8, 4), (8, 8, 8)),
        *(("64/4096", 64, 1), ("64/4096", 128, 2), ("16/64", 8, 2), ("64/64", 8, 8)),
        *(("1/1", 1, 1), ("1/8", 8, 1)),
    ],
)
def test_a_span_is_a_number_of_devices(span, count, size):
    """A part of the images is as many devices as have these images."""
    assert sharding.group_size(span, count) == size


@pytest.mark.parametrize(
    ("span", "count", "groups", "words"),
    [
        (5, 12, 0, "the 12 devices of this run; use one of 1, 2, 3, 4, 6, 12, or 0"),
        ("two", 3, 0, "the 3 devices of this run; use one of 1, 3, or 0"),
        (-1, 8, 0, "the 8 devices of this run; use one of 1, 2, 4, 8, or 0"),
        # 8 * 24 devices do not divide 4096 images.
        ("64/4096", 24, 64, "of 64 images each: use a multiple of 64 devices"),
        ("64/4096", 8, 64, "or 8 times as many micro-batches .* with config.bn_span=64/512"),
        # Two micro-batches of 12 images on 6 devices, in 2 groups.
        ("6/24", 6, 4, "multiple of 4 devices, or 2 times as many .* config.bn_span=6/12"),
    ],
)
def test_a_span_that_does_not_divide_is_refused_with_a_fix(span, count, groups, words):
    text = f": {count} devices cannot be {groups} groups of equal size, .*" if groups else ".*"
    with pytest.raises(DeviceError, match=f"^config.bn_span={span}{text}{words}.*\\Z"):
        sharding.group_size(span, count)


@pytest.mark.parametrize("span", ["0/8", "8/0", "3/8", "8/4", "x/8", "-1/8", "1/8/8", "64/"])
def test_a_part_of_the_images_must_divide_them(span):
    refusals = (lambda: sharding.group_size(span, 8), lambda: sharding.check_image_span(span, 8, 1))
    for refuse in refusals:
        with pytest.raises(DeviceError, match=rf"^config.bn_span={span}: write a number of "):
            refuse()


def test_a_span_counts_the_images_of_one_forward_pass():
    sharding.check_image_span("64/4096", 4096, 1)
    sharding.check_image_span("64/4096", 8192, 2)
    for parts, rest in ((1, ": write 64/8192"), (4, " / 4 micro-batches: write 64/2048")):
        with pytest.raises(DeviceError, match=f"^config.bn_span=64/4096 .* 8192{rest}$"):
            sharding.check_image_span("64/4096", 8192, parts)


@pytest.mark.parametrize(
    ("key", "batch_size", "parts", "unit", "near"),
    [
        ("train_batch_size", 1001, 1, 8, (1000, 1008)),
        ("train_batch_size", 1024, 3, 24, (1008, 1032)),
        ("eval_batch_size", 5, 1, 8, (8, 16)),
        ("eval_batch_size", -8, 1, 8, (8, 16)),
    ],
)
def test_uneven_batches_are_refused_with_a_fix(key, batch_size, parts, unit, near):
    mesh, micro = sharding.make(BATCH_AXES, 1), f" x {parts} micro-batches" * (parts > 1)
    with pytest.raises(DeviceError) as caught:
        sharding.check_batch(mesh, key, batch_size, parts)
    assert str(caught.value).startswith(f"config.{key}={batch_size} cannot be divided among 8 ")
    fix = f"devices{micro} on 1 host(s): use a multiple of {unit}, such as {near[0]} or {near[1]}"
    assert str(caught.value).endswith(fix)
    for size in near:
        sharding.check_batch(mesh, key, size, parts)


def test_two_cores_with_the_same_coordinates_are_one_chip():
    ids = itertools.count()

    def core(process, *coords):
        return types.SimpleNamespace(id=next(ids), process_index=process, coords=list(coords))

    def count(*devices):
        fake: Any = types.SimpleNamespace(devices=np.array(devices, dtype=object).reshape(-1, 1))
        return sharding.num_chips(fake)

    v3 = [core(0, x, y, 0) for x in range(2) for y in range(2) for _ in range(2)]
    assert count(*v3) == 4
    v4 = [core(process, x, 0, process) for process in range(2) for x in range(4)]
    assert count(*v4) == 8
    assert count(core(0, 0, 0, 0), core(1, 0, 0, 0)) == 2  # two slices count alike
    assert count(*jax.devices()) == 8  # these have no coordinates


@pytest.mark.parametrize(
    ("platforms", "chips", "backend", "is_refused"),
    [("", 4, "cpu", True), ("cpu", 4, "cpu", False), ("", 0, "cpu", False), ("", 4, "tpu", False)],
)
def test_the_cpu_of_a_machine_with_tpus_is_refused(
    platforms, chips, backend, is_refused, monkeypatch
):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(devices, "tpu_chips", lambda: chips)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    if is_refused:
        with pytest.raises(DeviceError, match=r"^this machine has 4 TPU chip\(s\) but jax "):
            devices.check_platform()
    else:
        devices.check_platform()


@pytest.mark.parametrize("platforms", ["cuda", "nonsense"])
def test_a_platform_that_jax_cannot_open_is_one_line(platforms):
    """Opening checkpoints is the first use of jax in predict.py; they are not to blame."""
    code = """
from common import entry
from engine import devices
from engine.checkpoint.checkpointer import Checkpointer
from common.errors import DeviceError
def main():
  try:
    devices.check_platform()
  except DeviceError as error:
    print(error)
  Checkpointer("/nowhere", keep=1, best=None)
entry.run(main)"""
    env = {**os.environ, "JAX_PLATFORMS": platforms}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count("\n") == 1
    assert done.stdout.startswith(f"JAX_PLATFORMS={platforms}: jax cannot open these devices (")
    assert done.stderr.splitlines()[-1] == f"ERROR: {done.stdout.strip()}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("own", [{"a": 1}, "a text that is longer than the other one"])
def test_every_process_gets_the_value_of_process_0(own, monkeypatch):
    """All processes exchange arrays of one shape, however long their own values are."""
    value = {"best": [1, None, "ä"]}
    assert sharding.broadcast(value) is value  # alone
    text = np.frombuffer(b'{"best": [1, null, "\\u00e4"]}', np.uint8)
    sent, answers = [], iter([np.asarray(len(text)), text])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        sharding.multihost_utils,
        "broadcast_one_to_all",
        lambda x: sent.append(x.shape) or next(answers),
    )
    assert sharding.broadcast(own) == value
    assert sent == [(), text.shape]


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


def numbers(prefetched):
    return [int(np.asarray(batch["x"])[0, 0]) for batch in prefetched]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("count", [0, 2, 5])
def test_feed_keeps_the_order_and_ends(ahead, count):
    prefetched = sharding.Feed(Source(range(count)), sharding.make(BATCH_AXES, 2), ahead)
    assert numbers(prefetched) == list(range(count))
    assert numbers(prefetched) == []


def test_feed_reads_ahead_and_no_further():
    source = Source(range(9))
    batches = iter(sharding.Feed(source, sharding.make(BATCH_AXES, 2)))  # two ahead
    assert source.taken == 0
    taken = [(next(batches), source.taken)[1] for _ in range(9)]
    assert taken == [3, 4, 5, 6, 7, 8, 9, 9, 9]


def test_feed_spreads_rows_over_all_devices_in_order():
    mesh = sharding.make(BATCH_AXES, 2)
    (batch,) = sharding.Feed(Source([5]), mesh)
    assert set(batch) == {"x", "y"}
    assert batch["x"].sharding == sharding.batch_sharding(mesh)
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
    assert numbers(sharding.Feed(source, sharding.make(BATCH_AXES, 2))) == [1] * 5
    want = [a["x"], a["y"], b["x"], b["y"], a["x"], a["y"]]
    assert [id(value) for value in copied] == [id(value) for value in want]


def test_the_feed_counts(monkeypatch):
    """Copies are part of the wait; seconds that the host's threads say are added up."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(sharding.time, "monotonic", lambda: now.seconds)
    make = jax.make_array_from_process_local_data

    def slow(*args):
        now.seconds += 0.25
        return make(*args)

    monkeypatch.setattr(jax, "make_array_from_process_local_data", slow)

    def batches(**more):
        for _ in range(3):
            now.seconds += 2.0
            yield {"x": np.zeros(8, np.float32), **more}

    mesh = sharding.make(("a", "b"), 1)
    prefetched = sharding.Feed(batches(host_seconds=np.full(8, 0.5, np.float32)), mesh)
    for batch in prefetched:
        assert list(batch) == ["x"]
        now.seconds += 1000.0  # the caller's own time
    assert (prefetched.waited, prefetched.copied, prefetched.worked) == (6.75, 0.75, 12.0)

    def arrive(batch):  # a copy to a TPU or GPU goes on after `make` has returned
        now.seconds += 0.5
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", arrive)
        prefetched = sharding.Feed(batches(), mesh)
        list(prefetched)
    assert (prefetched.waited, prefetched.copied) == (6.75 + 1.5, 0.75 + 1.5)
    prefetched = sharding.Feed(batches(), mesh)
    list(prefetched)
    assert math.isnan(prefetched.worked)


# --- The devices of this machine.


@pytest.mark.parametrize(
    ("number", "package", "wanted", "words"),
    [
        (0, "", "", ""),
        (1, "jax-cuda12-plugin", "", ""),
        (1, "", "cpu", ""),  # whoever asks for the CPU is left alone
        (1, "", "", "has 1 NVIDIA GPU, but jax is installed without CUDA"),
        (2, "", "cuda", "has 2 NVIDIA GPUs, but jax is installed without CUDA"),
    ],
)
def test_what_keeps_jax_from_the_gpus(number, package, wanted, words, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", wanted)
    monkeypatch.setattr(devices, "installed_version", lambda name: "1.0" if name == package else "")
    for index in range(number):
        (tmp_path / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)
    text, fix = devices.gpu_obstacle(str(tmp_path))
    assert words in text and bool(text) == bool(fix) == bool(words)


@pytest.mark.parametrize("name", sorted(models.table()))
def test_the_gradient_can_be_lowered_for_a_gpu(name):
    model = models.load(name, "bfloat16")

    def loss(params, state, batch, rng):
        return model.benchmark.loss(params, state, batch, rng)

    traced = jax.jit(step.make_gradients(loss, models.one_device(), 1)).trace(
        model.params, model.model_state, model.batch, jax.random.key(0)
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert not re.findall(r"tpu_custom_call|@Sharding\b", text) and "func.func public @main" in text


def test_a_full_memory_is_one_line(monkeypatch):
    error = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nBuffers"
    )
    outer = RuntimeError("in a thread")
    outer.__cause__ = error
    for one in (error, outer):
        told = devices.explain_full_memory(one)
        assert isinstance(told, DeviceError) and "17179869184 bytes.): use a smaller" in str(told)
        assert "nvidia-smi" not in str(told)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "nvidia-smi shows what else uses the GPU" in str(devices.explain_full_memory(error))


def test_parts_of_the_images_are_parsed():
    assert sharding.parse_image_span("64/4096") == (64, 4096)
    assert sharding.parse_image_span("1/1") == (1, 1)
    for span in ("0/8", "8/0", "3/8", "16/8", "8", "8/16/32", "-8/16"):
        with pytest.raises(DeviceError, match=f"^config.bn_span={span}: "):
            sharding.parse_image_span(span)
