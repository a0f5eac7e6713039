"""What run_and_time.sh is asked for: its variables and flags, and what it was asked before.

Everything that is wrong is said at once, a line each, before anything starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from engine.cluster import hosts
from errors import HostError, one_line
from scripts import console


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a benchmark is run."""

    name: str  # MLPerf's, its folder in results/
    recipe: str
    variable: str  # that names the data
    meaning: str
    needed: tuple[tuple[str, ...], ...]  # of each, files of one pattern must be there
    index: str  # the file without which every run reads all data through to count them, or ""
    runs: int  # that MLPerf wants
    flags: tuple[str, ...]  # what no recipe needs to know


BENCHMARKS = {
    "resnet50": Entry(
        "resnet",
        "configs/mlperf_resnet50.py:1632",
        "MLP_PATH_GCS_IMAGENET",
        "the folder of ImageNet's train-* and validation-* records",
        (("train-*", "train/train-*"), ("validation-*", "validation/validation-*")),
        "manifest.json",
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
        (("ratings.csv", "ml-20m/ratings.csv", "ml-20m.zip", "ratings.dat", "ml-1m/ratings.dat"),),
        "",
        100,
        (
            "--config.num_users=138493",
            "--config.num_items=26744",
            "--config.num_ratings=20000263",
            "--config.mlperf.format=v0.5",
        ),
    ),
}
MODEL_DIR = "MLP_GCS_MODEL_DIR"
FILE = "request.json"
_MEANING = "a new folder, gs:// or local, for all that the runs write"
_OWNED = {
    "workdir": f"every run has a folder in ${MODEL_DIR}",
    "mode": "it trains and evaluates",
    "replay": "it trains and evaluates",
    "config.seed": "it draws one for each run; give --seed=N to draw the same ones again",
    "config.data_dir": "the environment names the data",
}
_PLACE = ("coordinator", "num_processes", "process_id")  # flags that are each host's own
_HELP = "Trains to MLPerf's target quality several times; see docs/mlperf.md."


class UsageError(ValueError):
    """The runs cannot start as asked; the message is one line for each thing that is wrong."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the environment and the command line ask for."""

    benchmark: str
    model_dir: str
    data_dir: str
    runs: int
    seed: int | None  # None: drawn when the folder is first used
    flags: list[str]  # main.py's, --config first
    first: bool  # whether this host writes the results

    @property
    def name(self) -> str:
        """MLPerf's name of the benchmark."""
        return BENCHMARKS[self.benchmark].name

    def seeds(self) -> list[int]:
        """One for each run, all different; the same on every host, and with more runs."""
        return random.Random(self.seed).sample(range(2**31), self.runs)


def parse(words: Sequence[str], env: Mapping[str, str]) -> Request:
    """Reads and checks both.

    Raises:
      UsageError: a variable is missing or wrong, or a flag is this program's own.
    """
    given, flags = _parser().parse_known_args(words)
    entry, faults = BENCHMARKS[given.benchmark], []
    for flag in flags:
        if (name := _name(flag)) in _OWNED:
            faults.append(f"--{name} cannot be given here: {_OWNED[name]}")
    faults += _check_environment(entry, env)
    place = None
    try:
        place = _place(flags)
    except HostError as error:
        faults.append(str(error))
    if place and given.seed is None:
        faults.append(f"a run on {place.count} hosts needs --seed=N, the same N on all of them")
    if faults:
        raise UsageError("\n".join(faults))
    flags = [f"--config={given.config or entry.recipe}", *flags]  # main.py wants it before its keys
    first = place is None or place.index == 0
    model_dir, data_dir = (env[name].rstrip("/") for name in (MODEL_DIR, entry.variable))
    runs = given.runs or entry.runs
    return Request(given.benchmark, model_dir, data_dir, runs, given.seed, flags, first)


def _parser() -> console.Parser:
    recipes = ", ".join(f"{entry.recipe} for {name}" for name, entry in BENCHMARKS.items())
    lines = [f"  {MODEL_DIR}: {_MEANING}"]
    lines += [f"  {entry.variable}: {entry.meaning}" for entry in BENCHMARKS.values()]
    others = "Other flags are main.py's, and win: --config.mlperf.org=NAME, and so on."
    parser = console.Parser(
        prog="run_and_time.sh",
        allow_abbrev=False,
        description=_HELP,
        epilog="\n".join(["variables of the environment:", *lines, "", others]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--benchmark", choices=sorted(BENCHMARKS), default="resnet50")
    parser.add_argument(
        "--config", metavar="FILE[:NAME]", help=f"the recipe, in configs/; default: {recipes}"
    )
    wanted = ", ".join(f"{entry.runs} for {name}" for name, entry in BENCHMARKS.items())
    runs = f"default: as many as MLPerf wants, {wanted}"
    parser.add_argument("--runs", metavar="N", type=console.whole(1), help=runs)
    seed = "what the runs' seeds are drawn from; default: another for every folder"
    parser.add_argument("--seed", metavar="N", type=console.whole(0), help=seed)
    return parser


def _name(flag: str) -> str:
    return re.sub(r"^--?", "", flag.partition("=")[0])


def _check_environment(entry: Entry, env: Mapping[str, str]) -> list[str]:
    """What is wrong with the environment, in words."""
    faults = [
        f"{name} is not set: {meaning}"
        for name, meaning in ((MODEL_DIR, _MEANING), (entry.variable, entry.meaning))
        if not env.get(name, "").strip("/")
    ]
    path, data = env.get(MODEL_DIR, "").rstrip("/"), env.get(entry.variable, "").rstrip("/")
    if path and "://" not in path and not path.startswith("/"):
        faults.append(f"{MODEL_DIR}={path}: must be gs://BUCKET/FOLDER or /FOLDER")
    elif path and (reason := _cannot_write(path)):
        faults.append(f"{MODEL_DIR}={path} cannot be written ({reason}): it must be {_MEANING}")
    try:
        missing = [patterns for patterns in entry.needed if data and not _holds(data, patterns)]
        if files := " and no ".join(map(" or ".join, missing)):
            faults.append(f"{entry.variable}={data}: there is no {files}; it is {entry.meaning}")
    except Exception as error:  # each file system has errors of its own
        reason = one_line(error)
        faults.append(f"{entry.variable}={data} cannot be read ({reason}); it is {entry.meaning}")
    return faults


def _cannot_write(path: str) -> str:
    """Why a folder cannot be written to; "" if it can."""
    probe = epath.Path(path) / f".probe-{uuid.uuid4().hex}"  # the other hosts look, too
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except Exception as error:  # each file system has errors of its own
        return one_line(error)
    return ""


def _holds(path: str, patterns: Sequence[str]) -> bool:
    """Whether a folder has a file of one of the patterns, which may begin with a folder's name."""
    folder = epath.Path(path)
    if folder.is_dir():
        next(iter(folder.iterdir()), None)  # glob finds nothing where listing is not allowed
    places = [(folder / os.path.dirname(p), os.path.basename(p)) for p in patterns]
    return any(True for f, name in places if f.exists() for _ in f.glob(name))


def _place(flags: Sequence[str]) -> hosts.ProcessGroup | None:
    """This host among others, as main.py will see it."""
    parser = console.Parser(prog="run_and_time.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--num_processes", type=int, default=0)
    parser.add_argument("--process_id", type=int, default=-1)
    given, _ = parser.parse_known_args(flags)
    return hosts.find(given.coordinator, given.num_processes, given.process_id)


def settle(request: Request) -> Request:
    """The request with its seed, which is kept in request.json with all that must not change.

    Raises:
      UsageError: the folder was begun with another request, or cannot be read or written.
    """
    root = epath.Path(request.model_dir)
    path = root / FILE
    try:
        if path.exists():
            before = json.loads(path.read_text())
            if request.seed is None:
                request = dataclasses.replace(request, seed=int(before["seed"]))
            _compare(before, _facts(request), request.model_dir)
            return request
        if _used(root):
            raise UsageError(
                f"{MODEL_DIR}={root} holds runs, but no {FILE} that says how they were made: give "
                f"a new {MODEL_DIR}"
            )
        if request.seed is None:
            request = dataclasses.replace(request, seed=random.SystemRandom().randrange(2**31))
        if request.first:
            write(path, json.dumps(_facts(request), indent=2) + "\n")
        return request
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged ({error!r}): give a new {MODEL_DIR}") from error
    except Exception as error:  # each file system has errors of its own
        raise UsageError(f"{path}: {one_line(error)}") from error


def _used(root: Any) -> bool:
    """Whether a folder holds runs or their results."""
    return (root / "results").exists() or any(True for _ in root.glob("run_*"))


def _facts(request: Request) -> dict[str, Any]:
    config, *flags = request.flags
    return {
        "benchmark": request.benchmark,
        "config": config.removeprefix("--config="),
        "flags": [flag for flag in flags if _name(flag) not in _PLACE],
        "data": request.data_dir,
        "seed": request.seed,
    }


def _compare(before: dict[str, Any], now: dict[str, Any], model_dir: str) -> None:
    """Refuses runs that would not be of one set."""
    found = []
    for key in [key for key in now if key != "flags" and before[key] != now[key]]:
        found.append(f"{key} {before[key]} before, {now[key]} now")
    was, is_now = ({_name(flag): flag for flag in facts["flags"]} for facts in (before, now))
    for name in sorted({*was, *is_now}):
        if was.get(name) != is_now.get(name):
            found.append(f"{was.get(name, f'no --{name}')} before, {is_now.get(name, 'none')} now")
    if found:
        raise UsageError(
            f"{MODEL_DIR}={model_dir} holds runs of another kind ({'; '.join(found)}): give a new "
            f"{MODEL_DIR}"
        )


def notes(request: Request) -> list[str]:
    """What a person should know before the runs start.

    Raises:
      UsageError: the data cannot be read.
    """
    entry = BENCHMARKS[request.benchmark]
    path = epath.Path(request.data_dir) / (entry.index or ".")
    try:
        if path.exists():
            return []
    except Exception as error:  # each file system has errors of its own
        raise UsageError(f"{path}: {one_line(error)}") from error
    return [
        f"NOTE there is no {path}: every run reads all records through to count them, while its "
        "clock runs. scripts/prepare_imagenet.py writes one; see docs/mlperf.md"
    ]


def write(path: Any, text: str) -> None:
    """Writes a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}.tmp"
    draft.write_text(text)
    draft.replace(path)


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
        "--config.mlperf.status=research",
        "--config.mlperf.clear_caches=True",
        *given,
    ]
