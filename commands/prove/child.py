"""Runs one check in this process: python -m commands.prove.child, with a request on standard input.

A check that crashes or fills the memory ends this process alone; and the devices, of which a TPU
serves one process at a time, are free for the next check when it has ended.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from commands.prove.checks import Case, Check, Failed
from common import entry
from common.errors import one_line
from engine import environment


def answer(check: Check, case: Case) -> dict[str, Any]:
    """Runs a check; an exception is a failed one."""
    try:
        result = check.run(case)
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
        figures = error.figures if isinstance(error, Failed) else {}
        return {"status": "failed", "summary": kind + one_line(error), "figures": figures}
    return {
        "status": result.status,
        **{"summary": result.summary, "figures": result.figures, "programs": result.programs},
    }


def main() -> None:
    """Reads {"check", "case", "answer": a path} and writes the answer there."""
    environment.set_defaults()
    request = json.load(sys.stdin)
    result = answer(Check(*request["check"]), Case(**request["case"]))
    with open(request["answer"], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    entry.run(main)
