"""What compiling a step tells."""

from typing import Any

from engine.forecast import cache, operations, program
from engine.forecast.buffers import Buffer
from engine.forecast.cache import Compiled
from engine.forecast.operations import Operations
from tests.engine.forecast.test_estimates import TRAIN, V3

LARGEST = (Buffer("fusion.1", "f32[8]", 32, "jit(step)/mul", False),)


def test_what_the_compiler_says_of_a_step(monkeypatch):
    found = Operations(TRAIN.operations, {}, 2)
    facts = Compiled("HLO", 50, 10, 20, 10, 3.0, {"kernel": 7}, (30, 20), LARGEST)
    seen = []

    def compiled_facts(lowered: Any, topology: Any, say: Any) -> Compiled:
        seen.append((lowered, topology, say))
        return facts

    def read(*given: Any) -> Operations:
        seen.append(given)
        return found

    monkeypatch.setattr(cache, "compiled_facts", compiled_facts)
    monkeypatch.setattr(operations, "read", read)
    done = program.compile_program("a step", V3, print)
    assert seen == [("a step", V3, print), ("HLO", V3, {"kernel": 7})]
    assert (done.arguments, done.outputs, done.temporaries, done.code) == (50, 10, 20, 10)
    assert (done.operations, done.unknown_loops) == (TRAIN.operations, 2)
    assert (done.compile_seconds, done.memory) == (3.0, 90)
    assert (done.parameters, done.largest) == ((30, 20), LARGEST)
