"""Writes random images in the ImageNet TFRecord schema, for trials without ImageNet.

    python -m scripts.prepare fake --out data/fake --images 10000 --shards 16

The files resemble ImageNet's: JPEGs of varied sizes, landscape and portrait, about 100 KB each at
the default size. Labels are random, too, so a model cannot learn them. The same arguments give the
same files.
"""

import argparse
import io
import os
import re
import shlex
import sys
import threading
import time

import numpy as np
from PIL import Image

from ops import console, records
from ops.preparation import schema
from ops.shards import tensorflow


class FakeImages:
    """A split of random examples, made on demand; each is a function of (seed, split, i)."""

    def __init__(self, split: str, num: int, size: tuple[int, int], classes: int, seed: int):
        """`size` is the typical (height, width) in pixels; both vary by up to a third."""
        self.split, self.num, self.size, self.classes, self.seed = split, num, size, classes, seed
        self.bytes = 0  # of the examples made so far
        self._made = 0
        self._lock = threading.Lock()
        self._started = self._reported = time.monotonic()

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> bytes:
        rng = np.random.default_rng((self.seed, records.SPLITS.index(self.split), i))
        height, width = (max(1, round(s * rng.uniform(2 / 3, 4 / 3))) for s in self.size)
        if rng.uniform() < 0.25:
            height, width = width, height
        label = int(rng.integers(1, self.classes + 1))
        example = schema.example(
            self._jpeg(rng, height, width),
            label,
            f"n{label:08d}",
            f"fake_{self.split}_{i:08d}.JPEG",
            height,
            width,
        )
        self._progress(len(example))
        return example

    def _jpeg(self, rng: np.random.Generator, height: int, width: int) -> bytes:
        # Soft colours under fine noise have the size of a photograph. Pure noise has three times
        # the size and decodes more slowly; plain colours have a tenth of the size.
        soft = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
        soft = soft.resize((width, height), Image.Resampling.BICUBIC)
        noise = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        out = io.BytesIO()
        Image.blend(soft, noise, 0.25).save(out, "JPEG", quality=90)
        return out.getvalue()

    def _progress(self, size: int) -> None:
        with self._lock:
            self._made += 1
            self.bytes += size
            now = time.monotonic()
            if now - self._reported < 5:
                return
            self._reported = now
            left = (now - self._started) / self._made * (self.num - self._made)
            print(
                f"{self.split}: {self._made:,} of {self.num:,} images "
                f"({self._made / self.num:.0%}), about {left:.0f} s left",
                flush=True,
            )


def height_width(text: str) -> tuple[int, int]:
    """'375x500' -> (375, 500); at most 40,000, because JPEG ends at 65,535 and sizes vary."""
    parts = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    size = tuple(map(int, parts.groups())) if parts else (0, 0)
    if not all(2 <= s <= 40_000 for s in size):
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH such as 375x500, got '{text}'")
    return size[0], size[1]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the arguments; exits with status 2 and one line if one is invalid."""
    parser = console.Parser(prog="make_fake_imagenet", description=console.summary(__doc__))
    add, positive = parser.add_argument, console.whole(1)
    add("--out", required=True, help="folder, local or gs://bucket/folder")
    add("--images", type=positive, default=1024, metavar="N", help="train images (1024)")
    add("--shards", type=positive, default=8, metavar="M", help="train files (8)")
    add("--validation_images", type=positive, default=256, metavar="N", help="(256)")
    add("--validation_shards", type=positive, default=2, metavar="M", help="(2)")
    add("--classes", type=positive, default=1000, help="labels are 1..CLASSES (1000)")
    add("--seed", type=console.whole(0), default=0, help="another seed, other images (0)")
    add("--size", type=height_width, default=(375, 500), metavar="HxW", help="typical (375x500)")
    add("--overwrite", action="store_true", help="delete the train and validation shards in --out")
    args = parser.parse_args(argv)
    for images, shards in (("images", "shards"), ("validation_images", "validation_shards")):
        n, m = getattr(args, images), getattr(args, shards)
        if m > n:
            parser.error(f"argument --{shards}: {m} files cannot be filled with {n} --{images}")
    return args


def write(args: argparse.Namespace) -> str:
    """Writes both splits; returns the last line to print. Exits if the folder holds shards."""
    print("make_fake_imagenet: starting TensorFlow, up to 10 s", flush=True)
    old = records.existing_shards(args.out)
    if old and not args.overwrite:
        sys.exit(
            f"make_fake_imagenet: {args.out} already holds {len(old)} shards ({old[0]} ...); "
            "choose another --out, or add --overwrite to delete them"
        )
    if args.overwrite:
        records.remove_shards(args.out)
    started, size = time.monotonic(), 0
    counts = ((args.images, args.shards), (args.validation_images, args.validation_shards))
    for split, (num, shards) in zip(records.SPLITS, counts, strict=True):
        images = FakeImages(split, num, args.size, args.classes, args.seed)
        print(f"{split}: {num:,} images in {shards:,} shards into {args.out}", flush=True)
        records.write_shards(args.out, split, images, shards, workers=os.cpu_count() or 1)
        size += images.bytes
    command = (
        f"python main.py --config=configs/resnet50.py --config.data_dir={shlex.quote(args.out)} "
        "--workdir=runs/fake"
    )
    return (
        f"wrote {args.images:,} train and {args.validation_images:,} validation images "
        f"({size / 1e6:,.0f} MB, {time.monotonic() - started:.0f} s); train on them: {command}"
    )


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    args = parse(argv)
    try:
        print(write(args))
    except KeyboardInterrupt:
        print(f"make_fake_imagenet: stopped; {args.out} is incomplete", file=sys.stderr)
        sys.exit(130)
    except (OSError, tensorflow().errors.OpError) as error:
        sys.exit(f"make_fake_imagenet: cannot write {args.out}: {error}")
