"""Compiles the step of a peer for a slice, as the child process of `modes.preflight.inspect`."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

from engine import compiler
from engine.aot import kernels
from modes import preflight
from programs import Programs
from run import Plan
from scripts.bench import peers
from scripts.bench.peers import step


def lower(programs: Programs, plan: Plan) -> list[Any]:
    """The peer's step, lowered for each shape of its batches, with our step's compiler options."""
    del plan
    settings, benchmark = programs.settings, programs.benchmark
    options = compiler.options(programs.mesh, benchmark.larger_windows)
    peer = peers.load(settings.recipe, benchmark)
    return step.lower(peer, programs.mesh, settings.train_batch_size, options)


if __name__ == "__main__":
    kernels.ask_for_bundles()
    with Connection(int(sys.argv[1])) as connection:
        preflight.work(connection, lower)
