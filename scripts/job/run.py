"""Runs a job under Gradient's contract; scripts/gradient_job.sh starts it. See docs/gradient.md.

Each step is a process. This program reads the environment, starts the steps in order and passes
SIGTERM, SIGHUP and Ctrl-C on to them. If the program is killed, the same command completes the job.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from common import entry
from common.errors import UserError
from scripts.job.folder import open_folder

ALREADY_FINISHED = 3  # exit code of the step `begin`
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OWNED = {
    "workdir": "results go to $TPU_MODEL_DIR/output_data",
    "mode": "it trains and evaluates",
    "coordinator": "it drives one host",
    "config.data_dir": "it reads $TPU_MODEL_DIR/input_data",
    "config.keep_checkpoints": "the newest and the best checkpoint stay",
}
_RECIPE = "--config=configs/resnet50.py"
_KEEP = "--config.keep_checkpoints=1"  # the newest; the best one stays as well


@dataclasses.dataclass(frozen=True)
class Request:
    """The job that the environment and the command line ask for; `flags` are main.py's."""

    model_dir: str
    flags: list[str]
    keep_input: bool
    stage_from: str
    exports: bool = False


def parse_request(flags: Sequence[str], env: Mapping[str, str]) -> Request:
    """Reads the flags of main.py and the environment, and checks them.

    Raises:
      UserError: a variable is missing or invalid, or the job itself sets a flag.
    """
    model_dir = env.get("TPU_MODEL_DIR", "").strip()
    if not model_dir:
        raise UserError(
            "TPU_MODEL_DIR is not set: give the job's folder, gs://BUCKET/FOLDER or /FOLDER; the "
            "records are in its input_data"
        )
    for name in ("TPU_MODEL_DIR", "STAGE_FROM"):
        try:
            if value := env.get(name, "").strip():
                open_folder(value)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    for flag in flags:
        name = re.sub(r"^--?", "", flag.partition("=")[0])
        if name in _OWNED:
            raise UserError(f"--{name} cannot be given to a job: {_OWNED[name]}")
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) > 1:
        raise UserError(
            f"this TPU slice has {len(hosts)} hosts and the job drives one: run main.py on each of "
            f"them, with {_KEEP}"
        )
    if not any(re.match(r"--?config(=|$)", flag) for flag in flags):
        flags = [_RECIPE, *flags]
    for name in ("KEEP_INPUT", "EXPORT_MODEL"):
        if (value := env.get(name, "")) not in ("", "0", "1"):
            raise UserError(f"{name}={value}: must be 0 or 1")
    keep, exports = (env.get(name) == "1" for name in ("KEEP_INPUT", "EXPORT_MODEL"))
    source = env.get("STAGE_FROM", "").strip()
    return Request(model_dir.rstrip("/") or "/", list(flags), keep, source, exports)


class Children:
    """Runs one child at a time and passes signals on to it."""

    def __init__(self):
        self.stop_signal = 0  # the first signal that arrived
        self._child: subprocess.Popen[bytes] | None = None

    def listen(self) -> None:
        """Listens to SIGTERM, Ctrl-C and, unless nohup ignores it, a closed terminal."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._note)

    def run(self, command: list[str], env: Mapping[str, str]) -> int:
        """Runs a command; returns its exit code.

        The code is 128 + signal if a signal killed the child or came before its start.
        """
        if self.stop_signal:
            return 128 + self.stop_signal
        # Without its own process group the child would get Ctrl-C from the terminal as well.
        self._child = subprocess.Popen(
            command, cwd=_ROOT, env=env, stdin=subprocess.DEVNULL, process_group=0
        )
        if self.stop_signal:  # while it was being started
            self._forward()
        code = self._child.wait()
        self._child = None
        return code if code >= 0 else 128 - code

    def _note(self, signum: int, frame: FrameType | None) -> None:
        meaning = signal.SIGTERM if signum == signal.SIGHUP else signum
        self.stop_signal = self.stop_signal or meaning
        self._forward()

    def _forward(self) -> None:
        if self._child is not None:
            self._child.send_signal(self.stop_signal)


def run(request: Request, children: Children) -> int:
    """Runs the job; returns the exit code of the step that failed, or 0."""
    root = request.model_dir.rstrip("/")
    out = f"{root}/output_data"
    python, flags, env = sys.executable, request.flags, dict(os.environ)
    ours = [f"--workdir={out}", f"--config.data_dir={root}/input_data", _KEEP]
    steps = [python, "-m", "scripts.job.steps"]
    rest = [request.model_dir, *(["--keep_input"] * request.keep_input)]
    staged = [f"--stage_from={request.stage_from}"] if request.stage_from else []

    code = children.run([*steps, "begin", *rest, *staged, "--", *flags], env)
    if code == ALREADY_FINISHED:
        return 0
    if code:
        return _stopped("preparing", code, "nothing was trained and nothing deleted")
    # main.py prints that TPU_GRPC_URL is not used. The doctor need not repeat it.
    doctor_env = {name: value for name, value in env.items() if name != "TPU_GRPC_URL"}
    code = children.run([python, "main.py", *flags, *ours, "--mode=doctor"], doctor_env)
    if code:
        state = f"nothing was deleted; records belong in {root}/input_data, see also STAGE_FROM"
        return _stopped("the doctor", code, state)
    code = children.run([python, "main.py", *flags, *ours, "--mode=train_and_eval"], env)
    if code:
        state = f"nothing was deleted; {root}/input_data and {out} are as it left them"
        return _stopped("training", code, state)
    if request.exports:
        export = [python, "main.py", "--mode=export", "--format=savedmodel", ours[0]]
        if code := children.run(export, env):
            state = f"nothing was deleted; the trained run is complete, in {out}"
            return _stopped("exporting", code, state)
    code = children.run([*steps, "finish", *rest, "--", *flags], env)
    if code:
        return _stopped("finishing", code, f"the trained run is complete, in {out}")
    print(f"job: finished; everything is in {out}", flush=True)
    return 0


def _stopped(step: str, code: int, state: str) -> int:
    text = f"job: {step} ended with exit code {code}: {state}. The same command continues from here"
    print(text, file=sys.stderr, flush=True)
    return code


def main() -> int:
    """Runs the job that the environment and the command line describe."""
    entry.output_only_shows()
    request = parse_request(sys.argv[1:], os.environ)
    children = Children()
    children.listen()
    return run(request, children)


if __name__ == "__main__":
    entry.run(main)
