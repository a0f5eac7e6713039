"""What compiling a step tells."""

from typing import Any

from engine.forecast import cache, operations, program
from engine.forecast.operations import Operations
from tests.engine.forecast.test_estimates import TRAIN, V3


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
