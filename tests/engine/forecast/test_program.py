"""What compiling a step tells."""

import types
from typing import Any

from engine.forecast import operations, program
from engine.forecast.operations import Operations
from tests.engine.forecast.test_estimates import TRAIN, V3


def test_what_the_compiler_says_of_a_step(monkeypatch):
    """Outputs that replace arguments take no memory of their own."""
    now, found = types.SimpleNamespace(seconds=100.0), Operations(TRAIN.operations, {}, 2)
    sizes = {"argument": 50, "output": 40, "alias": 30, "temp": 20, "generated_code": 10}
    memory = types.SimpleNamespace(**{f"{name}_size_in_bytes": n for name, n in sizes.items()})

    def compile_in_three_seconds():
        now.seconds += 3.0
        return types.SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: "HLO")

    monkeypatch.setattr(program.time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(
        operations, "read", lambda text, one, bundles: found if (text, one) == ("HLO", V3) else None
    )
    step: Any = types.SimpleNamespace(compile=compile_in_three_seconds)
    done = program.compile_program(step, V3, print)
    assert (done.arguments, done.outputs, done.temporaries, done.code) == (50, 10, 20, 10)
    assert (done.operations, done.unknown_loops) == (TRAIN.operations, 2)
    assert (done.compile_seconds, done.memory) == (3.0, 90)
