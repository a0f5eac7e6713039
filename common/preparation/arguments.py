"""Arguments that several preparations have, and the command that trains on their result."""

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from typing import Any

from common import cli, pools

MOST_SHARDS = 99_999  # files of a split: their names have five digits
MOST_WORKERS = 4096

FEW = 20_000  # training images: fewer are fine-tuned


def add_out(parser: cli.Parser) -> None:
    """Adds --out."""
    about = "folder for the records, local or gs://bucket/folder"
    parser.add_argument("--out", required=True, type=cli.path, help=about)


def parse_out(parser: cli.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a preparation that has --out and no other."""
    add_out(parser)
    return parser.parse_args(argv)


def parse_images(
    parser: cli.Parser,
    argv: Sequence[str],
    shards: dict[str, str],
    quality: str,
    flags: Sequence[str],
) -> argparse.Namespace:
    """Adds the arguments that preparations of images share, and parses all.

    `shards` has the help of each argument for a number of files; `quality` says the usual quality.
    An output folder inside one of the inputs, the values of `flags`, is refused.
    """
    add = parser.add_argument
    add_out(parser)
    add("--seed", type=cli.integer(0), default=0, help="of the order and the splits (0)")
    for flag, usual in shards.items():
        add(f"--{flag}", type=cli.integer(1, MOST_SHARDS), metavar="N", help=usual)
    add("--quality", type=cli.integer(1, 100), help=f"of re-encoded JPEGs ({quality})")
    threads = "threads (one per core; 8 each if the input is gs://)"
    add("--workers", type=cli.integer(1, MOST_WORKERS), help=threads)
    add("--overwrite", action="store_true", help="delete other records in --out first")
    args = parser.parse_args(argv)
    inputs = {flag: getattr(args, flag) for flag in flags if getattr(args, flag)}
    for flag, path in inputs.items():
        if f"{args.out.rstrip('/')}/".startswith(f"{path.rstrip('/')}/"):
            parser.error(f"--out must not be in --{flag}: {args.out}")
    args.workers = args.workers or pools.threads(*inputs.values())
    return args


def fitted(examples: int, largest: int, epochs: int, least: int) -> dict[str, Any]:
    """The keys of the config with the batch and the schedule that fit a small set.

    The batch is a power of two, about an eighth of the set: at least 8, which divides among the
    devices of most machines, at most `largest`, and no more than the set has. The steps are
    `epochs` epochs, but no fewer than `least`; a tenth of them are the warm-up.
    """

    def log2(number: int) -> int:
        return max(number, 1).bit_length() - 1

    batch = min(largest, 1 << min(max(3, log2(examples // 8)), log2(examples)))
    steps = max(least, math.ceil(epochs * examples / batch))
    return {
        "train_batch_size": batch,
        "eval_batch_size": batch,
        "train_steps": steps,
        "warmup_steps": steps // 10,
        "steps_per_eval": steps // 10,
        "steps_per_checkpoint": steps // 10,
    }


def keys(**values: Any) -> list[str]:
    """Keys of the config as they are typed."""
    return [f"--config.{key}={shlex.quote(str(value))}" for key, value in values.items()]


def train_command(recipe: str, out: str, *flags: str) -> str:
    """The command that trains a recipe, 'ssd' or 'small.py:ssd', on the records in a folder."""
    words = [
        f"python main.py --config=configs/{recipe if '.py:' in recipe else f'{recipe}.py'}",
        f"--config.data_dir={shlex.quote(out)}",
        *flags,
        f"--workdir={shlex.quote('runs/' + (os.path.basename(out.rstrip('/')) or 'own'))}",
    ]
    return " ".join(words)
