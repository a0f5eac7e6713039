"""Makes images of handwritten digits over clutter, in COCO's form, and records of them.

    python -m scripts.prepare digit_scenes --out=data/digit_scenes
    python -m scripts.prepare digit_scenes --out=data/scenes_5-9 --digits=5-9 --train_images=60

6,000 images for training and 300 for validation, of 128x128 pixels with 1 to 6 digits each, come
from scikit-learn's 1,797 handwritten digits, without a network. Validation shows digits that
training never sees: the split is that of `common.preparation.digits`. OUT/coco holds the images and
annotations as COCO has them: boxes, run-length masks, crowds, category ids with gaps; `coco` makes
the records. The same versions of NumPy and Pillow give the same bytes. --digits draws these digits
only, which are then the only categories, and --train_images makes another number of training
images: a small task for fine-tuning.
"""

import argparse
import functools
import io
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.detection import coco as outlines
from benchmarks.detection.preparation import coco
from common import console, pools
from common.data import files
from common.preparation import arguments, digits, writing

SIDE = 128  # pixels, height and width
COUNTS = {"train": 6000, "val": 300}
CATEGORY_IDS = (3, 7, 12, 18, 25, 33, 42, 52, 63, 75)  # of the digits 0 to 9
_SIDES = (0.25, 0.5)  # heights of digits, as shares of SIDE
_INK = 0.5  # a pixel with so much ink belongs to the digit
_OVERLAP = 0.15  # largest share of the smaller of two boxes
_TRIES = 20  # places for a digit


class Kind(NamedTuple):
    """A set of images."""

    seed: int
    sizes: tuple[tuple[int, int], ...]  # height, width; image i has number i modulo their count
    info: dict[str, Any]  # of the annotations; no other set's description begins with the same 24
    masks: bool  # whether the records have masks


SQUARE = Kind(
    0,
    ((SIDE, SIDE),),
    {"description": "handwritten digits over clutter", "version": "2", "size": SIDE},
    masks=False,
)


class Scene:
    """An image that digits are put on, and its annotations."""

    def __init__(self, draw: np.random.Generator, size: tuple[int, int]):
        """`draw` decides everything but the height and width."""
        self._draw = draw
        self._size = size
        self.pixels = _clutter(draw, size)
        self.objects: list[dict[str, Any]] = []

    def add(self, ink: np.ndarray, category: int) -> None:
        """Puts a digit, float[h, w] of 0..1, where it covers little of others; if it fits."""
        tile = _resize(ink, self._draw.uniform(*_SIDES) * SIDE)
        space = np.array(self._size) - tile.shape
        if (space < 0).any():
            return
        x0, y0, wide, tall = _box(tile >= _INK)
        for y, x in self._draw.integers(0, space + 1, (_TRIES, 2)).tolist():
            box = [x + x0, y + y0, wide, tall]
            if all(_shared(box, other["bbox"]) <= _OVERLAP for other in self.objects):
                inside = np.zeros(self._size, bool)
                inside[y : y + tile.shape[0], x : x + tile.shape[1]] = tile >= _INK
                self._paint(tile, y, x)
                self._annotate(inside, category)
                return

    def add_crowd(self, inks: list[np.ndarray], category: int) -> None:
        """Puts many small digits of one kind on a part of the image, as one object: a crowd."""
        side = int(SIDE * 0.35)
        top, left = (int(self._draw.integers(0, length - side)) for length in self._size)
        inside = np.zeros(self._size, bool)
        for ink in inks:
            tile = _resize(ink, SIDE * 0.1)
            y = top + int(self._draw.integers(0, side - tile.shape[0]))
            x = left + int(self._draw.integers(0, side - tile.shape[1]))
            self._paint(tile, y, x)
            inside[y : y + tile.shape[0], x : x + tile.shape[1]] = True
        self._annotate(inside, category, crowd=True)

    def _paint(self, tile: np.ndarray, y: int, x: int) -> None:
        """Paints a digit in a colour that stands out."""
        part = self.pixels[y : y + tile.shape[0], x : x + tile.shape[1]]
        low = 0 if part.mean() > 127 else 175
        colour = self._draw.uniform(low, low + 80, 3)
        part += tile[..., None] * (colour - part)

    def _annotate(self, inside: np.ndarray, category: int, crowd: bool = False) -> None:
        """Adds the object that covers bool[height, width], as COCO describes it."""
        self.objects.append(
            {
                "category_id": CATEGORY_IDS[category],
                "bbox": _box(inside),
                "area": float(inside.sum()),
                "iscrowd": int(crowd),
                "segmentation": outlines.mask_outline(inside),
            }
        )


def scene(
    split: str, i: int, inks: list[np.ndarray], classes: np.ndarray, kind: Kind = SQUARE
) -> Scene:
    """The i-th image, from 0, of the split 'train' or 'val': a function of the arguments.

    `inks` are the digits of the split, as `ink` returns them, and `classes` int[n] which digit each
    is.
    """
    draw = np.random.default_rng((kind.seed, list(COUNTS).index(split), i))
    image = Scene(draw, kind.sizes[i % len(kind.sizes)])
    if split == "val" and draw.uniform() < 0.1:
        present = np.unique(classes)
        digit = int(present[draw.integers(len(present))])
        members = draw.choice(np.flatnonzero(classes == digit), 15)
        image.add_crowd([inks[row] for row in members], digit)
    for row in draw.integers(0, len(inks), int(draw.integers(1, 7))):
        image.add(inks[row], int(classes[row]))
    return image


def ink(image: np.ndarray) -> np.ndarray:
    """A digit of f64[8, 8] as float32[h, w] of 0..1, cut to the part with ink."""
    share = (image / 16).astype(np.float32)
    rows, columns = (np.flatnonzero((share > 0.1).any(axis)) for axis in (1, 0))
    return share[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def write_coco(
    folder: str, kind: Kind, counts: dict[str, int], info: dict[str, Any], chosen: range
) -> None:
    """Writes the images to FOLDER/train and FOLDER/val, and then FOLDER/instances_*.json."""
    images, classes, rows = digits.load()
    progress = console.ProgressBar("drawing", sum(counts.values()))

    def draw(i: int, split: str, inks: list[np.ndarray], classes: np.ndarray) -> dict[str, Any]:
        """Writes an image; returns its row, and those of its objects under "objects"."""
        image = scene(split, i, inks, classes, kind)
        jpeg, number = io.BytesIO(), 139 + 37 * i  # with gaps, as COCO's
        pixels = Image.fromarray(image.pixels.clip(0, 255).round().astype(np.uint8))
        pixels.save(jpeg, "JPEG", quality=90)
        name = f"{number:012d}.jpg"
        files.write(os.path.join(folder, split, name), [jpeg.getvalue()])
        progress.add()
        height, width, _ = image.pixels.shape
        row = {"id": number, "file_name": name, "height": height, "width": width}
        return row | {"objects": [{"image_id": number, **one} for one in image.objects]}

    with pools.Threads(pools.threads(folder)) as pool:
        for split, count in counts.items():
            mine = rows["train" if split == "train" else "validation"]
            mine = mine[np.isin(classes[mine], chosen)]
            inks = [ink(images[row]) for row in mine]
            one = functools.partial(draw, split=split, inks=inks, classes=classes[mine])
            drawn = list(pools.ordered(pool, one, range(count), 64))
            objects = [row for image in drawn for row in image.pop("objects")]
            content = {
                "info": info,
                "images": drawn,
                "categories": [
                    {"id": CATEGORY_IDS[digit], "name": str(digit), "supercategory": "digit"}
                    for digit in chosen
                ],
                "annotations": [{"id": i, **row} for i, row in enumerate(objects, 1)],
            }
            path = os.path.join(folder, f"instances_{split}.json")
            files.write(path, [json.dumps(content).encode()])
    progress.close()


def parse(parser: console.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments; exits with status 2 if one is invalid."""
    arguments.add_out(parser)
    digits.add_choice(parser)
    about = f"training images ({COUNTS['train']:,})"
    number = console.integer(1, 100_000)
    parser.add_argument("--train_images", type=number, default=0, metavar="N", help=about)
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace, kind: Kind = SQUARE) -> str:
    """Makes the images that are missing, and their records; returns the last line to print."""
    out, folder, info = args.out, os.path.join(args.out, "coco"), dict(kind.info)
    counts = COUNTS | {"train": args.train_images or COUNTS["train"]}
    if args.digits != range(10):
        info["digits"] = [*args.digits]
    if args.train_images:
        info["train_images"] = args.train_images
    keys: dict[str, Any] = {"num_classes": len(args.digits)}
    if counts["train"] < COUNTS["train"] // 2:
        keys |= arguments.fitted(counts["train"], largest=8, epochs=10, least=200)
    recipe = "mask_rcnn_digits" if kind.masks else "ssd_digits"
    state = (
        f"{counts['train']:,} train and {counts['val']:,} val images are in {out}; train on them: "
        f"{arguments.train_command(recipe, out, *arguments.keys(**keys))}"
    )
    start = json.dumps({"info": info})[:-1].encode()
    scored = files.read(os.path.join(out, coco.SCORED)) or b""
    if scored.startswith(start) and writing.is_complete(out):
        return f"already complete: {state}"
    train = files.read(os.path.join(folder, "instances_train.json")) or b""
    writing.State(out).refuse_others(train.startswith(start[:50]))  # any version, any digits
    print(f"{sum(counts.values()):,} images of digits into {out}, up to 40 s", flush=True)
    write_coco(folder, kind, counts, info, args.digits)
    flags = [f"--{split}_images={folder}/{split}" for split in counts]
    flags += [f"--{split}_annotations={folder}/instances_{split}.json" for split in counts]
    flags += ["--masks"] if kind.masks else []
    coco.prepare(coco.parse(console.Parser(), [*flags, f"--out={out}", "--overwrite"]))
    return f"wrote: {state}"


def _clutter(draw: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """A background float32[*size, 3] of 0..255: coloured clouds with bars, and noise."""
    height, width = size
    grid = draw.integers(85, 171, (6, 6, 3), np.uint8)
    clouds = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)
    barred = clouds.copy()
    brush = ImageDraw.Draw(barred)
    for _ in range(int(draw.integers(4, 9))):
        y, x, angle = draw.uniform(0, (*size, np.pi)).tolist()
        long, wide = draw.uniform((4, 1), (30, 4)).tolist()
        ends = (long * np.cos(angle), long * np.sin(angle))
        colour = tuple(draw.integers(0, 256, 3).tolist())
        line = (x - ends[0], y - ends[1], x + ends[0], y + ends[1])
        brush.line(line, colour, round(2 * wide))
    pixels = np.asarray(Image.blend(clouds, barred, 0.35)).astype(np.float32)
    return pixels + 6 * draw.standard_normal((*size, 1), np.float32)


def _resize(ink: np.ndarray, height: float) -> np.ndarray:
    """A digit enlarged to `height` pixels, with a margin of a pixel that its edge fades into."""
    tall = max(4, round(height))
    wide = max(3, round(height * ink.shape[1] / ink.shape[0]))
    large = Image.fromarray(ink).resize((wide, tall), Image.Resampling.BICUBIC)
    # Much steeper than linear: the edge is sharp, and faint ink outside of the box is not seen.
    return ((np.asarray(large) - _INK) * 10 + _INK).clip(0, 1)


def _box(inside: np.ndarray) -> list[float]:
    """[x, y, width, height] around the pixels of an object."""
    rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
    y, x = int(rows[0]), int(columns[0])
    return [float(x), float(y), float(columns[-1] + 1 - x), float(rows[-1] + 1 - y)]


def _shared(a: list[float], b: list[float]) -> float:
    """The common area of two boxes, as a share of the smaller one."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = a, b
    wide = min(ax + aw, bx + bw) - max(ax, bx)
    tall = min(ay + ah, by + bh) - max(ay, by)
    return max(wide, 0) * max(tall, 0) / min(aw * ah, bw * bh)
