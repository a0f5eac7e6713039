"""What compiling a step tells."""

import types
from typing import Any

from engine.forecast import hlo, program
from engine.forecast.program import Program
from tests.engine.forecast.test_estimates import V3


def test_what_the_compiler_says_of_a_step(monkeypatch):
    """Outputs that replace arguments take no memory of their own."""
    now, cost = types.SimpleNamespace(seconds=100.0), hlo.Cost(9, {}, 0, 0, {})
    sizes = {"argument": 50, "output": 40, "alias": 30, "temp": 20, "generated_code": 10}
    memory = types.SimpleNamespace(**{f"{name}_size_in_bytes": n for name, n in sizes.items()})

    def compile_in_three_seconds():
        now.seconds += 3.0
        return types.SimpleNamespace(
            memory_analysis=lambda: memory,
            cost_analysis=lambda: {"flops": 2.0, "bytes accessed": 4.0},
            as_text=lambda: "HLO",
        )

    monkeypatch.setattr(program.time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(hlo, "cost", lambda text: cost if text == "HLO" else None)
    step: Any = types.SimpleNamespace(compile=compile_in_three_seconds)
    assert program.compile_program(step, V3.chip) == Program(
        **{"arguments": 50, "outputs": 10, "temporaries": 20, "code": 10, "compile_seconds": 3.0},
        **{"flops": 2.0, "traffic": 4.0},
        **vars(cost),
    )
