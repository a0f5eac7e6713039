"""The warning about slow input: when it comes, and which part it names."""

import math
import os
import time
import types
from typing import Any

import pytest

import benchmarks
import input_pipeline
from engine import mesh as meshes
from engine.report.intervals import Bottleneck
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
        ({"copied": 2.0, "worked": 78.0}, "decoding"),  # half of the wait is not most of it
        ({"copied": 0.1, "worked": 78.0}, "decoding"),
        ({"copied": 0.1, "worked": 40.0}, "reading"),  # busy for half of the time
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


def test_a_fifth_of_the_time_is_not_worth_a_warning():
    run = Run()
    assert not any(run.interval(2.0)[1] for _ in range(4))


def test_shares_are_at_most_one():
    """The clocks of the feed and of the interval differ by a little."""
    assert Run().interval(11.0, 10.5, 90.0)[0] == {
        "input_wait": 1.0,
        "input_transfer": 1.0,
        "decode_busy": 1.0,
    }


@pytest.mark.parametrize(("cpus", "threads"), [(6, 6), (None, 1)])
def test_without_a_number_there_is_a_decoding_thread_for_each_cpu(cpus, threads, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    run = Run()
    run.bottleneck = Bottleneck()
    warning = [run.interval(5.0, worked=7.5 * threads)[1] for _ in range(3)][-1]
    assert warning == (
        "WARNING input-bound: decoding. The devices waited for input 50% of the time, 3 intervals "
        f"in a row, and the {threads} decoding threads were busy 75% of the time. Remedy: use "
        "machines with more CPU cores, or store smaller examples"
    )


@pytest.mark.long
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
