"""Makes the data of a benchmark: `python -m scripts.prepare PATH` of what lies there.

`python -m scripts.prepare NAME` runs one preparation, `python -m scripts.prepare download NAME`
brings a public data set first; without arguments all are listed.
"""

import argparse
import collections
import dataclasses
import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from common import cli, entry, locks
from common.data import data_manifest, files
from common.errors import UserError, one_line, parse_json, some
from common.images import photos
from common.preparation import arguments, unread
from common.preparation.folders import DatasetFormat, Folder
from common.preparation.sources import SUFFIXES, SourceError
from common.preparation.writing import State
from common.progress import duration
from common.tensorflow import tensorflow
from engine import environment
from scripts import archives, public_sets

# By name: the package whose `preparation` has a module of this name, with prepare(args), and
# parse(parser, argv) if it has more arguments than --out; and what it makes.
PREPARATIONS = {
    "imagenet": ("benchmarks.resnet", "records of ImageNet, or of your photos"),
    "coco": ("benchmarks.detection", "records of COCO, or of your images"),
    "text": ("benchmarks.translation", "records of parallel text"),
    "interactions": ("benchmarks.ncf", "ratings or events of your users and items"),
    "digits": ("benchmarks.resnet", "handwritten digits"),
    "digit_scenes": ("benchmarks.detection", "images of digits, with boxes and masks"),
    "phrases": ("benchmarks.translation", "sentences in English and German"),
    "ratings": ("benchmarks.ncf", "synthetic ratings of films"),
}
# Whose `preparation.recognise` says which dataset formats a folder has.
_FAMILIES = [f"benchmarks.{name}" for name in ("resnet", "detection", "translation", "ncf")]
_COMMAND = "python -m scripts.prepare"
_FORMS = "photos by class, labels of boxes, pairs of sentences, or rows of users and items"
_LABELS = (".json", ".jsonl", ".csv", ".tsv", ".xml", ".txt", ".yaml", ".yml", ".mat")
_NOTES = re.compile(r"(readme|licen[cs]e|copying|citation|notice).*|.*\.(md|pdf|html)", re.I)
_FORMER = {  # what takes the place of preparations that are gone
    "fake": "training needs no data with --config.dataset=fake",
    "digit_masks": "use digit_scenes, which has masks",
}
_FAR_MORE = 20  # times the files of a second format: then that one is of stray files
_PATIENCE = 240  # seconds for the measurement of a step
_TRAIN = "train on them: "  # in the last line of a preparation, before the command
_TRAIN_FILE = "train.json"  # with that command, in prepare_state
# The training examples from which on a set is large, by the first of these units that its data
# manifest counts; "examples" are photos, or rows of text, which hold several pairs.
_LARGE = {"pairs": 1_000_000, "ratings": 10_000_000, "examples": 20_000}


def parse(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a preparation; exits with status 2 and one line if one is invalid."""
    module = _module(PREPARATIONS[name][0], name)
    about = cli.summary(module.__doc__)
    parser = cli.Parser(prog=f"{_COMMAND} {name}", description=about)
    parse_own = getattr(module, "parse", arguments.parse_out)
    return parse_own(parser, cli.underscored(argv))


def _module(package: str, name: str) -> Any:
    return importlib.import_module(f"{package}.preparation.{name}")


def make(name: str, argv: Sequence[str]) -> str:
    """Prepares the data; returns the last line to print."""
    args = parse(name, argv)
    print(f"prepare {name}: starting TensorFlow, up to 10 s", flush=True)
    photos.quiet()
    return _prepare(name, args)


def _prepare(name: str, args: argparse.Namespace) -> str:
    """Prepares the data, alone in the folder; returns the last line to print."""
    out = args.out.rstrip("/")
    with locks.alone(f"{out}/prepare.lock", f"prepares {out}", "use another --out"):
        return _module(PREPARATIONS[name][0], name).prepare(args)


def run(title: str, act: Callable[[], Any]) -> None:
    """Prepares data; a failure exits with one line, which begins with the title, and its code."""
    try:
        act()
        return
    except KeyboardInterrupt:
        text, code = "stopped; the same command continues", 130
    except UserError as error:
        text, code = str(error), error.code
    except (OSError, UnicodeError, tensorflow().errors.OpError) as error:
        fix = "remove the cause, and the same command continues"
        text, code = f"failed: {one_line(error)}; {fix}", 1
    print(f"{title}: {text}", file=sys.stderr)
    sys.exit(code)


# --- A path instead of a name.


def _flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments for a path, and those of the preparation."""
    parser = cli.Parser(
        prog=_COMMAND,
        usage=f"{_COMMAND} PATH [arguments] [arguments of the preparation]",
        description="Finds out what lies at PATH, makes records of it, and prints the command that "
        "trains. Other arguments go to the preparation NAME that fits: see NAME --help.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("path", type=cli.path, metavar="PATH", help="folder, file or archive; local or gs://")
    add("--out", type=cli.path, help="folder for the records (data/NAME)")
    add("--dry_run", action="store_true", help="only say what is there and would be made")
    add("--as", dest="format", default="", metavar="FORM", help="which of several readings to take")
    add("--untimed", action="store_true", help="do not measure how long training takes here")
    add("--tpu", default="", help="slices to ask the compiler for the price on: v5e-8,v4-16")
    args, others = parser.parse_known_args(cli.underscored(argv))
    if others and not others[0].startswith("-"):
        parser.error(f"give one PATH, a folder with all files: {others[0]} is a second one")
    return args, others


def prepare_path(argv: Sequence[str]) -> None:
    """Finds out what lies at a path, prepares it, and prints the command that trains on it."""
    args, others = _flags(argv)
    if "://" not in args.path and not os.path.lexists(args.path):
        names = ", ".join(PREPARATIONS)
        instead = _FORMER.get(args.path) or f"choose a file or folder, or one of {names}"
        raise SourceError(f"there is no {args.path!r}; {instead}")
    print(f"looking at {args.path}: starting TensorFlow, up to 10 s", flush=True)
    photos.quiet()
    folder = dataclasses.replace(Folder.open(args.path), flags=tuple(others))
    if not folder.files:
        raise SourceError(f"{args.path} holds no files")
    if is_prepared(folder, args.path):
        return
    name = stem(args.path, folder.is_file)
    out = _out(args, folder.is_file, name)
    is_archive = folder.is_file and args.path.lower().endswith(archives.SUFFIXES)
    if not (formats := dataset_formats(folder)) and is_archive:
        folder = dataclasses.replace(_unpacked(args, f"data/raw/{name}"), flags=folder.flags)
        formats = dataset_formats(folder)
        if args.dry_run and not formats:
            print(f"what they are is seen after that: {_endings(folder)}")
            return
    chosen = choose(folder, formats, args.format)
    flags = [*chosen.arguments, *others, f"--out={out}"]
    parsed = parse(chosen.preparation, flags)
    print(f"found: {chosen.evidence}\nmakes in {out}: {chosen.output}")
    print(f"with: {_COMMAND} {shlex.join([chosen.preparation, *flags])}", flush=True)
    if not args.dry_run:
        _finish(_prepare(chosen.preparation, parsed), out, args)


def download(argv: Sequence[str]) -> None:
    """Downloads a public data set, prepares it, and prints the command that trains on it."""
    parser = cli.Parser(
        prog=f"{_COMMAND} download",
        description="Downloads a public data set to data/raw, checks it, and prepares it. Other "
        "arguments are those of a path.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", choices=public_sets.SETS, help=f"one of {', '.join(public_sets.SETS)}"
    )
    args, others = parser.parse_known_args(argv)
    prepare_path([public_sets.get(args.name), *public_sets.SETS[args.name].flags, *others])


def stem(path: str, is_file: bool) -> str:
    """The name of a file or folder, safe and without a file's endings."""
    name = os.path.basename((path if "://" in path else os.path.abspath(path)).rstrip("/"))
    if is_file:
        inner = r"(\.(tar|csv|tsv|txt|jsonl?|dat|data|tmx|xlf|xliff|po))?"
        name = re.sub(rf"{inner}\.(gz|bz2|xz|zip)$|\.\w+$", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "own"


def _out(args: argparse.Namespace, is_file: bool, name: str) -> str:
    """The folder for the records; SourceError if it is in the input."""

    def is_inside(out: str) -> bool:
        paths = [path if "://" in path else os.path.realpath(path) for path in (out, args.path)]
        return not is_file and f"{paths[0]}/".startswith(f"{paths[1].rstrip('/')}/")

    out = args.out or f"data/{name}"
    if not args.out and is_inside(out):
        out += "_records"  # of data/NAME itself
    if not is_inside(out):
        return out
    raise SourceError(f"--out={out} is inside of {args.path}: give a folder outside of it")


def is_prepared(folder: Folder, path: str) -> bool:
    """Whether a folder holds records of this program; if so, prints the command that trains."""
    names = {file.name for file in folder.files}
    data_manifest.check_finished(path)
    has_command = f"{data_manifest.STATE}/{_TRAIN_FILE}" in names
    has_records = files.stems(names) or {"ratings.csv", "items.csv"} <= names
    if not has_command and (data_manifest.FILE_NAME not in names or not has_records):
        return False
    hint = "the command that made them prints the one that trains, if you type it again"
    if has_command:
        hint = f"{_TRAIN}{State(path).read(_TRAIN_FILE)}"
    print(f"{path} holds records that are ready; {hint}")
    return True


def dataset_formats(folder: Folder) -> list[DatasetFormat]:
    """The formats, of all families, that a folder has, or the only folder there.

    Where no preparation can read it, the first UserError of one that tried is raised.
    """
    inner = folder.inner()
    if inner and all(_NOTES.fullmatch(f.name) for f in folder.files if "/" not in f.name):
        return dataset_formats(inner)
    formats, errors = [], []
    for family in _FAMILIES:
        try:
            formats += _module(family, "recognise").dataset_formats(folder)
        except UserError as error:
            errors.append(error)
    if inner and not formats:
        try:
            formats = dataset_formats(inner)
        except UserError as error:
            errors.append(error)
    if errors and not formats:
        raise errors[0]
    if not any(row.preparation == "coco" for row in formats):  # which may read what others refuse
        taken = " ".join(itertools.chain(*(row.arguments for row in formats)))
        for error in errors:
            paths = (folder.full(file.name) for file in folder.files)
            if not any(str(error).startswith(path) and path in taken for path in paths):
                print(f"not taken: {error}")
    return formats


def _unpacked(args: argparse.Namespace, path: str) -> Folder:
    """The files of an archive, unpacked to a path; a dry run only lists them."""
    if "://" in args.path:
        raise SourceError(f"{args.path} is an archive that must be unpacked: copy it here first")
    if args.dry_run:
        print(f"its files would be unpacked to {path}", flush=True)
        return archives.Listing.of(args.path, path)
    archives.unpack(args.path, path)
    return Folder.open(path)


def choose(folder: Folder, formats: Sequence[DatasetFormat], name: str = "") -> DatasetFormat:
    """The format of a name, or the one that fits far more files than the others.

    Raises SourceError if there is none, or if several are as likely.
    """
    formats = sorted(formats, key=lambda row: -row.num_files)
    likely = [row for row in formats if (row.name == name if name else row.num_files)]
    texts = [f"{row.evidence} (--as={row.name})" for row in formats]
    if not likely:
        prefix = f"--as={name}: there is nothing of this form; " if name else ""
        raise SourceError(f"{prefix}{folder.given} {_contents(folder, texts)}")
    chosen, *others = likely
    others = [row for row in others if row.name != chosen.name]
    if others and chosen.num_files < _FAR_MORE * others[0].num_files:
        two = " or ".join(f"{row.evidence} (--as={row.name})" for row in (chosen, others[0]))
        raise SourceError(f"{folder.given} may be {two}: choose one with --as")
    for row, text in zip(formats, texts, strict=True):
        if row.name != chosen.name:
            print(f"not taken: {text}")
    aside = dict.fromkeys(folder.named(*archives.SUFFIXES), "is an archive")
    aside |= unread.labels(folder) if folder.named(*photos.SUFFIXES) else {}
    taken = " ".join([chosen.evidence, *chosen.arguments])
    for file in (file for file in aside if file not in taken):
        print(f"not taken: {file} {aside[file]}")
    return chosen


def _contents(folder: Folder, texts: Sequence[str]) -> str:
    """What lies where no format fits: other formats by their `texts`, or what would have one."""
    if texts:
        return "; ".join(filter(None, [f"holds {texts[0]}", unread.explain(folder)]))
    if inner := folder.named(*archives.SUFFIXES):
        path = shlex.quote(folder.full(inner[0]))
        return f"holds another archive, which is not opened: type {_COMMAND} {path}"
    if text := unread.explain(folder):
        return f"holds {_endings(folder)}, and {text}"
    if text := _module("benchmarks.resnet", "recognise").class_folders(folder):
        return f"holds {_endings(folder)}, and {text}"
    if 2 * len(folder.named(*SUFFIXES)) >= len(folder.files) > 0:
        others = [name for name in folder.named(*_LABELS) if not _NOTES.fullmatch(name)]
        lacks = "neither labels nor class folders beside each other"
        if others:
            lacks = f"no class folders beside each other, and no known form in {some(others)}"
        fix = "put the photos of each class into a folder of its name, or labels into COCO's form"
        return f"holds {_endings(folder)}, but {lacks}: {fix}"
    return f"holds {_endings(folder)}, but none of what is understood: {_FORMS}; see docs/data.md"


def _endings(folder: Folder) -> str:
    """The commonest endings of the files, such as "12 .jpg, 1 .json"."""
    names = (os.path.splitext(file.name)[1].lower() or "nameless" for file in folder.files)
    most = collections.Counter(names).most_common(4)
    return ", ".join(f"{number:,} {ending}" for ending, number in most) or "no files"


def _finish(line: str, out: str, args: argparse.Namespace) -> None:
    """Prints the last line of a preparation, what training takes, and the command alone."""
    result, _, command = line.partition(_TRAIN)
    print(result.removesuffix("; "), flush=True)
    if not command:
        return
    State(out).write(_TRAIN_FILE, command)
    words = shlex.split(command)
    if not args.untimed:
        print("measuring a step, up to 4 min; Ctrl-C skips it", flush=True)
        print(pace(words[2:]), flush=True)
    price = ["--mode=preflight", f"--tpu={args.tpu or 'v5e-8'}"]
    if "--config.init_from=" in command:
        price.append("--config.init_from=")  # no download
    if args.tpu:
        subprocess.run([sys.executable, *words[1:], *price])
    else:
        print(f"what it costs on a slice: add {shlex.join(price)} to the last line", flush=True)
    if _is_small(out):
        text = "would more data help: add --mode=scaling to the last line"
        print(f"{text} (as long as two to four runs)", flush=True)
    print(f"{_TRAIN.strip()}\n{command}")


def _is_small(out: str) -> bool:
    """Whether the data manifest counts fewer training examples than a large set has."""
    content = parse_json(data_manifest.read_bytes(out) or b"{}")
    counts = content["splits"]["train"] | content.get("counts", {})
    unit = next(unit for unit in _LARGE if unit in counts)
    return counts[unit] < _LARGE[unit]


def pace(flags: Sequence[str]) -> str:
    """How long a run with these flags of main.py takes on this machine, in a line."""
    command, output = [sys.executable, "-m", "scripts.bench.pace", *flags], b""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE)
        output = done.stdout
        reason = f"not measured: {(done.stderr.decode().strip() or 'no reason').splitlines()[-1]}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        reason = f"compiling and a first step take more than {duration(_PATIENCE)}"
    except KeyboardInterrupt:
        reason = "not measured"
    return [f"on this machine: {reason}", *output.decode().splitlines()][-1]


def main(argv: Sequence[str]) -> None:
    """Runs the preparation that the first argument names, or the one for the path that it is."""
    name, *others = argv or [""]
    if name in ("", "-h", "--help"):
        width = max(map(len, PREPARATIONS))
        print(f"usage: {_COMMAND} PATH [arguments]   makes records of a folder, file or archive")
        print(f"or:    {_COMMAND} download {'|'.join(public_sets.SETS)}")
        print(f"or:    {_COMMAND} NAME [arguments]   makes one of these:\n")
        for each, (_, text) in PREPARATIONS.items():
            print(f"  {each:<{width}}  {text}")
        print(f"\n{_COMMAND} NAME --help lists the arguments of one; docs/data.md explains them.")
        print("python main.py --mode=doctor --full checks a folder of records, see docs/data.md.")
        sys.exit(0 if name else 2)
    # Small blocks, because archives on gs:// are read one image of about 100 KB at a time.
    environment.set_defaults(GCS_READ_CACHE_BLOCK_SIZE_MB="1", TF_CPP_MIN_LOG_LEVEL="3")
    if name in PREPARATIONS:
        run(f"prepare {name}", lambda: print(make(name, others)))
    elif name == "download":
        run("prepare download", lambda: download(others))
    else:
        run("prepare", lambda: prepare_path(argv))


if __name__ == "__main__":
    entry.run(lambda: main(sys.argv[1:]))
