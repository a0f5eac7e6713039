"""The checks of --mode=prove, in their order: what each gets, and what it answers."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import subprocess
import sys
from typing import Any, Literal, NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclasses.dataclass(frozen=True)
class Case:
    """What a check gets.

    Attributes:
      folder: a local folder of this proof, with the data that it makes and its compiled programs.
      workdir: the folder, local or gs://, for the workdirs of runs.
      short: whether the check should take as little time as possible.
      devices: how many devices there are, for checks that leave them to other processes.
    """

    folder: str
    workdir: str
    short: bool
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """What a check answers.

    Attributes:
      summary: one line for the user.
      figures: {name: number, text or list of them}, for prove.json.
      programs: {name: SHA-256 of the StableHLO text}, of the programs that were compared.
      status: "skipped" where there is nothing to check on these devices.
    """

    summary: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    programs: dict[str, str] = dataclasses.field(default_factory=dict)
    status: Literal["ok", "skipped"] = "ok"


class Failed(Exception):
    """The program computes something else than it should; the message is one line.

    Attributes:
      figures: as in `Result`.
    """

    def __init__(self, message: str, figures: dict[str, Any] | None = None):
        super().__init__(message)
        self.figures = figures or {}


def digest(lowered: Any) -> str:
    """The SHA-256, 64 hexadecimal digits, of a lowered program's StableHLO text."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def make_images(case: Case, name: str, train: int, held_out: int, size: str) -> str:
    """Writes records of random images, unless an earlier check has; returns their folder.

    Args:
      case: the proof.
      name: of the folder.
      train: number of images to train from.
      held_out: number of images to evaluate.
      size: "HxW", in pixels.
    """
    folder = f"{case.folder}/{name}"
    if not os.path.exists(f"{folder}/.complete"):
        arguments = [f"--out={folder}", f"--images={train}", "--shards=8", "--overwrite"]
        arguments += [f"--validation_images={held_out}", "--classes=4", f"--size={size}"]
        command([sys.executable, "-m", "scripts.prepare", "fake", *arguments])
        with open(f"{folder}/.complete", "w"):
            pass
    return folder


def command(words: list[str]) -> str:
    """Runs a command of this repository to its end, and returns its output.

    Raises:
      Failed: its exit code is not 0.
    """
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", flush=True)  # the check's log
    if done.returncode:
        raise Failed(f"{_named(words)} ended with exit code {done.returncode}: {_last(done)}")
    return done.stdout


def _named(words: list[str]) -> str:
    return " ".join(word for word in words[1:3] if not word.startswith("-m"))


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


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
        "commands.prove.numbers:describe_devices",
        "python main.py --mode=doctor with a recipe; does another process use the devices?",
        (2, 15),
    ),
    Check(
        "values",
        "commands.prove.numbers:check_values",
        "the versions of jax and of the driver; then the layers of the named model",
        (55, 120),
    ),
    Check(
        "all devices as one",
        "commands.prove.numbers:all_as_one",
        "the links between the devices, and engine/step.py",
        (45, 90),
    ),
    Check(
        "kill -9 and resume",
        "commands.prove.runs:kill_and_resume",
        "the check's log; engine/checkpoint.py, the disk or the bucket",
        (80, 90),
    ),
    Check(
        "exact evaluation",
        "commands.prove.runs:exact_counts",
        "engine/evaluate.py, and eval_batches of the benchmark",
        (10, 30),
    ),
    Check(
        "save while training",
        "commands.prove.runs:save_while_training",
        "engine/checkpoint.py, the disk or the bucket",
        (35, 60),
    ),
    Check(
        "BatchNorm's form gram",
        "commands.prove.kernels:check_gram",
        "common/layers/gram_norm.py",
        (4, 15),
    ),
    Check(
        "Pallas kernels",
        "commands.prove.kernels:check_kernels",
        "the named kernel and its plain form",
        (2, 60),
    ),
    Check(
        "speed: ResNet-50",
        "commands.prove.speed:resnet50",
        "the batch per device and the memory, docs/preflight.md",
        (25, 240),
    ),
    Check(
        "speed: SSD",
        "commands.prove.speed:ssd",
        "the batch per device and the memory, docs/preflight.md",
        (45, 240),
    ),
    Check(
        "speed: Transformer",
        "commands.prove.speed:transformer",
        "the batch per device and the memory, docs/preflight.md",
        (12, 240),
    ),
    Check(
        "input of the host",
        "commands.prove.speed:host_input",
        "TensorFlow, the disk and the number of CPU cores",
        (15, 30),
    ),
)
