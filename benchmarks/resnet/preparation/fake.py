"""Writes random images in the ImageNet TFRecord schema, for trials without ImageNet.

    python -m scripts.prepare fake --out data/fake --images 10000 --shards 16

The files resemble ImageNet's: JPEGs of varied sizes, landscape and portrait, about 100 KB each at
the default size. Labels are random, too, so a model cannot learn them. The same arguments give the
same files. After an interruption the same command continues.
"""

import argparse
import functools
import io
import time
from collections.abc import Sequence

import numpy as np
from PIL import Image

from common import console, pools
from common.data import records
from common.preparation import arguments, schema, writing


def _example(args: argparse.Namespace, split: str, i: int) -> writing.Example:
    """The i-th image of a split, a function of (seed, split, i)."""
    draw = np.random.default_rng((args.seed, records.SPLITS.index(split), i))
    height, width = (max(1, round(s * draw.uniform(2 / 3, 4 / 3))) for s in args.size)
    if draw.uniform() < 0.25:
        height, width = width, height
    label = int(draw.integers(1, args.classes + 1))
    # Soft colours under fine noise have the size of a photograph. Pure noise has three times the
    # size and decodes more slowly; plain colours have a tenth of the size.
    soft = Image.fromarray(draw.integers(0, 256, (6, 8, 3), np.uint8))
    soft = soft.resize((width, height), Image.Resampling.BICUBIC)
    noise = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
    jpeg, name = io.BytesIO(), f"fake_{split}_{i:08d}.JPEG"
    Image.blend(soft, noise, 0.25).save(jpeg, "JPEG", quality=90)
    size = height, width
    return schema.example(jpeg.getvalue(), label, f"n{label:08d}", name, size), (label,), {}


def height_width(text: str) -> tuple[int, int]:
    """'375x500' -> (375, 500); at most 40,000, because JPEG ends at 65,535 and sizes vary."""
    height, _, width = text.partition("x")
    if not all(side.isdecimal() and 2 <= int(side) <= 40_000 for side in (height, width)):
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH such as 375x500, got '{text}'")
    return int(height), int(width)


def parse(parser: console.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments."""
    add, images = parser.add_argument, console.integer(1, 10**9)
    shards, classes = console.integer(1, console.MOST_SHARDS), console.integer(1, 10**7)
    arguments.add_out(parser)
    add("--images", type=images, default=1024, metavar="N", help="train images (1024)")
    add("--shards", type=shards, default=8, metavar="M", help="train files (8)")
    add("--validation_images", type=images, default=256, metavar="N", help="images (256)")
    add("--validation_shards", type=shards, default=2, metavar="M", help="files (2)")
    add("--classes", type=classes, default=1000, help="labels are 1..CLASSES (1000)")
    add("--seed", type=console.integer(0), default=0, help="another seed, other images (0)")
    typical = "typical size (375x500)"
    add("--size", type=height_width, default=(375, 500), metavar="HxW", help=typical)
    add("--overwrite", action="store_true", help="delete other records in --out first")
    args = parser.parse_args(argv)
    for images, shards in (("images", "shards"), ("validation_images", "validation_shards")):
        n, m = getattr(args, images), getattr(args, shards)
        if m > n:
            parser.error(f"argument --{shards}: {m} files cannot be filled with {n} --{images}")
    return args


def prepare(args: argparse.Namespace) -> str:
    """Writes the missing files of both splits; returns the last line to print."""
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "overwrite")}
    plan = {"settings": settings | {"size": [*args.size]}, "input": {}}
    writing.State(args.out).claim(plan, args.overwrite)
    started = time.monotonic()
    sizes = (args.images, args.shards), (args.validation_images, args.validation_shards)
    splits: dict[str, tuple[int, int]] = dict(zip(records.SPLITS, sizes, strict=True))
    for split, (number, shards) in splits.items():
        print(f"{split}: {number:,} images in {shards:,} shards into {args.out}", flush=True)
    results = writing.write(args.out, splits, functools.partial(_example, args), pools.cores())
    head = {"format": 1, "num_label_classes": args.classes, "settings": plan["settings"]}
    rows = {i: {"label": i, "name": f"n{i:08d}"} for i in range(1, args.classes + 1)}
    writing.save_manifest(args.out, writing.manifest(head, rows, results))
    size = sum(row["bytes"] for row in results)
    return (
        f"wrote {args.images:,} train and {args.validation_images:,} validation images "
        f"({size / 1e6:,.0f} MB, {time.monotonic() - started:.0f} s); train on them: "
        f"{arguments.train_command('resnet50', args.out)}"
    )
