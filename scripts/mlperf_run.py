"""Trains to MLPerf's target several times; started by run_and_time.sh. See docs/mlperf.md.

Each run is a process of main.py in a folder of its own, with a seed of its own. This one reads
the environment, starts them in order, passes SIGTERM and Ctrl-C on, and collects their logs.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import console
import mlperf_logs
import mlperf_system
from etils import epath
from gradient_job import Children

from engine import hosts
from engine.mlperf import LOG


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a benchmark is run."""

    name: str  # MLPerf's, its folder in results/
    recipe: str
    variable: str  # that names the data
    meaning: str
    patterns: tuple[str, ...]  # of files, one of which must be there
    runs: int  # that MLPerf wants
    flags: tuple[str, ...]  # what no recipe needs to know


BENCHMARKS = {
    "resnet50": Entry(
        "resnet",
        "configs/mlperf_resnet50.py:1632",
        "MLP_PATH_GCS_IMAGENET",
        "the folder of ImageNet's train-* and validation-* records",
        ("train-*", "train/train-*"),
        5,
        (
            "--config.num_train_images=1281167",
            "--config.num_eval_images=50000",
            "--config.mlperf.format=mllog",
        ),
    ),
    "ncf": Entry(
        "ncf",
        "configs/ncf.py",
        "MLP_PATH_GCS_NCF",
        "the folder of MovieLens' ml-20m, with ratings.csv or ml-20m.zip",
        ("ratings.csv", "ml-20m/ratings.csv", "ml-20m.zip", "ratings.dat", "ml-1m/ratings.dat"),
        100,
        (
            "--config.num_users=138493",
            "--config.num_items=26744",
            "--config.num_ratings=20000263",
            "--config.mlperf.format=v0.5",
        ),
    ),
}
_MODEL_DIR = "MLP_GCS_MODEL_DIR"
_OWNED = {
    "workdir": "every run has a folder in $MLP_GCS_MODEL_DIR",
    "mode": "it trains and evaluates",
    "replay": "it trains and evaluates",
    "config.seed": "it draws one for each run; give --seed=N to draw the same ones again",
    "config.data_dir": "the environment names the data",
}


class UsageError(ValueError):
    """The runs cannot start as asked; the message is one line for each thing that is wrong."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the environment and the command line ask for."""

    benchmark: str
    model_dir: str
    data_dir: str
    runs: int
    seed: int
    flags: list[str]  # main.py's, --config first
    first: bool  # whether this host writes the results

    @property
    def name(self) -> str:
        """MLPerf's name of the benchmark."""
        return BENCHMARKS[self.benchmark].name

    def seeds(self) -> list[int]:
        """One for each run, all different; the same on every host."""
        return random.Random(self.seed).sample(range(2**31), self.runs)


def parse(words: Sequence[str], env: Mapping[str, str]) -> Request:
    """Reads and checks both.

    Raises:
      UsageError: a variable is missing or wrong, or a flag is this program's own.
    """
    parser = console.Parser(prog="run_and_time.sh", allow_abbrev=False)
    parser.add_argument("--benchmark", choices=sorted(BENCHMARKS), default="resnet50")
    parser.add_argument("--config", help="recipe, a file in configs/")
    parser.add_argument("--runs", type=console.whole(1), help="default: as many as MLPerf wants")
    parser.add_argument("--seed", type=console.whole(0), help="for drawing the runs' seeds")
    given, flags = parser.parse_known_args(words)
    faults = []
    for flag in flags:
        name = re.sub(r"^--?", "", flag.partition("=")[0])
        if name in _OWNED:
            faults.append(f"--{name} cannot be given here: {_OWNED[name]}")
    entry = BENCHMARKS[given.benchmark]
    faults += _check_environment(entry, env)
    place = _place(flags)
    if place and given.seed is None:
        faults.append(f"a run on {place.count} hosts needs --seed=N, the same N on all of them")
    if faults:
        raise UsageError("\n".join(faults))
    flags = [f"--config={given.config or entry.recipe}", *flags]  # main.py wants it before its keys
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    first = place is None or place.index == 0
    model_dir, data_dir = (env[name].rstrip("/") for name in (_MODEL_DIR, entry.variable))
    runs = given.runs or entry.runs
    return Request(given.benchmark, model_dir, data_dir, runs, seed, flags, first)


def _check_environment(entry: Entry, env: Mapping[str, str]) -> list[str]:
    """What is wrong with the environment, in words."""
    meanings = {_MODEL_DIR: "a new folder, gs:// or local, for all that the runs write"}
    faults = [
        f"{name} is not set: {meaning}"
        for name, meaning in (meanings | {entry.variable: entry.meaning}).items()
        if not env.get(name, "").strip("/")
    ]
    path = env.get(_MODEL_DIR, "")
    if path and "://" not in path and not path.startswith("/"):
        faults.append(f"{_MODEL_DIR}={path}: must be gs://BUCKET/FOLDER or /FOLDER")
    data = env.get(entry.variable, "")
    if data and not _holds(data, entry.patterns):
        files = " or ".join(entry.patterns)
        faults.append(f"{entry.variable}={data}: there is no {files}; it is {entry.meaning}")
    return faults


def _holds(path: str, patterns: Sequence[str]) -> bool:
    """Whether a folder has a file of one of the patterns, which may begin with a folder's name."""
    try:
        folder = epath.Path(path)
        places = [(folder / os.path.dirname(p), os.path.basename(p)) for p in patterns]
        return any(True for f, name in places if f.exists() for _ in f.glob(name))
    except Exception as error:  # each file system has errors of its own
        raise UsageError(f"{path} cannot be read: {console.one_line(error)}") from error


def _place(flags: Sequence[str]) -> hosts.Place | None:
    """This host among others, as main.py will see it."""
    parser = console.Parser(prog="run_and_time.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--num_processes", type=int, default=0)
    parser.add_argument("--process_id", type=int, default=-1)
    given, _ = parser.parse_known_args(flags)
    try:
        return hosts.find(given.coordinator, given.num_processes, given.process_id)
    except hosts.HostError as error:
        raise UsageError(str(error)) from error


def run(request: Request, children: Children) -> int:
    """Makes the runs that are missing; returns the exit code of the one that failed, or 0."""
    root = epath.Path(request.model_dir)
    done = set(_results(root, request.name))
    for index, seed in enumerate(request.seeds()):
        if f"result_{index}.txt" in done:
            _say(f"run {index} of {request.runs} has its result already")
            continue
        _say(f"run {index} of {request.runs}: seed {seed}, in {root / f'run_{index}'}")
        begun = time.time()
        lines = [f"STARTING TIMING RUN AT {_clock(begun)}"]
        print(lines[0], flush=True)
        code = children.run(command(request, index, seed), os.environ)
        ended = time.time()
        if code:
            _say(
                f"run {index} ended with exit code {code} and has no result; a run may not be "
                f"resumed: mend the cause, delete {root / f'run_{index}'}, and the same command "
                f"(--seed={request.seed}) goes on with it"
            )
            return code
        lines += [f"ENDING TIMING RUN AT {_clock(ended)}"]
        lines += [f"RESULT,{request.name},0,{ended - begun:.0f},{_user()},{_clock(begun)}"]
        print("\n".join(lines[1:]), flush=True)
        if request.first:
            _collect(root, request.name, index, lines)
    if request.first:
        summarize(root, request.name)
    return 0


def command(request: Request, index: int, seed: int) -> list[str]:
    """The command line of a run; what the person has given comes last, and wins."""
    recipe, *given = request.flags
    return [
        *(sys.executable, "main.py", recipe),
        f"--workdir={request.model_dir}/run_{index}",
        f"--config.data_dir={request.data_dir}",
        f"--config.seed={seed}",
        *BENCHMARKS[request.benchmark].flags,
        "--config.stop_at_target=True",
        "--config.mlperf.org=unofficial",
        "--config.mlperf.clear_caches=True",
        *given,
    ]


def _results(root: Any, name: str) -> dict[str, Any]:
    """{"result_0.txt": its path, ...} of the one system that has any."""
    folder = root / "results"
    systems = sorted(folder.iterdir()) if folder.exists() else []
    return {f.name: f for system in systems for f in sorted((system / name).glob("result_*.txt"))}


def _collect(root: Any, name: str, index: int, lines: list[str]) -> None:
    """Puts the log of a run where the checkers look for it, with the system's description."""
    log = (root / f"run_{index}" / LOG).read_text()
    found = mlperf_logs.read(log)
    system = re.sub(r"[^\w.-]", "-", str(found.values.get("submission_platform", "tpu")))
    path = root / "results" / system / name / f"result_{index}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([lines[0], log.rstrip("\n"), *lines[1:], ""]))
    described = root / "systems" / f"{system}.json"
    if not found.is_v05 and not described.exists():  # or what a person has added would go
        described.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(mlperf_system.describe(system, found.values), indent=2)
        described.write_text(text + "\n")
    _say(f"wrote {path}")


def summarize(root: Any, name: str) -> None:
    """Writes summary.json, and says it."""
    rows: dict[str, Any] = {}
    for file, path in _results(root, name).items():
        run = mlperf_logs.read(path.read_text())
        facts = {"seed": run.values.get("seed"), "success": run.success}
        accuracy = run.evals[-1][1] if run.evals else None
        facts |= {"epochs": run.epochs, "minutes": run.minutes, "accuracy": accuracy}
        rows[file] = facts
        minutes = "?" if run.minutes is None else f"{run.minutes:.2f}"
        reached = f"epoch {run.epochs:g}" if run.epochs is not None else "target NOT reached"
        _say(f"{file}: {minutes} minutes, {reached}")
    means = {
        key: mlperf_logs.olympic([row[key] if row["success"] else None for row in rows.values()])
        for key in ("epochs", "minutes")
    }
    text = json.dumps({"benchmark": name, "runs": rows, "olympic_mean": means}, indent=2)
    (root / "summary.json").write_text(text + "\n")
    if means["minutes"] is not None:
        _say(f"mean without best and worst: {means['minutes']:.2f} minutes")
    _say(f"wrote {root / 'summary.json'}; check: python scripts/mlperf_check.py {root}")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %I:%M:%S %p", time.localtime(seconds))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _say(text: str) -> None:
    print(f"mlperf: {text}", flush=True)


def main() -> int:
    """Makes the runs that the environment and the command line describe."""
    try:
        request = parse(sys.argv[1:], os.environ)
        children = Children()
        children.listen()
        return run(request, children)
    except (UsageError, mlperf_logs.LogError) as error:
        for line in str(error).splitlines():
            print(f"ERROR: {line}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
