"""Makes TFRecords for training from ImageNet's archives or from any folder of class folders.

    python -m scripts.prepare imagenet --train=ILSVRC2012_img_train.tar \\
        --validation=ILSVRC2012_img_val.tar --validation_labels=synset_labels.txt \\
        --out=gs://bucket/imagenet
    python -m scripts.prepare imagenet --layout=folder --train=photos --out=records

The program reads the archives without unpacking them. After an interruption the same command
continues. See docs/data.md.
"""

import argparse
import functools
import hashlib
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from common import console, foreign
from common.data import records
from common.data.shards import tensorflow
from common.errors import UserError, some, visible
from common.images import manifest, photos
from common.preparation import arguments, schema, sources, writing
from common.preparation import plan as plans

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
    add("--validation_fraction", type=float, metavar="F", help="of own photos (0.1)")
    group = "own photos in whose 'CLASS/NAME' it finds the same text stay in one split: '[^_]+_'"
    add("--group", default="", metavar="REGEX", help=group)
    shrunk = "shrink photos whose short side is longer to N pixels, at quality 95 (never)"
    add("--max_side", type=console.integer(1, 65_535), default=0, metavar="N", help=shrunk)
    shards = {"shards": "train files (1024, or by size)", "validation_shards": "(128, or by size)"}
    arguments.add_for_images(parser, shards, "100; own photos 95")
    args = parser.parse_args(argv)
    own = args.layout == "folder"
    if not own and not args.validation:
        parser.error("--layout=imagenet needs --validation; for own photos give --layout=folder")
    if own and (args.subset or args.validation_labels):
        parser.error("--subset and --validation_labels are for --layout=imagenet")
    if args.validation and args.validation_fraction is not None:
        parser.error("give --validation or --validation_fraction, not both")
    if args.group and (args.validation or not own):
        parser.error("--group is for --layout=folder without --validation")
    try:
        re.compile(args.group)
    except re.error as error:
        parser.error(f"argument --group: {args.group!r} is no regular expression: {error}")
    if args.validation_fraction is None:
        args.validation_fraction = 0.1
    if not 0 < args.validation_fraction < 1:
        parser.error("argument --validation_fraction: must be between 0 and 1")
    args.quality = args.quality or (95 if own or args.max_side else 100)
    arguments.check_images(parser, args, ("train", "validation"))
    return args


def prepare(args: argparse.Namespace) -> str:
    """Prepares the records; returns the last line to print.

    Raises:
        UserError: a mistake of the user's.
        tf.errors.OpError: reading or writing failed.
    """
    state, settings = writing.State(args.out), _settings(args)
    listings, labels = _list_inputs(args)
    stamps = {name: listing.stamp for name, listing in listings.items()}
    if labels:
        stamps["validation_labels"] = hashlib.sha256("\n".join(labels).encode()).hexdigest()
    state.claim({"settings": settings, "input": stamps}, args.overwrite)
    images_by_split = _index(state, listings, args)
    for name, source in images_by_split.items():
        named = {source.class_name(i) for i in range(len(source.names))}
        if empty := [folder for folder in listings[name].folders if folder not in named]:
            print(visible(f"warning: --{name}: the folders {some(empty)} have no image: no class"))
    own = args.layout == "folder"
    train, validation = images_by_split["train"], images_by_split.get("validation")
    plan = plans.make(train, validation, labels, settings, own)
    if not own and not args.subset:
        plans.check_counts(_planned_counts(plan), plans.IMAGENET, "ImageNet", "the input", args.out)
    for name, split in plan.splits.items():
        print(f"{name}: {len(split.rows):,} images, {split.shards:,} shards", flush=True)
    encoding = ("quality", "tools", "max_side")
    key = plans.digest(plan, {key: settings[key] for key in encoding if key in settings})
    planned = writing.shards({n: (len(s.rows), s.shards) for n, s in plan.splits.items()})
    make = functools.partial(_example, plan, args.quality, args.max_side)
    results = writing.write(args.out, planned, make, key, args.workers)
    sources.check_unchanged(listings, args.workers)
    content = _manifest(plan, settings, planned, results)
    writing.report(content)
    _warn_of_repeats(planned, results)
    warn(content)
    if not content["splits"]["train"]["examples"]:
        raise UserError("none of the training images can be used")
    if not own and not args.subset:
        plans.check_counts(
            _written_counts(content), plans.IMAGENET, "ImageNet", "the output", args.out
        )
    writing.save_manifest(args.out, content)
    return _last_line(args.out, content)


def warn(content: dict[str, Any]) -> None:
    """Prints a line for each split in which a class has no image."""
    for split in content["splits"]:
        empty = [row["name"] for row in content["classes"] if not row[split]]
        if empty:
            print(f"warning: {len(empty):,} classes have no {split} image: {', '.join(empty[:5])}")


def _warn_of_repeats(planned: Sequence[writing.Shard], results: dict[str, dict]) -> None:
    rows = [
        (*row, shard.split) for shard in planned for row in results[shard.name].get("digests", ())
    ]
    if rows:
        digests, labels, paths, splits = map(np.array, zip(*rows, strict=True))
        for line in manifest.repeated_images(digests, labels, splits, lambda i: str(paths[i])):
            print(visible(f"warning: {line}"))


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


def _list_inputs(args: argparse.Namespace) -> tuple[dict[str, sources.Listing], list[str]]:
    """The listings of the inputs by split, and the lines of --validation_labels."""
    labels = plans.read_labels(args.validation_labels) if args.validation_labels else []
    if args.validation_labels and not labels:
        raise sources.SourceError(f"{args.validation_labels} is empty")
    paths = {"train": args.train, "validation": args.validation}
    listings = sources.list_inputs(paths, args.workers)
    for name, listing in listings.items():
        if args.layout == "folder" and listing.archive:
            raise sources.SourceError(f"--{name}: {listing.path} is no folder")
    return listings, labels


def _index(
    state: writing.State, listings: dict[str, sources.Listing], args: argparse.Namespace
) -> dict[str, sources.Source]:
    """The images of each input, from the index in the state if that is of the same input."""
    images_by_split = {}
    for name, listing in listings.items():
        file = f"index-{name}.json.gz"
        cached = state.read(file)
        if cached and cached["stamp"] == listing.stamp:
            images_by_split[name] = sources.Source.from_json(listing.path, cached)
            continue
        source = sources.index(listing, args.layout == "folder", args.workers)
        state.write(file, source.to_json() | {"stamp": listing.stamp})
        images_by_split[name] = source
    return images_by_split


def _example(
    plan: plans.Plan, quality: int, max_side: int, split_name: str, k: int
) -> writing.Example:
    """Reads and converts the k-th image of a split."""
    split = plan.splits[split_name]
    i, label = int(split.rows[k]), int(split.labels[k])
    path = plans.file_label(plan, split, split.source.names[i])
    try:
        content = split.source.read(i)
        jpeg = photos.to_jpeg(content, plan.own, quality, max_side=max_side)
    except photos.BadImage as error:
        return writing.Example(b"", (label,), path, fault=str(error))
    name = plan.classes[label - 1]
    file, size = os.path.basename(path), (jpeg.height, jpeg.width)
    text = name if plan.own else ""
    record = schema.example(jpeg.encoded, label, name, file, size, text)
    digest = hashlib.blake2b(jpeg.encoded, digest_size=8).hexdigest() if plan.own else ""
    return writing.Example(record, (label,), path, change=jpeg.change, digest=digest)


def _manifest(
    plan: plans.Plan, settings: dict, planned: list[writing.Shard], results: dict[str, dict]
) -> dict[str, Any]:
    """The content of manifest.json: a function of the input, the seed and the settings."""
    counts = writing.label_counts(planned, results)
    classes = [
        {"label": label, "name": name} | {split: counts[split][label] for split in plan.splits}
        for label, name in enumerate(plan.classes, 1)
    ]
    return {
        "format": 1,
        "num_label_classes": len(plan.classes),
        "settings": settings,
        "splits": writing.split_rows(planned, results),
        "classes": classes,
        **writing.file_rows(planned, results, plans.left_out(plan)),
    }


def _planned_counts(plan: plans.Plan) -> dict[str, int]:
    splits = {f"{name} images": len(split.rows) for name, split in plan.splits.items()}
    return splits | {"classes": len(plan.classes)}


def _written_counts(content: dict[str, Any]) -> dict[str, int]:
    splits = {f"{name} images": row["examples"] for name, row in content["splits"].items()}
    return splits | {"classes": sum(bool(row["train"]) for row in content["classes"])}


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
