"""Writes scikit-learn's handwritten digits in the ImageNet TFRecord schema: the quickstart's data.

    python -m scripts.prepare digits --out data/digits
    python -m scripts.prepare digits --out data/digits_5-9 --digits=5-9 --per_class=20

1,797 grey images, 8x8 in 17 shades, become RGB JPEGs of 32x32: 1,437 for training in 8 shards, 360
for validation in 2, with the same share of each digit in both. The images come with scikit-learn,
so the program needs no network. It does not write to a folder that already holds all of them.
--digits takes some of the digits, which become the first labels, and --per_class the first training
images of each: a small task for fine-tuning. OUT_photos gets a held-out picture of each class.
"""

import argparse
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.resnet.preparation.examples import tf_example
from common import cli
from common.data import records, storage
from common.errors import UserError
from common.preparation import arguments, writing
from common.preparation.sklearn_digits import add_choice, load
from common.tensorflow import tensorflow

SIZE = 32  # pixels, height and width
SHARDS = {"train": 8, "validation": 2}
_USUAL_BATCH = 64  # of configs/digits.py


def examples(chosen: range = range(10), per_class: int = 0) -> dict[str, list[bytes]]:
    """Returns both shuffled splits: {'train': 1,437 serialized examples, 'validation': 360}.

    They have the `chosen` digits, of which the first has the label 1, and of each digit the first
    `per_class` training images; 0: all.
    """
    images, digits, rows = load()
    rows = {split: numbers[np.isin(digits[numbers], chosen)] for split, numbers in rows.items()}
    if per_class:
        train = rows["train"]
        first = [train[digits[train] == digit][:per_class] for digit in chosen]
        rows["train"] = train[np.isin(train, np.concatenate(first))]

    def serialize(i: int) -> bytes:
        digit, jpeg = int(digits[i]), io.BytesIO()
        _picture(images[i], SIZE).save(jpeg, "JPEG", quality=95)
        name, label = f"digit_{digit}_{i:04d}.JPEG", digit - chosen.start + 1
        return tf_example(jpeg.getvalue(), label, f"digit_{digit}", name, (SIZE, SIZE))

    return {split: list(map(serialize, numbers)) for split, numbers in rows.items()}


def _picture(image: np.ndarray, side: int) -> Image.Image:
    grey = Image.fromarray(np.round(image * (255 / 16)).astype(np.uint8))
    return grey.resize((side, side), Image.Resampling.BICUBIC).convert("RGB")


def write_photos(folder: str, chosen: range = range(10)) -> None:
    """Writes the first held-out digit of each class to FOLDER/DIGIT_NUMBER.png."""
    images, digits, rows = load()
    for digit in chosen:
        i, png = next(i for i in rows["validation"] if digits[i] == digit), io.BytesIO()
        _picture(images[i], 8 * SIZE).save(png, "PNG")
        storage.write(os.path.join(folder, f"{digit}_{i:04d}.png"), [png.getvalue()])


def make(out: str, splits: dict[str, list[bytes]]) -> bool:
    """Writes the shards of `examples` that the folder does not have; returns if it lacked any.

    UserError if the folder holds shards of other images.
    """
    expected = {
        records.shard_name(split, i, count): b"".join(
            map(records.frame, splits[split][run.start : run.stop])
        )
        for split, count in SHARDS.items()
        for i, run in enumerate(records.shard_runs(len(splits[split]), count))
    }
    existing = {}
    for name in records.existing_shards(out):
        path = os.path.join(out, name)
        existing[name] = storage.read(path) or b"" if name in expected else b""
        if b"digit_" not in existing[name]:  # the name of each class
            raise UserError(f"{path} holds other images; choose another --out, or empty the folder")
    records.remove_unfinished(out)
    for name in existing:  # first of all: a mixture of two sets would look complete
        if existing[name] != expected.get(name):
            tensorflow().io.gfile.remove(os.path.join(out, name))
    for name, data in expected.items():
        writing.save(out, name, data)
    return existing != expected


def parse(parser: cli.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments; exits with status 2 if one is invalid."""
    arguments.add_out(parser)
    add_choice(parser)
    per_class = cli.integer(2, 100)
    parser.add_argument("--per_class", type=per_class, default=0, help="train images of each (all)")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> str:
    """Writes the digits that are missing; returns the last line to print."""
    print(f"handwritten digits into {args.out}, about 15 s", flush=True)
    splits = examples(args.digits, args.per_class)
    write_photos(f"{args.out.rstrip('/')}_photos", args.digits)
    state = "wrote" if make(args.out, splits) else "already complete:"
    train, validation = len(splits["train"]), len(splits["validation"])
    keys: dict[str, Any] = {"num_label_classes": len(args.digits)}
    if train < 8 * _USUAL_BATCH:
        keys |= arguments.fitted(train, _USUAL_BATCH, epochs=15, least=100)
    return (
        f"{state} {train:,} train images in {SHARDS['train']} shards, "
        f"{validation:,} validation images in {SHARDS['validation']}; train on them: "
        f"{arguments.train_command('digits', args.out, *arguments.keys(**keys))}"
    )
