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
import os
import shlex
from collections.abc import Sequence
from typing import Any

from benchmarks.translation.preparation import examples, languages, pairs
from common import cli, pools
from common.preparation import arguments, writing

# The values of configs/transformer.py.
ROW_LENGTH, EVAL_LENGTHS = 256, (32, 64, 128)
# Positions of all training rows: below the first, about 40,000 pairs, batches and model are small;
# from the second on, about a million, the recipe is that of WMT, which has 145 million.
_FEW, _MANY = 1_300_000, 25_600_000
_TINY = 1000  # fewer training pairs are worth a warning
_PUBLISHED = 200_000  # below so many pairs, a published model is a better beginning
_STEPS = 2500  # training steps, in 10 to 100 epochs; small text has twice as many
_LEFT_OUT = {
    "fuzzy": "that are fuzzy or not final",
    "empty": "with an empty side",
    "repeated": "that are repeated",
    "equal": "with equal sides",
    "placeholders": "whose placeholders differ, such as %s or <b>,",
    "tags": "of IWSLT's tags, such as <title>,",
    "ratio": "of a length ratio above --max_ratio={max_ratio}",
    "long": "with more than --max_tokens={max_tokens} tokens on a side",
}


def parse(parser: cli.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments without reading files; exits with status 2 if one is invalid."""
    add, sized = parser.add_argument, cli.integer(1, 10**6)
    utf8: dict[str, Any] = {"type": cli.path, "default": ""}
    files = "files, separated by commas: FILE, FILE.gz or FILE.sgm"
    add("--train_source", **utf8, metavar="FILES", help=files)
    add("--train_target", **utf8, metavar="FILES", help="their translations, in the same order")
    pairs = "files of pairs: .tsv, .csv, .jsonl, each perhaps .gz"
    add("--train", **utf8, metavar="FILES", help=pairs)
    add("--columns", default="", metavar="A,B", help="of source and target, by number or name")
    guess = "(by names, headers and keys; English is the source)"
    add("--source_language", default="", metavar="CODE", help=f"such as en {guess}")
    add("--target_language", default="", metavar="CODE", help="such as de")
    add(
        "--clean",
        action="store_true",
        help="leave out repeated pairs, equal sides, other placeholders",
    )
    ratio = "leave out pairs of which a side has N times the other's characters"
    add("--max_ratio", type=cli.integer(1, 1000), default=0, metavar="N", help=ratio)
    evaluation = "pairs to evaluate on, else some of the training pairs"
    add("--eval", **utf8, metavar="FILES", help=evaluation)
    add("--eval_source", **utf8, metavar="FILES", help="text to evaluate on")
    add("--eval_target", **utf8, metavar="FILES", help="its reference translations")
    arguments.add_out(parser)
    vocabulary = "of tensor2tensor or sentencepiece, or a model of OPUS-MT: folder or hf-hub:NAME"
    add("--vocabulary", **utf8, metavar="FILE", help=vocabulary)
    size = "subwords (32768; below 33 MB of text one for each 1,000 characters)"
    add("--vocabulary_size", type=sized, metavar="N", help=size)
    row = cli.integer(4, 65536)  # as config.row_length
    add("--length", type=row, default=ROW_LENGTH, help="positions of a row (256)")
    add("--max_tokens", type=sized, help="longer training pairs are left out (80)")
    files_of_split = cli.integer(1, arguments.MOST_SHARDS)
    add("--shards", type=files_of_split, metavar="N", help="train files (up to 100, by size)")
    add("--seed", type=cli.integer(0, 2**31 - 1), default=0, help="seed of the order (0)")
    add("--workers", type=cli.integer(1, arguments.MOST_WORKERS), help="processes (one per core)")
    add("--overwrite", action="store_true", help="delete other records in --out first")
    args = parser.parse_args(argv)
    args.max_tokens = args.max_tokens or min(80, args.length)
    args.workers = args.workers or pools.cores()
    if mistake := _mistake(args) or _turn(args):
        parser.error(mistake)
    return args


def _turn(args: argparse.Namespace) -> str:
    """Swaps files of lines whose names say that the language asked for is on the other side.

    Returns what is wrong if they say that it is on neither; else "".
    """
    wanted = args.source_language, args.target_language
    for flags in (("train_source", "train_target"), ("eval_source", "eval_target")):
        paths = [getattr(args, flag) for flag in flags]
        names = [os.path.basename(path.partition(",")[0]) for path in paths]
        for sides in languages.groups(names) if any(wanted) else ():
            chosen = languages.choose([*sides], wanted)
            if not chosen and not {"source", "target"} & {*sides}:
                tags, asked = " and ".join(sides), " to ".join(filter(None, wanted))
                return f"{' and '.join(names)} are {tags} by their names, not {asked}"
            if [sides[tag] for tag in chosen] == names[::-1]:
                vars(args).update(zip(flags, reversed(paths), strict=True))
    return ""


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
    train = content["splits"]["train"]
    is_marian = content["vocabulary"]["kind"] == "marian"
    # The workdir is not the Transformer's.
    if train["examples"] * content["length"] < _MANY and not is_marian:
        keys = arguments.keys(**arguments.fitted(train["pairs"], 64, 12, 2000))
        keys += _eval_lengths(content)
        command = arguments.train_command("small.py:gnmt", args.out, *keys)
        print(f"GNMT, a recurrent translator, trains on the same records: {command}_gnmt")
    return _last_line(args, content)


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the records and their manifest; returns its content."""
    content = examples.make(args, pairs.TextInput(args))
    _report(content, args)
    writing.save_data_manifest(args.out, content)
    return content


def _report(content: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints which pairs were left out, and how full the rows are."""
    train, evaluation = content["splits"]["train"], content["splits"]["eval"]
    vocabulary, length = content["vocabulary"], content["length"]
    print(f"vocabulary: {vocabulary['size']:,} entries ({vocabulary['kind']})")
    for split in ("eval", "train"):
        for reason, count in content["splits"][split]["left_out"].items():
            if count:
                text = _LEFT_OUT[reason].format(**vars(args))
                print(f"{split}: {count:,} pairs {text} were left out")
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


def _last_line(args: argparse.Namespace, content: dict[str, Any]) -> str:
    out, splits = args.out, content["splits"]
    size = sum(split["bytes"] for split in splits.values())
    pairs = [splits[name]["pairs"] for name in ("train", "eval")]
    if content["vocabulary"]["kind"] == "marian":
        model = args.vocabulary.removesuffix("/vocab.json")
        command = _fine_tune_command(model, out, content)
    else:
        if splits["train"]["pairs"] < _PUBLISHED:
            _name_published(out, content)
        recipe, flags = _schedule(splits["train"]["examples"], content["length"])
        command = arguments.train_command(recipe, out, *flags, *_further_flags(content))
    return (
        f"{pairs[0]:,} train and {pairs[1]:,} eval pairs are in {out} ({size / 1e6:,.0f} MB); "
        f"train on them: {command}"
    )


def _name_published(out: str, content: dict[str, Any]) -> None:
    """Prints how to begin with a model of OPUS-MT, if both languages are known."""
    tags = [tag.partition("-")[0] for tag in content["languages"]]
    if not all(tags):
        return
    model, folder = f"hf-hub:Helsinki-NLP/opus-mt-{'-'.join(tags)}", f"{out.rstrip('/')}_opus"
    print(
        f"so few pairs teach more to a model that knows {' and '.join(tags)} (if the hub has "
        f"{model}): prepare them with --vocabulary={model} --out={folder}, then "
        f"{_fine_tune_command(model, folder, content)}"
    )


def _fine_tune_command(model: str, out: str, content: dict[str, Any]) -> str:
    rows = content["splits"]["train"]["examples"]
    keys = [f"--config.init_from={shlex.quote(model)}", *_further_flags(content)]
    keys += [f"--config.train_batch_size={size}"] if (size := _batch(32, rows)) < 32 else []
    return arguments.train_command("finetune.py:opus_mt", out, *keys)


def _batch(most: int, rows: int) -> int:
    """A power of 2 that is at most a quarter of the rows."""
    return 1 << (min(most, rows // 4) or 1).bit_length() - 1


def _further_flags(content: dict[str, Any]) -> list[str]:
    """The flags for rows and evaluation sentences of other lengths than the recipes'."""
    length = content["length"]
    flags = [] if length == ROW_LENGTH else [f"--config.row_length={length}"]
    return flags + _eval_lengths(content)


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
    batch = _batch(positions // length, rows)
    steps = _STEPS * (2 if is_small else 1)
    epochs = min(100, max(10, 10 * round(steps * batch / rows / 10)))
    flags = [] if is_small else ["--config.width=256", "--config.mlp_width=1024"]
    shares = {"train_steps": 1, "warmup_steps": 10, "steps_per_eval": 5, "steps_per_checkpoint": 5}
    flags.append(f"--config.train_batch_size={batch}")
    flags += [f'--config.{key}="{epochs // share} epochs"' for key, share in shares.items()]
    return "small.py:transformer", flags
