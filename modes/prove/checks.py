"""The checks of --mode=prove, in their order."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from modes.prove.case import Case, Result


class Check(NamedTuple):
    """A check, which runs in a process of its own.

    Attributes:
      name: for the table and for prove.json.
      function: "module:function", from `Case` to `Result`; an exception is a failed check.
      look: what to look at where it fails.
      seconds: about how long it takes on two CPU cores with --short, and on one TPU chip without.
      limit: seconds after which it is stopped.
    """

    name: str
    function: str
    look: str
    seconds: tuple[float, float]
    limit: float = 1800.0

    def run(self, case: Case) -> Result:
        """Runs the check in this process."""
        module, _, function = self.function.partition(":")
        return getattr(importlib.import_module(module), function)(case)


CHECKS = (
    Check(
        "devices",
        "modes.prove.devices:describe",
        "python main.py --mode=doctor with a recipe; does another process use the devices?",
        (2, 15),
    ),
    Check(
        "values",
        "modes.prove.numbers:check",
        "the versions of jax and of the driver; then the layers of the named model",
        (55, 120),
    ),
    Check(
        "all devices as one",
        "modes.prove.devices:all_as_one",
        "the links between the devices, and engine/step.py",
        (45, 90),
    ),
    Check(
        "kill -9 and resume",
        "modes.prove.runs:kill_and_resume",
        "the check's log; engine/checkpoint.py, the disk or the bucket",
        (80, 90),
    ),
    Check(
        "exact evaluation",
        "modes.prove.runs:exact_counts",
        "evaluate.py, and eval_batches of the benchmark",
        (10, 30),
    ),
    Check(
        "save while training",
        "modes.prove.runs:save_while_training",
        "engine/checkpoint.py, the disk or the bucket",
        (35, 60),
    ),
    Check(
        "BatchNorm's form gram",
        "modes.prove.gram:check",
        "ops/layers/gram_norm.py",
        (4, 15),
    ),
    Check(
        "Pallas kernels",
        "modes.prove.kernels:check",
        "the named kernel and its plain form",
        (2, 60),
    ),
    Check(
        "speed: ResNet-50",
        "modes.prove.speed:resnet50",
        "the batch per device and the memory, docs/preflight.md",
        (25, 240),
    ),
    Check(
        "speed: SSD",
        "modes.prove.speed:ssd",
        "the batch per device and the memory, docs/preflight.md",
        (45, 240),
    ),
    Check(
        "speed: Transformer",
        "modes.prove.speed:transformer",
        "the batch per device and the memory, docs/preflight.md",
        (12, 240),
    ),
    Check(
        "input of the host",
        "modes.prove.speed:host_input",
        "TensorFlow, the disk and the number of CPU cores",
        (15, 30),
    ),
)
