"""Trains to MLPerf's targets several times (docs/mlperf.md); run_and_time.sh starts it.

Each run is a process of main.py with a separate folder and seed. This program starts the runs in
order, one benchmark after the other, passes the signals that ask to stop on to them, and collects
their logs. If the program is killed, the same command continues; it first collects a run that has
ended in the meantime. The doctor checks the content of the folders.
"""

import argparse
import dataclasses
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from benchmarks import mlperf
from benchmarks.mlperf import Entry
from commands import recipe
from common import cli, entry, keys
from common.errors import ConfigError, UserError, one_line, parse_json
from engine import environment, locations
from engine.cluster import hosts
from engine.mlperf import LOG
from scripts.gradient import Children
from scripts.mlperf import results
from scripts.mlperf.results import REQUEST_FILE, say

MODEL_DIR = "MLP_GCS_MODEL_DIR"
_MEANING = "a new folder, gs:// or local, for all files of the runs"
_OWNED = {
    "workdir": f"every run has a folder in ${MODEL_DIR}",
    "mode": "it trains and evaluates",
    "config.seed": "it draws one for each run; give --seed=N to draw the same seeds again",
    "config.data_dir": "the environment names the data",
}
_HOST_FLAGS = {"coordinator": str, "num_processes": int, "process_id": int}  # as main.py has them


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

    def has_ended(self, index: int) -> bool:
        """Whether run `index` has a result or a complete log."""
        root = epath.Path(self.model_dir)
        pattern = f"results/*/{self.entry.name}/result_{index}.txt"
        return bool(results.find(root, pattern)) or results.is_complete(root / f"run_{index}")

    def command_line(self, index: int) -> list[str]:
        """The command line of a run; the user's flags come last and override the others."""
        (recipe, *flags), entry = self.flags, self.entry
        return [
            sys.executable,
            "main.py",
            recipe,
            f"--workdir={self.model_dir}/run_{index}",
            f"--config.data_dir={self.data_dir}",
            f"--config.seed={self.seeds()[index]}",
            *([f"--config.init_from={self.init_from}"] if self.init_from else []),
            *(f"--config.{key}={number}" for key, number in entry.declares.items()),
            f"--config.mlperf.format={entry.form}",
            "--config.stop_at_target=True",
            "--config.mlperf.org=unofficial",
            "--config.mlperf.status=research",
            "--config.mlperf.clear_caches=True",
            *flags,
        ]


def parse_requests(words: Sequence[str], env: Mapping[str, str]) -> list[Request]:
    """Reads and checks the command line and the environment; returns a request per benchmark."""
    arguments, others = _parser().parse_known_args(words)
    names, flags = list[str](), list[str]()
    for before, word in zip(["", *others], others, strict=False):
        is_value = before.startswith("-") and "=" not in before
        (flags if word.startswith("-") or is_value else names).append(word)
    entries, root = mlperf.entries(), env.get(MODEL_DIR, "").rstrip("/")
    with_data = [name for name, entry in entries.items() if env.get(entry.variable)]
    names = [*dict.fromkeys([*names, *arguments.benchmark])] or with_data
    if not names:
        listed = ", ".join(f"{entry.variable} for {name}" for name, entry in entries.items())
        raise UserError(f"which benchmark? no variable names the data: set {listed} (see --help)")
    if not root:
        raise UserError(f"{MODEL_DIR} is not set: {_MEANING}")
    if "://" not in root and not root.startswith("/"):
        raise UserError(f"{MODEL_DIR}={root}: give gs://BUCKET/FOLDER or an absolute path")
    locations.check_folder(root, MODEL_DIR)
    if unknown := [name for name in names if name not in entries]:
        raise UserError(f"{unknown[0]!r} is not a benchmark: give some of {', '.join(entries)}")
    if arguments.config and len(names) > 1:
        several = ", ".join(names)
        raise UserError(f"--config={arguments.config} is for one benchmark, not for {several}")
    for flag in flags:
        if (name := _name(flag)) in _OWNED:
            raise UserError(f"--{name} cannot be given here: {_OWNED[name]}")
    given = ((name, getattr(arguments, name)) for name in _HOST_FLAGS)
    host_flags = {name: value for name, value in given if value is not None}
    host = hosts.find(**host_flags)
    if host and arguments.seed is None:
        raise UserError(f"a run on {host.count} hosts needs --seed=N, the same N on all of them")
    requests = list[Request]()
    for name in names:
        entry, folder = entries[name], f"{root}/{name}"
        if not env.get(entry.variable):
            raise UserError(f"{entry.variable} is not set: {entry.meaning}")
        # main.py reads --config before the keys that override it.
        file = arguments.config or entry.recipe
        flags_of_it = [f"--config={file}", *flags]
        flags_of_it += [f"--{key}={value}" for key, value in host_flags.items()]
        try:
            recipe.check_keys(flags_of_it, file, keys.flat(recipe.load(file)))
        except ConfigError as error:
            raise UserError(f"{name}: {error}") from error
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
                init_from=_init_from(name, names, entries, env),
            )
        )
    return requests


def _init_from(
    name: str, names: Sequence[str], entries: Mapping[str, Entry], env: Mapping[str, str]
) -> str:
    """The checkpoint that a benchmark starts from, "" for none.

    Two benchmarks may share a variable. One with `init_yields` leaves it to the other where both
    run, or where it names the other's default.
    """
    own = entries[name]
    chosen = env.get(own.init_variable, "").rstrip("/")
    is_shared = sum(entries[other].init_variable == own.init_variable for other in names) > 1
    of_others = [other.init_default for other in entries.values() if other is not own]
    is_of_another = chosen in of_others or (own.init_yields and is_shared)
    return own.init_default if is_of_another else chosen or own.init_default


def _parser() -> cli.Parser:
    entries = mlperf.entries()
    lines = [f"  {MODEL_DIR}: {_MEANING}"]
    lines += [
        f"  {one.variable}: {one.meaning}, for {name}; default: {one.runs} runs of {one.recipe}"
        for name, one in entries.items()
    ]
    lines += [
        f"  {one.init_variable}: {one.init_meaning}; default for {name}: {one.init_default}"
        for name, one in entries.items()
        if one.init_variable
    ]
    footer = "Other flags are main.py's and override the script's: --config.mlperf.org=NAME."
    parser = cli.Parser(
        prog="run_and_time.sh",
        usage="%(prog)s [NAME ...] [flags]",
        allow_abbrev=False,
        description="Trains to MLPerf's target quality several times; see docs/mlperf.md. "
        f"NAME is one of {', '.join(entries)}.",
        epilog="\n".join(["variables of the environment:", *lines, "", footer]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    about = "another way to give NAME; default: all whose data variables are set"
    add("--benchmark", choices=[*entries], action="append", default=[], help=about)
    add("--config", metavar="FILE[:NAME]", help="the recipe, in configs/")
    add("--runs", metavar="N", type=cli.integer(1, 10_000), help="runs of each benchmark")
    about = "determines the runs' seeds; default: random for every folder"
    add("--seed", metavar="N", type=cli.integer(0), help=about)
    for name, type_of in _HOST_FLAGS.items():
        add(f"--{name}", type=type_of, help="of a run on several hosts, as for main.py")
    return parser


def _name(flag: str) -> str:
    return flag.partition("=")[0].lstrip("-")


def complete_request(request: Request) -> Request:
    """Returns the request with its seed, and keeps both in request.json for later starts.

    A folder that was begun with another request is refused.
    """
    root, (config, *flags) = epath.Path(request.model_dir), request.flags
    path = root / REQUEST_FILE
    last = {name: flag for flag in flags if (name := _name(flag)) not in _HOST_FLAGS}
    now = {
        "benchmark": request.benchmark,
        "config": config.removeprefix("--config="),
        "flags": sorted(last.values()),  # in any order; the last of two flags of a name counts
        "data": request.data_dir,
        "init_from": request.init_from,
    }
    try:
        has_runs = (root / "results").exists() or bool(results.find(root, f"run_*/{LOG}"))
        before = parse_json(path.read_text()) if path.exists() else {}
        if has_runs and not before:
            raise UserError(
                f"{MODEL_DIR}={root} holds runs, but no {REQUEST_FILE} that describes them: give "
                f"a new {MODEL_DIR}"
            )
        drawn = before["seed"] if before else random.SystemRandom().randrange(2**31)
        now["seed"] = drawn if request.seed is None else request.seed
        before = before or now
        if not has_runs:  # another checkpoint may replace one that could not be read
            before["init_from"] = request.init_from
        changes = [
            f"{key} {before.get(key)} before, {value} now"
            for key, value in now.items()
            if before.get(key, "") != value
        ]
        if changes:
            raise UserError(
                f"{MODEL_DIR}={root} holds runs of another kind ({'; '.join(changes)}): give a "
                f"new {MODEL_DIR}"
            )
        if request.is_first and not has_runs:
            results.write_file(path, json.dumps(now, indent=2) + "\n")
    except UserError:
        raise
    except Exception as error:  # file systems raise different errors
        raise UserError(f"{path}: {one_line(error)}; or give a new {MODEL_DIR}") from error
    return dataclasses.replace(request, seed=now["seed"])


def run_all(requests: Sequence[Request], children: Children) -> int:
    """Runs one benchmark after the other; returns the exit code of the first that failed, or 0.

    The doctor checks all of them before the first begins; benchmarks that pass run.
    """
    codes: dict[str, int] = {}
    for request in requests:
        if not (codes and children.stop_signal) and (code := examine(request, children)):
            codes[request.benchmark] = code
    for request in requests:
        if request.benchmark in codes or (codes and children.stop_signal):
            continue
        if request.is_first:
            say(f"{request.benchmark}: --seed={request.seed}")
        try:
            codes[request.benchmark] = run(request, children)
        except UserError as error:
            print(f"ERROR: {error}", file=sys.stderr, flush=True)
            codes[request.benchmark] = 1
    failed = [code for request in requests if (code := codes.get(request.benchmark))]
    if len(requests) > 1:
        for request in requests:
            code = codes.get(request.benchmark)
            state = "not begun" if code is None else f"failed, exit code {code}" if code else "done"
            say(f"{request.benchmark}: {state}, in {request.model_dir}")
        if failed:
            say("the same command continues with what is missing")
    return failed[0] if failed else 0


def examine(request: Request, children: Children) -> int:
    """Asks the doctor whether the first missing run can start; returns its exit code."""
    try:
        missing = [index for index in range(request.runs) if not request.has_ended(index)]
    except Exception:  # `run` says what is wrong
        return 0
    if not missing:
        return 0
    code = children.run([*request.command_line(missing[0]), "--mode=doctor"], os.environ)
    if code and not children.stop_signal:
        entry, begins = request.entry, request.init_from
        folder = epath.Path(request.model_dir) / f"run_{missing[0]}"
        cut_short = f"; delete {folder}, and the same command continues"
        say(
            f"{request.benchmark} does not start: the doctor says why above; {entry.variable} is "
            f"{request.data_dir}"
            + (f", {entry.init_variable} is {begins}" if begins else "")
            + (cut_short if (folder / LOG).exists() else "")
        )
    return code


def run(request: Request, children: Children) -> int:
    """Starts the missing runs; returns the exit code of the run that failed, or 0.

    Where a file cannot be written (UserError), the next start collects the runs that ended.
    """
    root, name, code = epath.Path(request.model_dir), request.entry.name, 0
    for index, seed in enumerate(request.seeds()):
        folder = root / f"run_{index}"
        with results.file_errors(folder):
            if request.has_ended(index):
                say(f"run {index} of {request.runs} has ended already")
            else:
                say(f"run {index} of {request.runs}: seed {seed}, in {folder}")
                if request.is_first:
                    results.begin(root, index)
                if code := children.run(request.command_line(index), os.environ):
                    say(f"run {index} ended with exit code {code}{_fix(folder)}")
                    break
            if request.is_first:
                results.collect(root, name, index)
    if request.is_first:
        with results.file_errors(root):
            results.summarize(root, name)
    return code


def _fix(folder: Any) -> str:
    """The fix for a run that has failed."""
    if results.is_complete(folder):
        return " after its clock had stopped: the same command collects it, and continues"
    if (folder / LOG).exists():
        return (
            " and has no result; a run may not be resumed: remove the cause, delete "
            f"{folder}, and the same command continues with it"
        )
    return " before it began; remove the cause, and the same command continues with it"


def main() -> int:
    """Starts the runs that the environment and the command line ask for."""
    environment.show_log(sys.stdout)
    requests = [complete_request(request) for request in parse_requests(sys.argv[1:], os.environ)]
    if len(requests) > 1 and requests[0].is_first:
        say(f"{len(requests)} benchmarks, one after the other:")
        for one in requests:
            begins = f", begins with {one.init_from}" if one.init_from else ""
            what = f"{one.benchmark}: {one.runs} runs of {one.flags[0]} on {one.data_dir}"
            say(f"  {what}, in {one.model_dir}{begins}")
    children = Children()
    children.listen()
    return run_all(requests, children)


if __name__ == "__main__":
    environment.set_defaults()  # TensorFlow's lines of greeting stay away
    entry.run(main)
