"""Reads the requests of run_and_time.sh: variables, names, flags, and each folder's request.json.

The doctor checks the content of the folders.
"""

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from benchmarks import mlperf
from benchmarks.mlperf import Entry
from common import console
from common.errors import ConfigError, UserError, one_line, parse_json
from engine import locations, recipe
from engine.cluster import hosts
from engine.mlperf import LOG

MODEL_DIR = "MLP_GCS_MODEL_DIR"
REQUEST_FILE = "request.json"
_MEANING = "a new folder, gs:// or local, for all files of the runs"
_OWNED = {
    "workdir": f"every run has a folder in ${MODEL_DIR}",
    "mode": "it trains and evaluates",
    "config.seed": "it draws one for each run; give --seed=N to draw the same seeds again",
    "config.data_dir": "the environment names the data",
}
_HOST_FLAGS = ("coordinator", "num_processes", "process_id")  # they differ between hosts
_HELP = "Trains to MLPerf's target quality several times; see docs/mlperf.md."


@dataclasses.dataclass(frozen=True)
class Request:
    """The runs of one benchmark that the environment and the command line ask for."""

    benchmark: str  # the name of its folder in benchmarks/
    model_dir: str  # the folder of all runs
    data_dir: str
    runs: int  # their number
    seed: int | None  # determines the runs' seeds; None until `complete_request` draws it
    flags: list[str]  # for main.py, --config first
    is_first: bool  # whether this host writes the results
    init_from: str = ""  # the checkpoint that training starts from; "" for none

    @property
    def entry(self) -> Entry:
        """How MLPerf runs the benchmark."""
        return mlperf.entry(self.benchmark)

    def seeds(self) -> list[int]:
        """Draws a different seed for each run; more runs or another host change none of them."""
        return random.Random(self.seed).sample(range(2**31), self.runs)


def parse_requests(words: Sequence[str], env: Mapping[str, str]) -> list[Request]:
    """Reads and checks the command line and the environment; returns a request per benchmark."""
    arguments, rest = _parser().parse_known_args(words)
    names, flags = _split(rest)
    names = [*dict.fromkeys([*names, *arguments.benchmark])] or _with_data(env)
    known, root = mlperf.entries(), env.get(MODEL_DIR, "").rstrip("/")
    if not root:
        raise UserError(f"{MODEL_DIR} is not set: {_MEANING}")
    if "://" not in root and not root.startswith("/"):
        raise UserError(f"{MODEL_DIR}={root}: must be gs://BUCKET/FOLDER or /FOLDER")
    locations.check_folder(root, MODEL_DIR)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"{unknown[0]!r} is not a benchmark: give some of {', '.join(known)}")
    if arguments.config and len(names) > 1:
        several = ", ".join(names)
        raise UserError(f"--config={arguments.config} is for one benchmark, not for {several}")
    for flag in flags:
        if (name := _name(flag)) in _OWNED:
            raise UserError(f"--{name} cannot be given here: {_OWNED[name]}")
    host = _host(flags)
    if host and arguments.seed is None:
        raise UserError(f"a run on {host.count} hosts needs --seed=N, the same N on all of them")
    requests = list[Request]()
    for name in names:
        entry, folder = known[name], f"{root}/{name}"
        if not env.get(entry.variable):
            raise UserError(f"{entry.variable} is not set: {entry.meaning}")
        # main.py reads --config before the keys that override it.
        flags_of_it = [f"--config={arguments.config or entry.recipe}", *flags]
        if wrong := recipe.explain(flags_of_it, ConfigError("")):
            raise UserError(f"{name}: {wrong}")
        is_separate = len(names) > 1 or (epath.Path(folder) / REQUEST_FILE).exists()
        requests.append(
            Request(
                benchmark=name,
                model_dir=folder if is_separate else root,
                data_dir=env[entry.variable].rstrip("/"),
                runs=arguments.runs or entry.runs,
                seed=arguments.seed,
                flags=flags_of_it,
                is_first=host is None or host.index == 0,
                init_from=_init_from(name, names, env),
            )
        )
    return requests


def _init_from(name: str, names: Sequence[str], env: Mapping[str, str]) -> str:
    """The checkpoint that a benchmark starts from, "" for none.

    Two benchmarks may share a variable. One with `init_yields` leaves it to the other where both
    run, or where it names the other's default.
    """
    known = mlperf.entries()
    entry = known[name]
    chosen = env.get(entry.init_variable, "").rstrip("/")
    is_shared = sum(known[other].init_variable == entry.init_variable for other in names) > 1
    of_others = [other.init_default for other in known.values() if other is not entry]
    if chosen in of_others or (entry.init_yields and is_shared):
        chosen = ""
    return chosen or entry.init_default


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that name benchmarks, and main.py's flags; a word behind "--flag" is its value."""
    names, flags = [], []
    for before, word in zip(["", *words], words, strict=False):
        is_value = before.startswith("-") and "=" not in before
        (flags if word.startswith("-") or is_value else names).append(word)
    return names, flags


def _parser() -> console.Parser:
    entries = mlperf.entries()
    lines = [f"  {MODEL_DIR}: {_MEANING}"]
    for name, entry in entries.items():
        default = f"default: {entry.runs} runs of {entry.recipe}"
        lines.append(f"  {entry.variable}: {entry.meaning}, for {name}; {default}")
        if entry.init_variable:
            default = f"default for {name}: {entry.init_default}"
            lines.append(f"  {entry.init_variable}: {entry.init_meaning}; {default}")
    others = "Other flags are main.py's and override the script's: --config.mlperf.org=NAME."
    parser = console.Parser(
        prog="run_and_time.sh",
        usage="%(prog)s [NAME ...] [flags]",
        allow_abbrev=False,
        description=f"{_HELP} NAME is one of {', '.join(entries)}.",
        epilog="\n".join(["variables of the environment:", *lines, "", others]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    about = "another way to give NAME; default: all whose data variables are set"
    add("--benchmark", choices=[*entries], action="append", default=[], help=about)
    add("--config", metavar="FILE[:NAME]", help="the recipe, in configs/")
    add("--runs", metavar="N", type=console.integer(1, 10_000), help="runs of each benchmark")
    about = "determines the runs' seeds; default: random for every folder"
    add("--seed", metavar="N", type=console.integer(0), help=about)
    return parser


def _with_data(env: Mapping[str, str]) -> list[str]:
    """The benchmarks whose data variables are set; UserError if none is."""
    variables = {name: entry.variable for name, entry in mlperf.entries().items()}
    if chosen := [name for name, variable in variables.items() if env.get(variable)]:
        return chosen
    listed = ", ".join(f"{variable} for {name}" for name, variable in variables.items())
    raise UserError(f"which benchmark? no variable names the data: set {listed} (see --help)")


def _name(flag: str) -> str:
    return flag.partition("=")[0].lstrip("-")


def _host(flags: Sequence[str]) -> hosts.ProcessGroup | None:
    """The hosts of the run and this host's index, as main.py finds them; None for a single host."""
    parser = console.Parser(prog="run_and_time.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--num_processes", type=int, default=0)
    parser.add_argument("--process_id", type=int, default=-1)
    known, _ = parser.parse_known_args(flags)
    return hosts.find(known.coordinator, known.num_processes, known.process_id)


def complete_request(request: Request) -> Request:
    """Returns the request with its seed, and keeps both in request.json for later starts.

    A folder that was begun with another request is refused.
    """
    root = epath.Path(request.model_dir)
    path = root / REQUEST_FILE
    try:
        has_runs = (root / "results").exists() or any(True for _ in root.glob(f"run_*/{LOG}"))
        before = parse_json(path.read_text()) if path.exists() else {}
        if has_runs and not before:
            raise UserError(
                f"{MODEL_DIR}={root} holds runs, but no {REQUEST_FILE} that describes them: give "
                f"a new {MODEL_DIR}"
            )
        if request.seed is None:
            seed = int(before["seed"]) if before else random.SystemRandom().randrange(2**31)
            request = dataclasses.replace(request, seed=seed)
        if before:
            _compare(before, request, has_runs)
        if request.is_first and not has_runs:
            write_file(path, json.dumps(_constants(request), indent=2) + "\n")
        return request
    except UserError:
        raise
    except Exception as error:  # file systems raise different errors
        raise UserError(f"{path}: {one_line(error)}; or give a new {MODEL_DIR}") from error


def _compare(before: dict[str, Any], request: Request, has_runs: bool) -> None:
    """Raises UserError if a folder was begun with another request."""
    if not has_runs:  # another checkpoint may replace one that could not be read
        before["init_from"] = request.init_from
    now = _constants(request)
    for values in (before, now):  # in any order; the last of two flags of a name counts
        values["flags"] = sorted({_name(flag): flag for flag in values["flags"]}.values())
    changes = [
        f"{key} {before.get(key)} before, {value} now"
        for key, value in now.items()
        if before.get(key) != value
    ]
    if changes:
        raise UserError(
            f"{MODEL_DIR}={request.model_dir} holds runs of another kind ({'; '.join(changes)}): "
            f"give a new {MODEL_DIR}"
        )


def _constants(request: Request) -> dict[str, Any]:
    """The values that are equal for all runs in one folder."""
    config, *flags = request.flags
    constants = {
        "benchmark": request.benchmark,
        "config": config.removeprefix("--config="),
        "flags": [flag for flag in flags if _name(flag) not in _HOST_FLAGS],
        "data": request.data_dir,
        "seed": request.seed,
    }
    return constants | ({"init_from": request.init_from} if request.init_from else {})


def write_file(path: Any, text: str) -> None:
    """Writes a file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}.tmp"
    draft.write_text(text)
    draft.replace(path)


def command_line(request: Request, index: int, seed: int) -> list[str]:
    """Returns the command line of a run; the user's flags come last and override the others."""
    (recipe, *flags), entry = request.flags, request.entry
    init_from = [f"--config.init_from={request.init_from}"] if request.init_from else []
    return [
        sys.executable,
        "main.py",
        recipe,
        f"--workdir={request.model_dir}/run_{index}",
        f"--config.data_dir={request.data_dir}",
        f"--config.seed={seed}",
        *init_from,
        *(f"--config.{key}={number}" for key, number in entry.declares.items()),
        f"--config.mlperf.format={entry.form}",
        "--config.stop_at_target=True",
        "--config.mlperf.org=unofficial",
        "--config.mlperf.status=research",
        "--config.mlperf.clear_caches=True",
        *flags,
    ]
