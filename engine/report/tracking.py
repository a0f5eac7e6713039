"""Starts and ends the process that sends a run's rows to Weights & Biases or MLflow.

The tracker has a process of its own, `scripts/track.py`, so that its faults, its waits for the
network and its libraries never reach the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

from errors import ConfigError, one_line, visible

PATIENCE = 20.0  # seconds that the end of a run waits for the last rows to be sent
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
# What chooses devices or prepares them is not for this process.
_NOT_ITS_OWN = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "LD_PRELOAD")


@contextlib.contextmanager
def following(tracker: str, workdir: str, say: Callable[[str], None]) -> Iterator[None]:
    """Sends what the block writes to WORKDIR/metrics.jsonl; a fault is a line, no exception.

    Args:
      tracker: "wandb" or "mlflow"; "" does nothing.
      workdir: of the run, local or gs://.
      say: prints a line for people.

    Raises:
      ConfigError: the tracker's package is not installed; before the block runs.
    """
    if not tracker:
        yield
        return
    if importlib.util.find_spec(tracker) is None:
        raise ConfigError(
            f"config.tracker={tracker} needs the package {tracker}, which is not installed: "
            f"pip install {'wandb' if tracker == 'wandb' else 'mlflow-skinny'}, or set "
            "config.tracker='' to go on without it"
        )
    with tempfile.TemporaryFile() as log:
        process = _start(tracker, workdir, log)
        done = False
        try:
            yield
            done = True
        finally:
            if fault := _end(process, done, log):
                say(
                    f"NOTE {tracker}: {fault}; python -m scripts.track --workdir={workdir} "
                    f"--tracker={tracker} sends the rows that are missing"
                )


def _start(tracker: str, workdir: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_ITS_OWN}
    # This program's modules are found although a relative workdir keeps the folder as it is.
    search = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    command = ["-m", "scripts.track", f"--workdir={workdir}", f"--tracker={tracker}", "--follow"]
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": search},
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C reaches only the run, which ends the tracker
    )


def _end(process: subprocess.Popen[bytes], done: bool, log: IO[bytes]) -> str:
    """Lets the process send the last rows; returns what went wrong in words, or ""."""
    fault = ""
    try:
        process.communicate(b"done" if done else b"", timeout=PATIENCE)
        if process.returncode:
            fault = _last_line(log) or f"its process ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        reason = _last_line(log)
        fault = f"it did not send the last rows within {PATIENCE:.0f} s"
        fault += f" ({reason})" if reason else ""
    except Exception as error:  # a tracker never ends a run
        fault = one_line(error)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the libraries start processes, too
    process.wait()
    return fault


def _last_line(log: Any) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return visible(lines[-1].removeprefix("ERROR: "))[:500] if lines else ""
