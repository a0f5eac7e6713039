"""Makes TFRecords for training from ImageNet's archives or from any folder of class folders.

    python -m scripts.prepare imagenet --train=ILSVRC2012_img_train.tar \\
        --validation=ILSVRC2012_img_val.tar --validation_labels=synset_labels.txt \\
        --out=gs://bucket/imagenet
    python -m scripts.prepare imagenet --layout=folder --train=photos --out=records

The program reads the archives without unpacking them. After an interruption the same command
continues. See docs/data.md.
"""

import argparse
import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.resnet.preparation import plan
from common import console, foreign
from common.data import records
from common.data.shards import tensorflow
from common.errors import UserError, some, visible
from common.images import manifest, photos
from common.preparation import arguments, holdout, schema, sources, writing

IMAGENET = {
    **{f"{split} images": number for split, number in manifest.IMAGENET.items()},
    "classes": 1_000,
}
_SAMPLE = 100  # images whose sizes stand for all
_USUAL_SIDE = 224  # pixels, in the recipes


def parse(parser: console.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments without reading files; exits with status 2 if one is invalid."""
    add, path = parser.add_argument, console.path
    inputs = "tar of tars, or folder of class folders; local or gs://"
    add("--train", required=True, type=path, help=inputs)
    validation = "flat tar or folder (with labels), or folder of class folders"
    add("--validation", type=path, help=validation)
    labels = "a synset per line, by sorted file name"
    add("--validation_labels", type=path, metavar="FILE", help=labels)
    add("--layout", choices=("imagenet", "folder"), default="imagenet", help="folder: own photos")
    add("--subset", action="store_true", help="accept a part of ImageNet: do not check its counts")
    add("--validation_fraction", type=holdout.fraction, metavar="F", help="of own photos (0.1)")
    group = "own photos in whose 'CLASS/NAME' it finds the same text stay in one split: '[^_]+_'"
    add("--group", type=holdout.pattern, default="", metavar="REGEX", help=group)
    shrunk = "shrink photos whose short side is longer to N pixels, at quality 95 (never)"
    add("--max_side", type=console.integer(1, 65_535), default=0, metavar="N", help=shrunk)
    shards = {"shards": "train files (1024, or by size)", "validation_shards": "(128, or by size)"}
    quality = "100; own photos 95"
    args = arguments.parse_images(parser, argv, shards, quality, ("train", "validation"))
    own = args.layout == "folder"
    if not own and not args.validation:
        parser.error("--layout=imagenet needs --validation; for own photos give --layout=folder")
    if own and (args.subset or args.validation_labels):
        parser.error("--subset and --validation_labels are for --layout=imagenet")
    if args.validation and args.validation_fraction is not None:
        parser.error("give --validation or --validation_fraction, not both")
    if args.group and (args.validation or not own):
        parser.error("--group is for --layout=folder without --validation")
    if args.validation_fraction is None:
        args.validation_fraction = 0.1
    args.quality = args.quality or (95 if own or args.max_side else 100)
    return args


def prepare(args: argparse.Namespace) -> str:
    """Prepares the records; returns the last line to print.

    Raises:
        UserError: a mistake of the user's.
        tf.errors.OpError: reading or writing failed.
    """
    settings, own, workers = _settings(args), args.layout == "folder", args.workers
    lines = plan.read_labels(args.validation_labels) if args.validation_labels else []
    inputs = sources.list_inputs({"train": args.train, "validation": args.validation}, workers)
    for name, source in inputs.items():
        if own and source.archive:
            raise sources.SourceError(f"--{name}: {source.path} is no folder")
    stamps = {name: source.stamp for name, source in inputs.items()}
    if lines:
        stamps["validation_labels"] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    writing.State(args.out).claim({"settings": settings, "input": stamps}, args.overwrite)
    images = {name: sources.images(source, own, workers) for name, source in inputs.items()}
    for name, source in images.items():
        named = {source.class_name(i) for i in range(len(source.files))}
        if empty := [folder for folder in source.folders if folder not in named]:
            print(visible(f"warning: --{name}: the folders {some(empty)} have no image: no class"))
    classes, splits = plan.make(images["train"], images.get("validation"), lines, settings)
    official = not own and not args.subset
    if official:
        counts = {f"{name} images": len(split.rows) for name, split in splits.items()}
        counts["classes"] = len(classes)
        writing.check_counts(counts, IMAGENET, "ImageNet", "the input", args.out)
    for name, split in splits.items():
        print(f"{name}: {len(split.rows):,} images, {split.shards:,} shards", flush=True)
    sizes = {name: (len(split.rows), split.shards) for name, split in splits.items()}

    def make(name: str, k: int) -> writing.Example:
        return _example(args, classes, splits[name], k)

    results = writing.write(args.out, sizes, make, workers)
    sources.check_unchanged(inputs, workers)
    head = {"format": 1, "num_label_classes": len(classes), "settings": settings}
    rows = {i: {"label": i, "name": name} for i, name in enumerate(classes, 1)}
    left_out = {row for split in splits.values() for row in split.left_out()}
    content = writing.manifest(head, rows, results, left_out)
    writing.report(content)
    _warn(content, results)
    written = {f"{name} images": row["examples"] for name, row in content["splits"].items()}
    if not written["train images"]:
        raise UserError("none of the training images can be used")
    if official:
        written["classes"] = sum(bool(row["train"]) for row in content["classes"])
        writing.check_counts(written, IMAGENET, "ImageNet", "the output", args.out)
    writing.save_manifest(args.out, content)
    return _last_line(args.out, content)


def _warn(content: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Prints which images there are several times, and the splits in which a class has no image."""
    writing.report_repeated(results)
    for split in content["splits"]:
        if empty := [row["name"] for row in content["classes"] if not row[split]]:
            print(f"warning: {len(empty):,} classes have no {split} image: {', '.join(empty[:5])}")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the bytes of the records depend on; the manifest has them, too."""
    return {
        "layout": args.layout,
        "seed": args.seed,
        "validation_fraction": None if args.validation else args.validation_fraction,
        "shards": args.shards or 0,
        "validation_shards": args.validation_shards or 0,
        "quality": args.quality,
        "tools": writing.tools(),
        **({"group": args.group} if args.group else {}),
        **({"max_side": args.max_side} if args.max_side else {}),
    }


def _example(
    args: argparse.Namespace, classes: list[str], split: plan.Split, k: int
) -> writing.Example:
    """Reads and converts the k-th image of a split.

    Own photos are turned upright and have image/class/text; ImageNet's images have neither.
    """
    i, label, own = int(split.rows[k]), int(split.labels[k]), args.layout == "folder"
    path, name = f"{split.origin}/{split.source.files[i].name}", classes[label - 1]
    try:
        jpeg = photos.to_jpeg(split.source.read(i), own, args.quality, max_side=args.max_side)
    except photos.BadImage as error:
        return b"", (), {"left_out": [path, str(error)]}
    file, size = os.path.basename(path), (jpeg.height, jpeg.width)
    record = schema.example(jpeg.encoded, label, name, file, size, name if own else "")
    notes: dict[str, list] = {"changed": [path, jpeg.change]} if jpeg.change else {}
    if own:
        digest = hashlib.blake2b(jpeg.encoded, digest_size=8).hexdigest()
        notes["digests"] = [digest, label, path]
    return record, (label,), notes


def _pixels(out: str, shard: str) -> int:
    """The multiple of 32 pixels, from 64 to the recipes' usual 224, that suits a shard's images."""
    sides = []
    for record in itertools.islice(records.read_shard(os.path.join(out, shard)), _SAMPLE):
        feature = tensorflow().train.Example.FromString(record).features.feature
        sizes = (feature[f"image/{side}"].int64_list.value[0] for side in ("height", "width"))
        sides.append(min(sizes))
    # Below 64 the network's last map has a single cell.
    return min(_USUAL_SIDE, max(64, 32 * math.ceil(np.median(sides or _USUAL_SIDE) / 32)))


def _last_line(out: str, content: dict[str, Any]) -> str:
    splits, classes = content["splits"], content["num_label_classes"]
    keys: dict[str, Any] = {}
    recipe, images = "resnet50", splits["train"]["examples"]
    if images < arguments.FEW:
        recipe, keys = "finetune", {"init_from": foreign.RESNET.format(depth=50)}
        keys |= arguments.fitted(images, largest=64, epochs=20, least=100)
    if (pixels := _pixels(out, splits["train"]["shards"][0]["name"])) < _USUAL_SIDE:
        keys["image_size"] = pixels
    size = sum(split["bytes"] for split in splits.values())
    return (
        f"{images:,} train and {splits['validation']['examples']:,} "
        f"validation images of {classes:,} classes are in {out} ({size / 1e6:,.0f} MB); train on "
        f"them: {arguments.train_command(recipe, out, *arguments.keys(**keys))}"
    )
