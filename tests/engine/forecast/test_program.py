"""What compiling a step tells, and what the time of its operations is."""

import dataclasses
from typing import Any

import pytest

from engine.forecast import cache, calibration, operations, program
from engine.forecast.operations import Operations
from engine.forecast.program import combine
from tests.engine.forecast.test_estimates import TRAIN, V3, V5E, lasting, operation


def test_what_the_compiler_says_of_a_step(monkeypatch):
    found = Operations(TRAIN.operations, {}, 2, 1)
    facts = cache.Compiled(
        text="HLO", arguments=50, outputs=10, temporaries=20, code=10, largest=[("f32[8] a", 32)],
        coordinates=[[0, 0, 0, 0], [0, 0, 0, 1]], seconds=3.0, bundles={"k.1": (7, 0)},
        parameters=[30, 20],
    )  # fmt: skip
    read = {}
    monkeypatch.setattr(cache, "compiled_facts", lambda *arguments: facts)
    monkeypatch.setattr(operations, "read", lambda *given: read.update(given=given) or found)
    step: Any = "lowered"
    done = program.compile_program(step, V3, print)
    assert read["given"] == ("HLO", V3, {"k.1": (7, 0)}, [(0, 0, 0, 0), (0, 0, 0, 1)])
    assert (done.arguments, done.outputs, done.temporaries, done.code) == (50, 10, 20, 10)
    assert (done.operations, done.unknown_loops, done.branches) == (TRAIN.operations, 2, 1)
    assert (done.compile_seconds, done.memory, done.largest) == (3.0, 90, (("f32[8] a", 32),))
    assert done.parameters == (30, 20)


def test_several_shapes_take_the_most_memory_and_the_mean_time():
    large = lasting(0.06, temporaries=9_000_000_000, compile_seconds=10.0)
    both = combine([TRAIN, large])
    assert both.memory == large.memory and both.temporaries == 9_000_000_000
    assert both.seconds == pytest.approx((0.14 + 0.06) / 2) and both.compile_seconds == 100.5
    assert both.flops == TRAIN.flops / 2 and both.moved == TRAIN.moved / 2
    assert combine([TRAIN]) == TRAIN
    looped = combine([TRAIN, dataclasses.replace(TRAIN, unknown_loops=1)])
    assert looped.unknown_loops == 1


def test_no_interval_begins_before_the_fastest_that_the_chip_can_be():
    """61.5 TFLOP/s of a v3 core: 0.0615 TFLOP take 1 ms at least."""
    fast = dataclasses.replace(TRAIN, operations=(operation(0.001, flops=61_500_000_000),))
    assert fast.error.least == pytest.approx(1.0)
    assert lasting(0.5).error.least == calibration.error(V3.chip).least


def test_what_is_not_known_is_said():
    assert TRAIN.notes == []
    (branches,) = dataclasses.replace(TRAIN, branches=2).notes
    assert branches.startswith("2 conditionals: ")
    (nothing,) = dataclasses.replace(TRAIN, operations=()).notes
    assert "computes nothing" in nothing


def test_a_note_says_what_counts_by_its_bundles():
    kernel = operation(0.0001, name="k.3", kind="kernel")
    sort = operation(0.0002, name="sort.1", kind="sort", bundles=9, unknown_loops=1, times=2.0)
    train = dataclasses.replace(TRAIN, operations=(kernel, sort, kernel, kernel))
    price, warning = train.notes
    assert "no estimate of 3 kernels (0.30 ms), 2 sorts (0.40 to 0.56 ms): " in price
    assert warning.startswith("too short: of 3 of these, ") and "(k.3, k.3, k.3)" in warning
    known = dataclasses.replace(kernel, bundles=7)
    for loops in (0, 1):
        once = dataclasses.replace(known, unknown_loops=loops)
        assert len(dataclasses.replace(TRAIN, operations=(once,)).notes) == 1 + loops


def test_what_measured_sorts_and_gathers_took_is_in_the_interval():
    """20 ms of products, 10 of sorts and 10 of gathers: at most 1.08 * 20 + 1.4 * 10 + 4 * 10."""
    two = [operation(0.01, kind=kind, bundles=9) for kind in ("sort", "gather")]
    train = dataclasses.replace(TRAIN, operations=(operation(0.02), *two))
    assert train.error.of_time(0.04)[1] == pytest.approx(0.02 * lasting(1).error.most + 0.054)
    wide = dataclasses.replace(train, topology=V5E)
    most = dataclasses.replace(lasting(1), topology=V5E).error.most  # above that of sorts
    assert wide.error.of_time(0.04)[1] == pytest.approx(0.03 * most + 0.04)


def test_a_program_takes_as_long_as_its_operations_and_no_less_than_its_limits():
    """A v3 core has 61.5 TFLOP/s and 0.45 TB/s; the second operation runs twice."""
    assert TRAIN.seconds == pytest.approx(0.12 + 2 * 0.009 + 0.002)
    assert (TRAIN.flops, TRAIN.moved) == (3.0836e12, 30e9 + 2 * 2.3e9)
    limits = {"compute": 3.0836e12 / 61.5e12, "HBM": 34.6e9 / 0.45e12, "links": 0.002}
    assert TRAIN.limits == pytest.approx(limits) and TRAIN.bound == "HBM"
    twice = operation(0.1, times=2.0, flops=4e12, bf16_flops=6.15e12, link_seconds=0.3)
    linked = dataclasses.replace(TRAIN, operations=(twice,))
    assert linked.limits == pytest.approx({"compute": 0.2, "HBM": 0, "links": 0.6})
    assert (linked.seconds, linked.bound, linked.flops) == (0.6, "links", 8e12)


def test_shapes_count_by_their_steps():
    parts = [lasting(0.1, unknown_loops=2), lasting(0.3, branches=5, compile_seconds=4.5)]
    mean = combine(parts, (3, 1))
    assert mean.seconds == pytest.approx(0.15) and mean.compile_seconds == 95
    assert (mean.unknown_loops, mean.branches) == (2, 5)
