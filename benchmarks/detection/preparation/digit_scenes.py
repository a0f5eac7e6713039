"""Makes images of handwritten digits over clutter, in COCO's form, and records of them.

    python -m scripts.prepare digit_scenes --out=data/digit_scenes
    python -m scripts.prepare digit_scenes --out=data/scenes_5-9 --digits=5-9 --train_images=60

6,000 images for training and 300 for validation, with 1 to 6 digits each, come from scikit-learn's
1,797 handwritten digits, without a network. Two of three images are 128 pixels high and 160 wide,
the others 160 high and 128 wide. Validation shows digits that training never sees, by the
split of `common.preparation.sklearn_digits`. OUT/coco holds images and annotations in COCO's form:
boxes, run-length masks, category ids with gaps; `coco` makes the records, with masks. The same
versions of NumPy and Pillow give the same bytes. --digits draws these digits only, which are then
the only categories, and --train_images makes another number of training images: a small task for
fine-tuning.
"""

import argparse
import io
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.detection import coco as outlines
from benchmarks.detection.preparation import coco
from common import cli
from common.data import storage
from common.preparation import arguments, sklearn_digits, writing
from common.progress import ProgressBar

COUNTS = {"train": 6000, "val": 300}
SIZES = ((128, 160), (128, 160), (160, 128))  # height, width; image i has number i modulo 3
CATEGORY_IDS = range(3, 83, 8)  # of the digits 0 to 9
_INFO = {"description": "handwritten digits over clutter", "version": "3"}
_SIDES = (32, 64)  # heights of digits in pixels
_INK = 0.5  # a pixel with so much ink belongs to the digit
_TRIES = 20  # places for a digit


def scene(
    split: str, i: int, inks: list[np.ndarray], classes: np.ndarray
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The pixels f32[height, width, 3] of the i-th image of a split, and its objects as COCO's.

    `inks` are the digits of the split, as `ink` returns them, and `classes` int[n] which digit each
    is.
    """
    draw, size = np.random.default_rng((list(COUNTS).index(split), i)), SIZES[i % len(SIZES)]
    pixels, taken, objects = _clutter(draw, size), np.zeros(size, bool), []
    for row in draw.integers(0, len(inks), draw.integers(1, 7)):
        tile = _enlarge(inks[row], draw.uniform(*_SIDES))
        for y, x in draw.integers(0, np.subtract(size, tile.shape) + 1, (_TRIES, 2)):
            window = np.s_[y : y + tile.shape[0], x : x + tile.shape[1]]
            if not taken[window].any():
                low = 0 if pixels[window].mean() > 127 else 175  # a colour that stands out
                colour = draw.uniform(low, low + 80, 3)
                pixels[window] += tile[..., None] * (colour - pixels[window])
                inside = np.zeros(size, bool)
                inside[window] = tile >= _INK
                taken[window] = True
                objects.append(_annotation(inside, CATEGORY_IDS[classes[row]]))
                break
    return pixels, objects


def _annotation(inside: np.ndarray, category: int) -> dict[str, Any]:
    """The object that covers bool[height, width], as COCO describes it."""
    rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
    edges = (columns[0], rows[0], columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0])
    return {
        "category_id": category,
        "bbox": [float(edge) for edge in edges],
        "area": float(inside.sum()),
        "iscrowd": 0,
        "segmentation": outlines.mask_outline(inside),
    }


def _clutter(draw: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """A background float32[*size, 3] of 0..255: large and small coloured clouds, and noise."""
    pixels = 40 + 6 * draw.standard_normal((*size, 1), np.float32)
    for cells in (6, 24):
        grid = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), np.uint8))
        clouds = grid.resize((size[1], size[0]), Image.Resampling.BICUBIC)
        pixels = pixels + np.asarray(clouds, np.float32) / 3
    return pixels


def ink(image: np.ndarray) -> np.ndarray:
    """A digit of f64[8, 8] as float32[h, w] of 0..1, cut to the part with ink."""
    share = (image / 16).astype(np.float32)
    rows, columns = (np.flatnonzero((share > 0.1).any(axis)) for axis in (1, 0))
    return share[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _enlarge(ink: np.ndarray, height: float) -> np.ndarray:
    """A digit of `height` pixels."""
    size = round(height * ink.shape[1] / ink.shape[0]), round(height)
    large = Image.fromarray(ink).resize(size, Image.Resampling.BICUBIC)
    # Much steeper than linear: the edge is sharp, and faint ink outside of the box is not seen.
    return ((np.asarray(large) - _INK) * 10 + _INK).clip(0, 1)


def write_coco(folder: str, counts: dict[str, int], info: dict[str, Any], chosen: range) -> None:
    """Writes the images to FOLDER/train and FOLDER/val, and then FOLDER/instances_*.json."""
    images, classes, rows = sklearn_digits.load()
    progress = ProgressBar("drawing", sum(counts.values()))
    for split, count in counts.items():
        of_split = rows["train" if split == "train" else "validation"]
        of_split = of_split[np.isin(classes[of_split], chosen)]
        inks, drawn, annotations = [ink(images[row]) for row in of_split], [], []
        for i in range(count):
            pixels, objects = scene(split, i, inks, classes[of_split])
            jpeg, number = io.BytesIO(), 139 + 37 * i  # with gaps, as COCO's
            picture = Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8))
            picture.save(jpeg, "JPEG", quality=90)
            name, (height, width, _) = f"{number:012d}.jpg", pixels.shape
            storage.write(os.path.join(folder, split, name), [jpeg.getvalue()])
            drawn.append({"id": number, "file_name": name, "height": height, "width": width})
            for one in objects:
                annotations.append({"id": len(annotations) + 1, "image_id": number, **one})
            progress.add()
        categories = [
            {"id": CATEGORY_IDS[digit], "name": str(digit), "supercategory": "digit"}
            for digit in chosen
        ]
        content = {"info": info, "images": drawn}
        content |= {"categories": categories, "annotations": annotations}
        path = os.path.join(folder, f"instances_{split}.json")
        storage.write(path, [json.dumps(content).encode()])
    progress.close()


def parse(parser: cli.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments; exits with status 2 if one is invalid."""
    arguments.add_out(parser)
    sklearn_digits.add_choice(parser)
    about = f"training images ({COUNTS['train']:,})"
    number = cli.integer(1, 100_000)
    parser.add_argument("--train_images", type=number, default=0, metavar="N", help=about)
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> str:
    """Makes the images that are missing, and their records; returns the last line to print."""
    out, folder = args.out, os.path.join(args.out, "coco")
    counts = COUNTS | {"train": args.train_images or COUNTS["train"]}
    info = _INFO | {"digits": [*args.digits], "train_images": counts["train"]}
    keys: dict[str, Any] = {"num_classes": len(args.digits)}
    if counts["train"] < COUNTS["train"] // 2:
        keys |= arguments.fitted(counts["train"], largest=8, epochs=10, least=200)
    state = (
        f"{counts['train']:,} train and {counts['val']:,} val images are in {out}; train on them: "
        f"{arguments.train_command('ssd_digits', out, *arguments.keys(**keys))}"
    )
    start = json.dumps({"info": info})[:-1].encode()
    scored = storage.read(os.path.join(out, coco.SCORED)) or b""
    if scored.startswith(start) and writing.is_complete(out):
        return f"already complete: {state}"
    train = storage.read(os.path.join(folder, "instances_train.json")) or b""
    writing.State(out).refuse_others(train.startswith(start[:50]))  # any version, any digits
    print(f"{sum(counts.values()):,} images of digits into {out}, up to 40 s", flush=True)
    write_coco(folder, counts, info, args.digits)
    flags = ["--masks", f"--out={out}", "--overwrite"]
    for split in counts:
        flags.append(f"--{split}_images={folder}/{split}")
        flags.append(f"--{split}_annotations={folder}/instances_{split}.json")
    coco.prepare(coco.parse(cli.Parser(), flags))
    return f"wrote: {state}"
