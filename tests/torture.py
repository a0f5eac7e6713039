"""Kills a small run again and again, at random moments, and compares its end with a calm run's.

python -m tests.torture --kills=20 --processes=2

Each start is disturbed at a random moment between its first breath and its end: one of its
processes gets SIGTERM or SIGKILL, some after they stood still for a while. Where there are several
processes, one may also stand still for longer than config.host_silence_seconds, or lose its TCP
connections to the others; all of them must then end with exit code 75. Then the same command is
typed again, until the run is complete, and then another run begins. At the end of each, checkpoints
must be the same bit for bit, and metrics the same but for the clock. The job is the digits, made
very small, on CPU devices, or 12 steps of another recipe, such as

python -m tests.torture --processes=2 --recipe=configs/gnmt_phrases.py --data=data/phrases

Arguments after -- go to main.py.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Self

import psutil
from etils import epath

from common import cli
from common.errors import some
from common.progress import duration

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_DIGITS = "configs/digits.py"
SILENCE = 20  # seconds, config.host_silence_seconds
LOOP = {
    "train_steps": 12,
    "steps_per_eval": 6,
    "steps_per_checkpoint": 3,
    "log_step_count_steps": 4,
    "host_silence_seconds": SILENCE,
}
JOB = LOOP | {
    "resnet_depth": 10,
    "num_filters": 4,
    "image_size": 16,
    "train_batch_size": 16,
    "eval_batch_size": 64,
    "train_steps": 24,
    "steps_per_eval": 8,
    "shuffle_buffer_size": 64,
    "input_streams": 8,
}
_CLOCK = ("per_second", "seconds", "input_wait", "input_transfer", "decode_busy")
# What a process may end with: done, told to stop, another host is gone, killed.
_EXPECTED = {0, 75, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL}
_PIDFD_GETFD = 438  # the number of this system call, on every kind of machine


def xla_flags(devices: int) -> str:
    """$XLA_FLAGS of this process, with another number of simulated devices: the last one counts."""
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={devices}".strip()


@dataclasses.dataclass
class Group:
    """The processes of one run on this machine, `devices` simulated ones altogether."""

    workdir: str
    arguments: Sequence[str]
    count: int = 1
    devices: int = 4
    told: bool = False  # whether a SIGTERM was sent to the run in this workdir

    def __post_init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.address = ("127.0.0.1", 0)  # of host 0

    def start(self, each: Sequence[Sequence[str]] = ()) -> Self:
        """Starts them, with the flags in `each[i]` for process i alone.

        Their output goes to files beside the workdir.
        """
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = server.getsockname()
        share = xla_flags(self.devices // self.count)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": share}
        command = [sys.executable, "main.py", f"--workdir={self.workdir}", *self.arguments]
        self.processes = []
        for index in range(self.count):
            mine = [f"--coordinator=127.0.0.1:{self.address[1]}", f"--num_processes={self.count}"]
            mine = [*mine, f"--process_id={index}"] if self.count > 1 else []
            mine += each[index] if each else ()
            with open(self.output(index), "a") as file:
                process = subprocess.Popen(
                    [*command, *mine],
                    cwd=ROOT,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            self.processes.append(process)
        return self

    def output(self, index: int) -> str:
        """The file that holds all that process `index` printed, over all starts."""
        return f"{self.workdir}.{index}.txt"

    def said(self, index: int = 0) -> str:
        """What process `index` printed so far."""
        with open(self.output(index)) as file:
            return file.read()

    def wait(self, seconds: float = 3600.0) -> list[int]:
        """The exit codes; what still lives after so long is killed, and TimeoutExpired raised."""
        until = time.monotonic() + seconds
        try:
            return [p.wait(max(until - time.monotonic(), 0.01)) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def alive(self) -> bool:
        """Whether any process still runs."""
        return any(process.poll() is None for process in self.processes)


def results(workdir: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows of metrics.jsonl without what the clock decides, {step: {array: checksum}})."""
    root = epath.Path(workdir)
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    sums = {}
    for folder in sorted((root / "checkpoints").iterdir()):
        items = json.loads((folder / "manifest" / "metadata").read_text())["checksums"].items()
        sums[folder.name] = {f"{item}/{name}": x for item, row in items for name, x in row.items()}
    return [{k: v for k, v in r.items() if not any(c in k for c in _CLOCK)} for r in rows], sums


def differences(calm: str, other: str, told: bool = False) -> list[str]:
    """How the results in two workdirs differ, in words.

    A run that was `told` to stop has saved steps of its own, which may have outlived older ones.
    """
    (rows, sums), (other_rows, other_sums) = results(calm), results(other)
    found = []
    missing, more = (
        sorted(map(int, a.keys() - b.keys())) for a, b in ((sums, other_sums), (other_sums, sums))
    )
    # The best one stays beside the newest, so that one may be there more.
    newer = all(m < n for m, n in zip(missing, more, strict=False))
    newer &= len(missing) <= len(more) <= len(missing) + 1
    if sums.keys() != other_sums.keys() and not (told and newer):
        found.append(f"checkpoints {sorted(other_sums)} instead of {sorted(sums)}")
    for step in sums.keys() & other_sums.keys():
        one, two = sums[step], other_sums[step]
        if names := [name for name in one | two if one.get(name) != two.get(name)]:
            found.append(f"checkpoint {step} has other bits in {some(names)}")
    for i in range(max(len(rows), len(other_rows))):
        pair = [r[i] if i < len(r) else None for r in (rows, other_rows)]
        if pair[0] != pair[1]:
            found.append(f"row {i + 1} of metrics.jsonl is {pair[1]} instead of {pair[0]}")
            break
    return found


def _wait(group: Group, seconds: float) -> None:
    """Waits so long, or until the group has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and group.alive():
        time.sleep(0.02)


def cut(group: Group, victim: int) -> int:
    """Ends the TCP connections of a process to the others of its group; returns how many."""
    ports: dict[int, set[tuple[int, int]]] = {}  # of each process: (own port, the peer's)
    sockets = []
    for index, process in enumerate(group.processes):
        if process.poll() is not None:
            continue
        for each in psutil.Process(process.pid).net_connections("tcp"):
            if each.status == psutil.CONN_ESTABLISHED and each.raddr:
                ports.setdefault(index, set()).add((each.laddr.port, each.raddr.port))
                if index == victim:
                    sockets.append((each.fd, (each.raddr.port, each.laddr.port)))
    others = set().union(*(pairs for index, pairs in ports.items() if index != victim))
    found = [fd for fd, peer in sockets if peer in others]
    if found:
        libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(group.processes[victim].pid)
        for fd in found:
            own = libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
            if own < 0:  # the process has closed it meanwhile
                continue
            with socket.socket(fileno=own) as connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        os.close(pidfd)
    return len(found)


def _disturb(group: Group, victim: int, draw: random.Random, moment: float) -> str:
    """Does something to a process at `moment`; returns what, in words."""
    kinds = ["SIGTERM", "SIGKILL"] + (["silence", "cut"] if group.count > 1 else [])
    kind, process = draw.choice(kinds), group.processes[victim]
    if kind.startswith("SIG") and draw.random() < 0.3:  # first it only stands still for a while
        _wait(group, draw.uniform(0, moment))
        process.send_signal(signal.SIGSTOP)
        _wait(group, draw.uniform(0.5, 5.0))
        process.send_signal(signal.SIGCONT)
    _wait(group, moment)
    if kind == "cut":
        return f"{cut(group, victim)} connections of process {victim} cut"
    if kind == "silence":
        process.send_signal(signal.SIGSTOP)
        _wait(group, 3 * SILENCE)
        process.send_signal(signal.SIGCONT)
        return f"process {victim} stood still for too long"
    process.send_signal(getattr(signal, kind))
    group.told |= kind == "SIGTERM"
    return f"{kind} to process {victim}"


def torture(group: Group, calm: str, kills: int, seconds: float, draw: random.Random) -> list[str]:
    """Disturbs runs of the group `kills` times; one that gets to its end is compared with `calm`.

    The moments are within `seconds` after a start. The group's workdir has the name of the first
    run; the next ones are numbered. Returns what was wrong, in words.
    """
    begun, folder, runs = time.monotonic(), group.workdir, 1
    wrong = []
    for number in range(1, kills + 1):
        group.start()
        moment, victim = draw.uniform(0, seconds), draw.randrange(group.count)
        event = _disturb(group, victim, draw, moment)
        try:
            codes = group.wait(1200)
        except subprocess.TimeoutExpired:
            wrong.append(f"trial {number}: {event}, and the others hang")
            continue
        allowed = _EXPECTED if event.startswith("SIG") else {0, 75}
        if set(codes) - allowed:
            wrong.append(f"trial {number}: {event}: exit codes {codes}")
        left = (time.monotonic() - begun) / number * (kills - number)
        print(
            f"trial {number}/{kills}: {event} at {moment:.1f} s, exit codes {codes}; about "
            f"{duration(left)} left",
            flush=True,
        )
        if not any(codes):  # it was quicker
            wrong += differences(calm, group.workdir, group.told)
            runs += 1
            group.workdir, group.told = f"{folder}-{runs}", False
    return wrong


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0 if nothing differs."""
    parser = cli.Parser(prog="torture", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=cli.integer(1), default=20)
    parser.add_argument("--processes", type=cli.integer(1), default=1)
    parser.add_argument("--seed", type=cli.integer(0), default=0, help="draws moments and victims")
    parser.add_argument("--recipe", default=_DIGITS, help="of the job")
    parser.add_argument("--data", default="data/digits", help="folder of the records")
    parser.add_argument("rest", nargs="*", metavar="-- FLAGS", help="for main.py")
    args = parser.parse_args(argv)
    if not epath.Path(args.data).exists():
        parser.error(f"--data={args.data} is not there: python -m scripts.prepare NAME --out=...")
    job = JOB if args.recipe == _DIGITS else LOOP
    flags = [f"--config.{key}={value}" for key, value in job.items()]
    data = f"--config.data_dir={os.path.abspath(args.data)}"
    flags = [f"--config={args.recipe}", data, *flags, *args.rest]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        for name in ("warm", "calm"):  # the second needs no compiling, like those to be killed
            begun = time.monotonic()
            calm = Group(f"{folder}/{name}", flags, args.processes).start()
            if any(calm.wait()):
                print(calm.said())
                return 1
        seconds = time.monotonic() - begun
        print(f"calm: {seconds:.0f} s undisturbed")
        group = Group(f"{folder}/run", flags, args.processes)
        draw = random.Random(args.seed)
        wrong = torture(group, calm.workdir, args.kills, seconds, draw)
        codes = group.start().wait()
        if any(codes):
            wrong.append(f"undisturbed at last, it ended with {codes}: {group.said()[-2000:]}")
        else:
            wrong += differences(calm.workdir, group.workdir, group.told)
    for line in wrong:
        print(f"WRONG {line}")
    print(f"torture: {args.kills} kills, {len(wrong)} things wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
