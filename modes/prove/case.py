"""What a check of --mode=prove gets, and what it answers."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from typing import Any, Literal

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
      summary: one line for people.
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
