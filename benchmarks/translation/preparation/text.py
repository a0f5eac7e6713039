"""Makes TFRecords for translation from parallel text: packed rows for training, in t2t's schema.

    python -m scripts.prepare text --train_source=train.en --train_target=train.de \\
        --eval_source=test.en --eval_target=test.de --out=data/mine
    python -m scripts.prepare text --train=mine.tsv,more.jsonl --clean --max_ratio=9 --out=data/mine

Line i of a target file is the translation of line i of its source file; only "\\n" ends a line. A
file may be a .gz or an .sgm. Files of pairs are tables (.tsv, .csv) and .jsonl. The program builds
a vocabulary of subwords (or takes a file), and packs several pairs into each row. After an
interruption the same command continues. docs/data.md describes the formats.
"""

import argparse
import collections
import contextlib
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.translation.preparation import corpora, languages, shards, sources
from benchmarks.translation.preparation.corpora import Corpus
from common import console, pools
from common.data.shards import tensorflow
from common.errors import UserError
from common.preparation import arguments, writing
from common.preparation.folders import Folder, Reading

# The values of configs/transformer.py.
ROW_LENGTH, EVAL_LENGTHS = 256, (32, 64, 128)
# Positions of all training rows: below the first, about 40,000 pairs, batches and model are small;
# from the second on, about a million, the recipe is that of WMT, which has 145 million.
_FEW, _MANY = 1_300_000, 25_600_000
_TINY = 1000  # fewer training pairs are worth a warning
_STEPS = 2500  # training steps, in 10 to 100 epochs; small text has twice as many
# Ends of the names of lines of text, beside languages; words in the names of evaluation text.
_LINES = ("txt", "text", "tok", "sgm", "src", "tgt", "trg", "source", "target")
_EVAL = {"val", "valid", "validation", "dev", "newsdev", "eval"}, {"test", "newstest", "tst"}
_MOST = 1000  # files of a form that are looked at
_LEFT_OUT = {
    "empty": "with an empty side",
    "repeated": "that are repeated",
    "equal": "with equal sides",
    "ratio": "of a length ratio above --max_ratio={max_ratio}",
    "long": "with more than --max_tokens={max_tokens} tokens on a side",
}


def readings(folder: Folder) -> list[Reading]:
    """The ways to read a folder as parallel text: two files of lines, or files of pairs."""
    # By form: the files of each input, and the names of its source and target.
    inputs: dict[str, dict[tuple[str, ...], Sequence[str]]] = collections.defaultdict(dict)
    errors = UserError, OSError, tensorflow().errors.OpError
    codes, pairs = languages.pairs(file.name for file in folder.files if _is_lines(file.name))
    with contextlib.suppress(*errors):
        if pairs and all(_has_letters(folder.head(name)) for name in pairs[0]):
            inputs["text"] = dict.fromkeys(pairs, codes)
    taken = {name for pair in inputs["text"] for name in pair}
    seen: collections.Counter[str] = collections.Counter()
    for name in (file.name for file in folder.files if file.name not in taken):
        form, _ = corpora.FORMS.get(corpora.ending(name), ("", None))
        seen[form] += 1
        if not form or seen[form] > _MOST:
            continue
        with contextlib.suppress(*errors):
            corpus = Corpus.open(folder.full(name))
            if corpus.has_sentences():
                inputs[form][name,] = corpus.names
    return [_reading(folder, form, inputs[form]) for form in inputs if inputs[form]]


def _reading(folder: Folder, form: str, inputs: Mapping[tuple[str, ...], Sequence[str]]) -> Reading:
    """The reading of the files of a form; their names say which are for evaluation."""
    sides = collections.Counter(inputs.values()).most_common(1)[0][0]
    rows = [row for row in inputs if inputs[row] == sides]
    words = {row: {*re.findall(r"[a-z]+", row[0].lower())} for row in rows}
    parts = [[row for row in rows if words[row] & names] for names in _EVAL]
    train = [row for row in rows if not words[row] & (_EVAL[0] | _EVAL[1])]
    evaluation = (parts[0] or parts[1]) if train else []
    train = train or rows
    flags, ends = [], ("_source", "_target") if form == "text" else ("",)
    for name, part in (("train", train), ("eval", evaluation)):
        for i, end in enumerate(ends if part else ()):
            flags.append(f"--{name}{end}=" + ",".join(folder.full(row[i]) for row in part))
    flags += ["--clean", "--max_ratio=9"]  # the ratio of Moses' clean-corpus-n
    sizes = {file.name: file.size for file in folder.files}
    size = sum(sizes[name] for row in train for name in row)
    number = f"{len(train) * len(train[0]):,} files, such as " if len(train) > 1 else ""
    how = "text" if sides[0].startswith("column ") else "names"
    about = (
        f"{number}{' and '.join(train[0])}, {size:,} bytes: "
        f"{sides[0]} and {sides[1]} by their {how}"
    )
    text = ", ".join(row[0] for row in evaluation[:3]) or "a part of the training pairs"
    turn = f" (--source_language={sides[1]} turns it)" if languages.code(sides[1]) else ""
    makes = f"packed rows, {sides[0]} to {sides[1]}{turn}; evaluation on {text}"
    if aside := [row[0] for row in inputs if row not in {*train, *evaluation}]:
        makes += f"; not used: {', '.join(aside[:3])}{' ...' * (len(aside) > 3)}"
    return Reading("text", form, about, makes, flags, sum(map(len, rows)))


def _is_lines(name: str) -> bool:
    end = os.path.splitext(name.lower().removesuffix(".gz"))[1][1:]
    return end in _LINES or bool(languages.code(end))


def _has_letters(head: bytes) -> bool:
    """Whether most of the first lines hold text: labels are numbers."""
    if head[:2] == b"\x1f\x8b":
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(31).decompress(head)
    return corpora.are_mostly(head.decode(errors="replace").splitlines()[:50], corpora.LETTER)


def parse(parser: console.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments without reading files; exits with status 2 if one is invalid."""
    add, sized = parser.add_argument, console.integer(1, 10**6)
    utf8: dict[str, Any] = {"type": console.path, "default": ""}
    files = "files, separated by commas: FILE, FILE.gz or FILE.sgm"
    add("--train_source", **utf8, metavar="FILES", help=files)
    add("--train_target", **utf8, metavar="FILES", help="their translations, in the same order")
    pairs = "files of pairs: .tsv, .csv, .jsonl, each perhaps .gz"
    add("--train", **utf8, metavar="FILES", help=pairs)
    add(
        "--columns",
        default="",
        metavar="A,B",
        help="columns of source and target, by number or name",
    )
    guess = "(by names, headers and keys; English is the source)"
    add("--source_language", default="", metavar="CODE", help=f"such as en {guess}")
    add("--target_language", default="", metavar="CODE", help="such as de")
    add("--clean", action="store_true", help="leave out repeated pairs and pairs with equal sides")
    ratio = "leave out pairs of which a side has N times the other's characters"
    add("--max_ratio", type=console.integer(1, 1000), default=0, metavar="N", help=ratio)
    evaluation = "pairs to evaluate on, else some of the training pairs"
    add("--eval", **utf8, metavar="FILES", help=evaluation)
    add("--eval_source", **utf8, metavar="FILES", help="text to evaluate on")
    add("--eval_target", **utf8, metavar="FILES", help="its reference translations")
    arguments.add_out(parser)
    add(
        "--vocabulary",
        **utf8,
        metavar="FILE",
        help="of tensor2tensor (vocab.*.subwords) or sentencepiece",
    )
    size = "subwords (32768; below 33 MB of text one for each 1,000 characters)"
    add("--vocabulary_size", type=sized, metavar="N", help=size)
    row = console.integer(4, 65536)  # as config.row_length
    add("--length", type=row, default=ROW_LENGTH, help="positions of a row (256)")
    add("--max_tokens", type=sized, help="longer training pairs are left out (80)")
    files_of_split = console.integer(1, console.MOST_SHARDS)
    add("--shards", type=files_of_split, metavar="N", help="train files (up to 100, by size)")
    add("--seed", type=console.integer(0, 2**31 - 1), default=0, help="seed of the order (0)")
    add("--workers", type=console.integer(1, console.MOST_WORKERS), help="processes (one per core)")
    add("--overwrite", action="store_true", help="delete other records in --out first")
    args = parser.parse_args(argv)
    args.max_tokens = args.max_tokens or min(80, args.length)
    args.workers = args.workers or pools.cores()
    if mistake := _mistake(args):
        parser.error(mistake)
    _turn(args)
    return args


def _turn(args: argparse.Namespace) -> None:
    """Swaps files of lines whose names say that the language asked for is on the other side."""
    wanted = languages.code(args.source_language), languages.code(args.target_language)
    for flags in (("train_source", "train_target"), ("eval_source", "eval_target")):
        paths = [getattr(args, flag) for flag in flags]
        names = [os.path.basename(path.partition(",")[0]) for path in paths]
        codes, pairs = languages.pairs(names)
        sides = dict(zip(pairs[0], codes, strict=True)) if pairs else {}
        if sides and (sides[names[1]] == wanted[0] or sides[names[0]] == wanted[1]):
            vars(args).update(zip(flags, reversed(paths), strict=True))


def _mistake(args: argparse.Namespace) -> str:
    """What is wrong with the arguments together; "" if nothing is."""
    if args.max_tokens > args.length:
        return f"--max_tokens={args.max_tokens} must not exceed --length={args.length}"
    for split in ("train", "eval"):
        lists = [getattr(args, f"{split}_{side}") for side in ("source", "target")]
        numbers = [len([p for p in paths.split(",") if p]) for paths in lists]
        if numbers[0] != numbers[1]:
            return f"--{split}_source has {numbers[0]} files and --{split}_target {numbers[1]}"
    if args.columns and len([name for name in args.columns.split(",") if name]) != 2:
        return f"--columns={args.columns} must be two, of the source and the target"
    if not (args.train_source or args.train):
        return "give --train, or --train_source and --train_target"
    return ""


def prepare(args: argparse.Namespace) -> str:
    """Prepares the records; returns the last line to print."""
    content = make(args)
    if gnmt := _gnmt_command(args.out, content):
        print(f"GNMT, a recurrent translator, trains on the same records: {gnmt}")
    return _last_line(args.out, content)


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the records and their manifest; returns its content."""
    content = shards.make(args, sources.TextInput(args))
    _report(content, args)
    writing.save_manifest(args.out, content)
    return content


def _report(content: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints which pairs were left out, and how full the rows are."""
    train, evaluation = content["splits"]["train"], content["splits"]["eval"]
    vocabulary, length = content["vocabulary"], content["length"]
    print(f"vocabulary: {vocabulary['size']:,} entries ({vocabulary['kind']})")
    if empty := evaluation["left_out"]["empty"]:
        print(f"eval: {empty:,} pairs with an empty side were left out")
    for reason, count in train["left_out"].items():
        if count:
            print(f"train: {count:,} pairs {_LEFT_OUT[reason].format(**vars(args))} were left out")
    if (longest := evaluation["longest_inputs"]) > EVAL_LENGTHS[-1]:
        print(
            f"warning: an evaluation sentence has {longest:,} tokens, and the config allows "
            f"{EVAL_LENGTHS[-1]}: the command below sets config.eval_lengths"
        )
    if train["pairs"] < _TINY:
        print(f"warning: {train['pairs']:,} pairs teach a model little: take {_TINY:,} or more")
    shares = [tokens / (train["examples"] * length) for tokens in train["tokens"]]
    print(
        f"train: {train['pairs']:,} pairs in {train['examples']:,} rows of {length}, "
        f"{train['pairs'] / train['examples']:.1f} in a row; {sum(shares) / 2:.1%} of the "
        f"positions are used (sources {shares[0]:.1%}, targets {shares[1]:.1%})"
    )


def _last_line(out: str, content: dict[str, Any]) -> str:
    splits = content["splits"]
    size = sum(split["bytes"] for split in splits.values())
    pairs = [splits[name]["pairs"] for name in ("train", "eval")]
    recipe, flags = _schedule(splits["train"]["examples"], content["length"])
    if content["length"] != ROW_LENGTH:
        flags.append(f"--config.row_length={content['length']}")
    flags += _eval_lengths(content)
    return (
        f"{pairs[0]:,} train and {pairs[1]:,} eval pairs are in {out} ({size / 1e6:,.0f} MB); "
        f"train on them: {arguments.train_command(recipe, out, *flags)}"
    )


def _gnmt_command(out: str, content: dict[str, Any]) -> str:
    """The command that trains a GNMT on the same records; "" if the text is large."""
    train = content["splits"]["train"]
    if train["examples"] * content["length"] >= _MANY:
        return ""
    flags = arguments.keys(**arguments.fitted(train["pairs"], 64, 12, 2000))
    command = arguments.train_command("small.py:gnmt", out, *flags, *_eval_lengths(content))
    return f"{command}_gnmt"  # another workdir


def _eval_lengths(content: dict[str, Any]) -> list[str]:
    """The flag for evaluation sentences that are longer than the recipes expect."""
    longest = content["splits"]["eval"]["longest_inputs"]
    lengths = ",".join(map(str, (*EVAL_LENGTHS, longest)))
    return [f"--config.eval_lengths={lengths}"] if longest > EVAL_LENGTHS[-1] else []


def _schedule(rows: int, length: int) -> tuple[str, list[str]]:
    """The recipe for so many rows, and the flags with batch, epochs and warm-up that fit."""
    if rows * length >= _MANY:
        return "transformer", []
    is_small = rows * length < _FEW
    positions = 4096 if is_small else 16384
    batch = 1 << (min(positions // length, rows // 4) or 1).bit_length() - 1
    steps = _STEPS * (2 if is_small else 1)
    epochs = min(100, max(10, 10 * round(steps * batch / rows / 10)))
    flags = [] if is_small else ["--config.width=256", "--config.mlp_width=1024"]
    shares = {"train_steps": 1, "warmup_steps": 10, "steps_per_eval": 5, "steps_per_checkpoint": 5}
    flags.append(f"--config.train_batch_size={batch}")
    flags += [f'--config.{key}="{epochs // share} epochs"' for key, share in shares.items()]
    return "small.py:transformer", flags
