"""The warning about slow input: when it comes, and which part it names."""

import math
import time
import types
from typing import Any

import jax
import numpy as np
import pytest

import benchmarks
import input_pipeline
from engine import mesh as meshes
from engine.report.bottleneck import Bottleneck
from ops import decoding
from tests.conftest import make_tiny_config


class Run:
    """Intervals of 10 s on a host with 8 decoding threads."""

    def __init__(self):
        self.clocks: Any = types.SimpleNamespace(waited=0.0, copied=0.0, worked=0.0)
        self.bottleneck = Bottleneck({"decoding": "buy time"}, threads=8)

    def interval(self, waited, copied=0.0, worked=0.0):
        self.clocks.waited += waited
        self.clocks.copied += copied
        self.clocks.worked += worked
        return self.bottleneck.interval(10.0, self.clocks)


def test_shares_are_of_each_interval():
    run = Run()
    expected = {"input_wait": 0.1, "input_transfer": 0.05, "decode_busy": 0.5}
    for _ in range(2):
        shares, warning = run.interval(1.0, 0.5, 40.0)
        assert shares == pytest.approx(expected) and not warning


@pytest.mark.parametrize(
    ("clocks", "part"),
    [
        ({"copied": 3.0, "worked": 78.0}, "transfer"),
        ({"copied": 0.1, "worked": 78.0}, "decoding"),
        ({"copied": 0.1, "worked": 8.0}, "reading"),
        ({"copied": 0.1, "worked": math.nan}, "input"),
    ],
)
def test_the_slow_part_is_named(clocks, part):
    run = Run()
    warnings = [run.interval(4.0, **clocks)[1] for _ in range(3)]
    assert warnings[:2] == ["", ""]
    assert warnings[2].startswith(f"WARNING input-bound: {part}. The devices waited for input 40%")
    assert warnings[2].endswith({"decoding": "Remedy: buy time"}.get(part, warnings[2][-20:]))
    assert len(warnings[2].splitlines()) == 1


def test_it_takes_several_slow_intervals_in_a_row_and_is_not_said_again_and_again():
    run = Run()
    assert not any(run.interval(waited)[1] for waited in [3, 3, 0.5] * 20)
    warnings = [bool(run.interval(3.0)[1]) for _ in range(299)]
    assert [i + 1 for i, warned in enumerate(warnings) if warned] == [3, 30]
    assert run.interval(3.0)[1]


def test_the_feed_counts(monkeypatch):
    """Copies are part of the wait; seconds that the host's threads say are added up."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(meshes.time, "monotonic", lambda: now.seconds)
    make = jax.make_array_from_process_local_data

    def slow(*args):
        now.seconds += 0.25
        return make(*args)

    monkeypatch.setattr(jax, "make_array_from_process_local_data", slow)

    def batches(**more):
        for _ in range(3):
            now.seconds += 2.0
            yield {"x": np.zeros(8, np.float32), **more}

    mesh = meshes.make(("a", "b"), 1)
    feed = meshes.Feed(batches(host_seconds=np.full(8, 0.5, np.float32)), mesh)
    assert [list(batch) for batch in feed] == [["x"]] * 3
    assert (feed.waited, feed.copied, feed.worked) == (6.75, 0.75, 12.0)
    feed = meshes.Feed(batches(), mesh)
    list(feed)
    assert math.isnan(feed.worked)


@pytest.mark.parametrize("part", ["decoding", "reading"])
def test_the_part_that_is_slow_is_seen(part, tiny_records, tmp_path, monkeypatch):
    """Each image takes 20 ms longer to decode, or to arrive."""
    tf = input_pipeline.tensorflow()

    def late(x):
        wait = tf.py_function(lambda: time.sleep(0.02) or 0.0, [], tf.float32)
        with tf.control_dependencies([wait]):
            return tf.identity(x)

    decode, stream = input_pipeline._train_image, decoding.train_stream
    if part == "decoding":
        monkeypatch.setattr(input_pipeline, "_train_image", lambda x, *r: decode(late(x), *r))
    else:
        monkeypatch.setattr(
            decoding, "train_stream", lambda *a: stream(*a).map(lambda x, *r: (late(x), *r))
        )
    benchmark = benchmarks.load(make_tiny_config(tiny_records).lock(), str(tmp_path))
    feed = meshes.Feed(benchmark.train_batches(16, 0, 1, 0), meshes.make(("a", "b"), 1))
    batches, bottleneck, begun, warnings = iter(feed), Bottleneck(), time.monotonic(), []
    for _ in range(4):
        for _ in range(5):
            next(batches)
        now = time.monotonic()
        warnings.append(bottleneck.interval(now - begun, feed)[1])
        begun = now
    assert f"input-bound: {part}." in "".join(warnings)
