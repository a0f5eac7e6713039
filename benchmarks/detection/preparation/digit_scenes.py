"""Makes images of handwritten digits over clutter, in COCO's form, and records of them.

    python -m scripts.prepare digit_scenes --out=data/digit_scenes
    python -m scripts.prepare digit_scenes --out=data/scenes_5-9 --digits=5-9 --train_images=60

6,000 images for training and 300 for validation, of 128x128 pixels with 1 to 6 digits each, come
from scikit-learn's 1,797 handwritten digits, without a network. Validation shows digits that
training never sees: the split is that of `common.preparation.digits`. OUT/coco holds the images and
annotations as COCO has them: boxes, run-length masks, crowds, category ids with gaps. The records
are made of these by `coco`, as anybody's are. The same versions of NumPy and Pillow give the same
bytes. The program does nothing if the folder is complete. `digit_masks` makes another set in the
same way. --digits draws these digits only, which are then the only categories, and --train_images
makes another number of training images: a small task for fine-tuning.
"""

import argparse
import dataclasses
import functools
import io
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.detection.preparation import coco
from common import console, pools
from common.data import files
from common.data.shards import tensorflow
from common.errors import parse_json
from common.preparation import arguments, digits, writing

SIDE = 128  # pixels, height and width
COUNTS = {"train": 6000, "val": 300}
_MOST_IMAGES = 100_000  # for training
CATEGORY_IDS = (3, 7, 12, 18, 25, 33, 42, 52, 63, 75)  # of the digits 0 to 9
_SIDES = (0.25, 0.5)  # heights of digits, as shares of SIDE
_INK = 0.5  # a pixel with so much ink belongs to the digit
_OVERLAP = 0.15  # largest share of the smaller of two boxes
_TRIES = 20  # places for a digit


@dataclasses.dataclass(frozen=True)
class Kind:
    """A set of images.

    Attributes:
        seed: of the images.
        sizes: their heights and widths; image i has the one of number i modulo their count.
        about: the info of the annotations; the first 24 characters of its description are no other
            set's.
        masks: whether the records have them.
        digits: on the images; they are the categories.
        train_images: how many; 0 for those of `COUNTS`.
    """

    seed: int
    sizes: tuple[tuple[int, int], ...]
    about: dict[str, Any]
    masks: bool
    digits: range = range(10)
    train_images: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """The images of each split."""
        return {**COUNTS, "train": self.train_images or COUNTS["train"]}

    @property
    def info(self) -> dict[str, Any]:
        """`about`, and what was chosen otherwise than by default."""
        chosen = {}
        if self.digits != range(10):
            chosen["digits"] = [*self.digits]
        if self.train_images:
            chosen["train_images"] = self.train_images
        return {**self.about, **chosen}


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
        """Puts a digit, float[h, w] of 0..1, where it covers little of others; if there is room."""
        tile = _resize(ink, self._draw.uniform(*_SIDES) * SIDE)
        room = np.array(self._size) - tile.shape
        if (room < 0).any():
            return
        x0, y0, wide, tall = _box(tile >= _INK)
        for y, x in self._draw.integers(0, room + 1, (_TRIES, 2)).tolist():
            box = [x + x0, y + y0, wide, tall]
            if all(_shared(box, other["bbox"]) <= _OVERLAP for other in self.objects):
                inside = np.zeros(self._size, bool)
                inside[y : y + tile.shape[0], x : x + tile.shape[1]] = tile >= _INK
                self._paint(tile, y, x)
                self._annotate(inside, box, category)
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
        self._annotate(inside, _box(inside), category, crowd=True)

    def jpeg(self) -> bytes:
        """The image as a file."""
        out = io.BytesIO()
        pixels = self.pixels.clip(0, 255).round().astype(np.uint8)
        Image.fromarray(pixels).save(out, "JPEG", quality=90)
        return out.getvalue()

    def _paint(self, tile: np.ndarray, y: int, x: int) -> None:
        """Paints a digit in a colour that stands out."""
        part = self.pixels[y : y + tile.shape[0], x : x + tile.shape[1]]
        low = 0 if part.mean() > 127 else 175
        colour = self._draw.uniform(low, low + 80, 3)
        part += tile[..., None] * (colour - part)

    def _annotate(
        self, inside: np.ndarray, box: list[float], category: int, crowd: bool = False
    ) -> None:
        edges = np.flatnonzero(np.diff(inside.T.ravel(), prepend=False, append=not inside[-1, -1]))
        counts = np.diff(edges, prepend=0).tolist()  # of pixels outside and inside in turn
        self.objects.append(
            {
                "category_id": CATEGORY_IDS[category],
                "bbox": box,
                "area": float(inside.sum()),
                "iscrowd": int(crowd),
                "segmentation": {"counts": counts, "size": [*self._size]},
            }
        )


def scene(
    split: str, i: int, inks: list[np.ndarray], classes: np.ndarray, kind: Kind = SQUARE
) -> Scene:
    """The i-th image of a split: a function of the arguments.

    Args:
        split: 'train' or 'val'.
        i: from 0.
        inks: the digits of the split, as `ink` returns them.
        classes: int[n], which digit each is.
        kind: the set that the image is of.
    """
    draw = np.random.default_rng((kind.seed, list(COUNTS).index(split), i))
    image = Scene(draw, _size(kind, i))
    if split == "val" and draw.uniform() < 0.1:
        digit = kind.digits[int(draw.integers(len(kind.digits)))]
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


def write_coco(folder: str, kind: Kind = SQUARE) -> None:
    """Writes the images to FOLDER/train and FOLDER/val, and then FOLDER/instances_*.json."""
    images, classes, rows = digits.load()
    gfile = tensorflow().io.gfile
    progress = console.ProgressBar("drawing", sum(kind.counts.values()))
    with pools.Threads(pools.threads(folder)) as pool:
        for split, count in kind.counts.items():
            mine = rows["train" if split == "train" else "validation"]
            mine = mine[np.isin(classes[mine], kind.digits)]
            inks = [ink(images[row]) for row in mine]
            folder_of_split = os.path.join(folder, split)
            if "://" not in folder:  # object stores have no folders
                gfile.makedirs(folder_of_split)

            def one(i: int, split: str, inks: list, classes: np.ndarray, path: str) -> list[dict]:
                image = scene(split, i, inks, classes, kind)
                with gfile.GFile(os.path.join(path, _file_name(i)), "wb") as file:
                    file.write(image.jpeg())
                progress.add()
                return image.objects

            make = functools.partial(
                one, split=split, inks=inks, classes=classes[mine], path=folder_of_split
            )
            objects = list(pools.ordered(pool, make, range(count), 64))
            text = json.dumps(_annotations(objects, kind))
            files.write(os.path.join(folder, f"instances_{split}.json"), [text.encode()])
    progress.close()


def make(out: str, kind: Kind = SQUARE) -> str:
    """Makes what is missing; returns the last line to print.

    Raises:
        UserError: the folder holds other records.
    """
    folder = os.path.join(out, "coco")
    counts = kind.counts
    recipe = "mask_rcnn_digits" if kind.masks else "ssd_digits"
    keys: dict[str, Any] = {"num_classes": len(kind.digits)}
    if counts["train"] < COUNTS["train"] // 2:
        keys |= arguments.fitted(counts["train"], largest=8, epochs=10, least=200)
    state = (
        f"{counts['train']:,} train and {counts['val']:,} val images are in {out}; train on them: "
        f"{arguments.train_command(recipe, out, *arguments.keys(**keys))}"
    )
    if _is_complete(out, kind):
        return f"already complete: {state}"
    is_ours = _is_ours(os.path.join(folder, "instances_train.json"), kind)
    writing.State(out).refuse_others(is_ours)
    print(f"{sum(counts.values()):,} images of digits into {out}, up to 40 s", flush=True)
    write_coco(folder, kind)
    flags = [f"--{split}-images={folder}/{split}" for split in counts]
    flags += [f"--{split}-annotations={folder}/instances_{split}.json" for split in counts]
    flags += ["--masks"] if kind.masks else []
    flags += [f"--out={out}", "--overwrite"]
    coco.prepare(coco.parse(console.Parser(), console.underscored(flags)))
    return f"wrote: {state}"


def parse(parser: console.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments; exits with status 2 if one is invalid."""
    arguments.add_out(parser)
    digits.add_choice(parser)
    count = console.integer(1, _MOST_IMAGES)
    about = f"training images ({COUNTS['train']:,})"
    parser.add_argument("--train_images", type=count, default=0, metavar="N", help=about)
    return parser.parse_args(argv)


def chosen(kind: Kind, args: argparse.Namespace) -> Kind:
    """The set with the digits and the number of images of `parse`."""
    return dataclasses.replace(kind, digits=args.digits, train_images=args.train_images)


def prepare(args: argparse.Namespace) -> str:
    """Makes the images that are missing, and their records; returns the last line to print."""
    return make(args.out, chosen(SQUARE, args))


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


def _file_name(i: int) -> str:
    return f"{_image_id(i):012d}.jpg"


def _image_id(i: int) -> int:
    return 139 + 37 * i  # with gaps, as COCO's


def _size(kind: Kind, i: int) -> tuple[int, int]:
    """The height and width of an image."""
    return kind.sizes[i % len(kind.sizes)]


def _annotations(objects: list[list[dict[str, Any]]], kind: Kind) -> dict[str, Any]:
    """The content of an instances_*.json."""
    rows = [{"image_id": _image_id(i), **row} for i, mine in enumerate(objects) for row in mine]
    return {
        "info": kind.info,
        "images": [
            {"id": _image_id(i), "file_name": _file_name(i)}
            | dict(zip(("height", "width"), _size(kind, i), strict=True))
            for i in range(len(objects))
        ],
        "categories": [
            {"id": CATEGORY_IDS[digit], "name": str(digit), "supercategory": "digit"}
            for digit in kind.digits
        ],
        "annotations": [{"id": i, **row} for i, row in enumerate(rows, 1)],
    }


def _is_ours(path: str, kind: Kind) -> bool:
    """Whether a file holds annotations of a set that this program wrote, of any version."""
    gfile = tensorflow().io.gfile
    if not gfile.exists(path):
        return False
    with gfile.GFile(path, "rb") as file:
        return file.read(100).startswith(json.dumps({"info": kind.info})[:50].encode())


def _is_complete(out: str, kind: Kind) -> bool:
    """Whether the records that the manifest lists are there, and of this version's images."""
    gfile = tensorflow().io.gfile
    manifest = os.path.join(out, files.MANIFEST)
    scored = os.path.join(out, coco.SCORED)
    if not (gfile.exists(manifest) and gfile.exists(scored)):
        return False
    with gfile.GFile(manifest, "rb") as file:
        content = parse_json(file.read())
    with gfile.GFile(scored, "rb") as file:
        if not file.read(500).startswith(json.dumps({"info": kind.info})[:-1].encode()):
            return False
    if content.get("kind") != coco.KIND:
        return False
    shards = [row for split in content["splits"].values() for row in split["shards"]]
    return writing.are_complete(out, {row["name"]: row["bytes"] for row in shards})
