"""Makes TFRecords for training from ImageNet's archives or from any folder of class folders.

    python -m scripts.prepare imagenet --train=ILSVRC2012_img_train.tar \\
        --validation=ILSVRC2012_img_val.tar --validation_labels=synset_labels.txt \\
        --out=gs://bucket/imagenet
    python -m scripts.prepare imagenet --layout=folder --train=photos --out=records

The program reads the archives without unpacking them. After an interruption the same command
continues. See docs/data.md.
"""

import argparse
import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.resnet.preparation import annotations, examples
from benchmarks.resnet.records import IMAGENET_COUNTS
from common import cli, foreign
from common.data import records
from common.errors import UserError, some, visible
from common.images.pixels import LARGE
from common.preparation import arguments, holdout, sources, unread, writing
from common.preparation.writing import report_repeated
from common.tensorflow import tensorflow
from common.text import normal_name

_FEW = 20  # training photos, with which a class is hardly learnt
_SAMPLE = 100  # images whose sizes stand for all
_SMALL_RUN = 600_000  # images that configs/small.py:resnet sees in an hour
_MANY_EPOCHS = 50
_USUAL_SIDE = 224  # pixels, in the recipes
_CROP = 0.7  # the least share in a crop of several labels: smaller ones lose what has a label


def parse(parser: cli.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments without reading files."""
    add, path = parser.add_argument, cli.path
    inputs = "tar of tars, or folder of class folders; local or gs://"
    add("--train", required=True, type=path, help=inputs)
    validation = "flat tar or folder (with labels), or folder of class folders"
    add("--validation", type=path, help=validation)
    labels = "a synset per line, by sorted file name"
    add("--validation_labels", type=path, metavar="FILE", help=labels)
    add("--layout", choices=("imagenet", "folder"), default="imagenet", help="folder: your photos")
    add("--subset", action="store_true", help="accept a part of ImageNet: do not check its counts")
    share = "share of your photos (0.1)"
    add("--validation_fraction", type=holdout.fraction, metavar="F", help=share)
    group = "photos in whose 'CLASS/NAME' this regex finds the same text share a split: '[^_]+_'"
    add("--group", type=holdout.pattern, default="", metavar="REGEX", help=group)
    named = "the class is what this regex finds in a photo's path, not its folder: '([a-z]+)_'"
    add("--class", type=holdout.pattern, default="", metavar="REGEX", dest="by_name", help=named)
    shrunk = "shrink photos whose short side is longer to N pixels, at quality 95 (never)"
    add("--max_side", type=cli.integer(1, 65_535), default=0, metavar="N", help=shrunk)
    shards = {"shards": "train files (1024, or by size)"}
    shards["validation_shards"] = "files (128, or by size)"
    table = "a table of your photos and their classes; again for the table of another split"
    add("--labels", type=path, action="append", metavar="FILE", help=table)
    for which in ("file", "label"):
        column = "column of --labels, by name, or by number without a header (guessed)"
        add(f"--{which}_column", default="", metavar="NAME", help=column)
    several = "of --labels with several labels per photo: 'columns' of 0 and 1, 'rows', 'lists' or "
    several += "the sign between them in a cell; --label_column=A,B has the columns"
    add("--several", default="", metavar="FORM", help=several)
    quality = "100; your photos 95"
    args = arguments.parse_images(parser, argv, shards, quality, ("train", "validation"))
    is_folder = args.layout == "folder"
    if not is_folder and not args.validation:
        parser.error("--layout=imagenet needs --validation; for your photos give --layout=folder")
    if is_folder and (args.subset or args.validation_labels):
        parser.error("--subset and --validation_labels are for --layout=imagenet")
    if args.validation and args.validation_fraction is not None:
        parser.error("give --validation or --validation_fraction, not both")
    for flag in ("group", "labels"):
        if getattr(args, flag) and (args.validation or not is_folder):
            parser.error(f"--{flag} is for --layout=folder without --validation")
    if args.several and not args.labels:
        parser.error("--several is for --labels")
    if args.by_name and (args.labels or not is_folder):
        parser.error("--class is for --layout=folder without --labels")
    args.by_split = args.validation_fraction is None and not args.group
    if args.validation_fraction is None:
        args.validation_fraction = 0.1
    args.quality = args.quality or (95 if is_folder or args.max_side else 100)
    return args


def prepare(args: argparse.Namespace) -> str:
    """Prepares the records; returns the last line to print."""
    is_folder, workers = args.layout == "folder", args.workers
    settings = _settings(args)
    lines = annotations.read_lines(args.validation_labels) if args.validation_labels else []
    inputs = sources.list_inputs({"train": args.train, "validation": args.validation}, workers)
    for name, source in inputs.items():
        if is_folder and source.archive:
            raise sources.SourceError(f"--{name}: {source.path} is not a folder; unpack it")
    stamps = {name: source.stamp for name, source in inputs.items()}
    if lines:
        stamps["validation_labels"] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if args.labels:
        tables = (sources.list_input(path, workers, zipped=True) for path in args.labels)
        stamps["labels"] = " ".join(table.stamp for table in tables)
    writing.State(args.out).claim({"settings": settings, "input": stamps}, args.overwrite)
    images = {name: sources.images(source, is_folder, workers) for name, source in inputs.items()}
    if is_folder and not args.labels:
        images = {name: _photos(source, bool(args.by_name)) for name, source in images.items()}
    for name, source in images.items() if args.by_name else ():
        found = holdout.groups([file.name for file in source.files], args.by_name, "--class")
        images[name] = dataclasses.replace(source, classes=[(normal_name(x),) for x in found])
    if args.labels:
        columns = args.file_column, args.label_column, args.several
        images = annotations.label(images["train"], args.labels, *columns, args.by_split)
    elif not args.by_name:
        for name, source in images.items():
            named = {*itertools.chain(*map(source.class_names, range(len(source.files))))}
            if empty := [folder for folder in source.folders if folder not in named]:
                problem = f"the folders {some(empty)} have no images: no class"
                print(visible(f"warning: --{name}: {problem}"))
    classes, splits = examples.make(images["train"], images.get("validation"), lines, settings)
    official = not is_folder and not args.subset
    if official:
        counts = [len(split.rows) for split in splits.values()]
        _check_complete([*counts, len(classes)], "the input", args.out)
    for name, split in splits.items():
        print(f"{name}: {len(split.rows):,} images, {split.shards:,} shards", flush=True)
    sizes = {name: (len(split.rows), split.shards) for name, split in splits.items()}

    def make(name: str, k: int) -> writing.Example:
        return examples.example(args, classes, splits[name], k)

    results = writing.write(args.out, sizes, make, workers)
    sources.check_unchanged(inputs, workers)
    head = {"format": 1, "num_label_classes": len(classes), "settings": settings}
    head |= {"labels": "several"} if images["train"].several else {}
    rows = {i: {"label": i, "name": name} for i, name in enumerate(classes, 1)}
    left_out = {row for split in splits.values() for row in split.left_out()}
    content = writing.manifest_content(head, rows, results, left_out)
    writing.report(content)
    _warn(content, results, is_folder)
    written = [split["examples"] for split in content["splits"].values()]
    if not written[0]:
        raise UserError("none of the training images can be used")
    if official:
        used = sum(bool(row["train"]) for row in content["classes"])
        _check_complete([*written, used], "the output", args.out)
    writing.save_data_manifest(args.out, content)
    return _last_line(args.out, content)


def _photos(source: sources.Source, by_name: bool) -> sources.Source:
    """The source without masks of its photos by name; a class folder of masks alone stays."""
    names = [file.name for file in source.files]
    found = {*unread.masks(names)}
    mixed = {os.path.dirname(name) for name in names if name not in found}
    left = {name for name in found if by_name or os.path.dirname(name) in mixed}
    skipped = [(name, "by its name a mask of another photo") for name in sorted(left)]
    files = [file for file in source.files if file.name not in left]
    return dataclasses.replace(source, files=files, skipped=(*source.skipped, *skipped))


def _check_complete(counts: Sequence[int], subject: str, out: str) -> None:
    """Raises UserError unless `subject`, the input or the output, has ImageNet's `counts`."""
    names = "train images", "validation images", "classes"
    rows = zip(counts, names, IMAGENET_COUNTS.values(), strict=True)
    if faults := [f"{n:,} {name} instead of {all_:,}" for n, name, all_ in rows if n != all_]:
        raise UserError(
            f"{subject} is not ImageNet: {', '.join(faults)}; get the missing files, or add "
            f"--subset for a part of ImageNet (no manifest.json was written to {out})"
        )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the bytes of the records depend on; the manifest has them, too."""
    settings = {
        "layout": args.layout,
        "seed": args.seed,
        "validation_fraction": None if args.validation else args.validation_fraction,
        "shards": args.shards or 0,
        "validation_shards": args.validation_shards or 0,
        "quality": args.quality,
        "tools": writing.tools(),
    }
    own = {"group": args.group, "max_side": args.max_side, "class": args.by_name}
    own |= {"several": args.several}
    settings |= {key: value for key, value in own.items() if value}
    if args.labels:
        settings["label_column"] = [args.file_column, args.label_column, args.by_split]
    return settings


def _warn(content: dict[str, Any], results: list[dict[str, Any]], is_folder: bool) -> None:
    """Warns about duplicate images, and about classes with few or no images."""
    report_repeated(results)
    for split in content["splits"]:
        if empty := [row["name"] for row in content["classes"] if not row[split]]:
            print(f"warning: {len(empty):,} classes have no {split} image: {', '.join(empty[:5])}")
    few = [f"{row['name']} ({row['train']})" for row in content["classes"] if row["train"] < _FEW]
    if is_folder and few:
        weak = f"have fewer than {_FEW} training photos: {some(few, 5)}"
        print(visible(f"warning: {len(few):,} classes {weak}"))


def _sizes(out: str, shard: str) -> np.ndarray:
    """The medians of a shard's images: the shorter side, and the number of pixels."""
    sizes = []
    for record in itertools.islice(records.read_shard(os.path.join(out, shard)), _SAMPLE):
        feature = tensorflow().train.Example.FromString(record).features.feature
        height, width = (feature[f"image/{s}"].int64_list.value[0] for s in ("height", "width"))
        sizes.append((min(height, width), height * width))
    return np.median(sizes or [(_USUAL_SIDE, _USUAL_SIDE**2)], axis=0)


def small_command(out: str, images: int, batch: int, pixels: int, **more: Any) -> str:
    """The command that trains a small model from random weights, an hour at most on two cores."""
    epochs = min(100, _SMALL_RUN // images)
    # What is seen often is learnt by heart; what is not is learnt better as it is.
    more["augmentation"] = "medium" if epochs >= _MANY_EPOCHS else "light"
    keys: dict[str, Any] = {"train_batch_size": batch, "eval_batch_size": batch, **more}
    keys |= {"train_steps": f"{epochs} epochs", "steps_per_eval": f"{epochs // 10} epochs"}
    keys["steps_per_checkpoint"] = keys["steps_per_eval"]
    if pixels < 96:
        keys |= {"image_size": pixels, "eval_image_size": pixels}
    return arguments.train_command("small.py:resnet", out, *arguments.keys(**keys))


def _last_line(out: str, content: dict[str, Any]) -> str:
    splits, classes = content["splits"], content["num_label_classes"]
    keys: dict[str, Any] = {}
    recipe, images = "resnet50", splits["train"]["examples"]
    noun = "classes"
    side, area = _sizes(out, splits["train"]["shards"][0]["name"])
    if images < arguments.FEW:
        recipe, keys = "finetune", {"init_from": foreign.RESNET.format(depth=50)}
        keys |= arguments.fitted(images, largest=64, epochs=20, least=100)
        keys["augmentation"] = "light"  # 20 epochs of a trained model
        # Evaluation antialiases in the manner of these weights, and so does the decoder.
        keys |= {"reduced_decoding": True} if area > LARGE else {}
    several = {}
    if content.get("labels") == "several":
        noun, several = "labels", {"loss": "bce_sum", "crop_area_min": _CROP}
    # A multiple of 32; below 64 the network's last map has a single cell.
    if (pixels := min(_USUAL_SIDE, max(64, 32 * math.ceil(side / 32)))) < _USUAL_SIDE:
        keys["image_size"] = pixels
    if area > LARGE:
        print(
            f"photos of {area / 1e6:.1f} megapixels take long to decode: this command with "
            "--max_side=512 --overwrite stores smaller ones, which train several times as fast"
        )
    if images < arguments.FEW:
        command = small_command(out, images, keys["train_batch_size"], pixels, **several)
        print(f"without a network, from random weights: {command}")
    size = sum(split["bytes"] for split in splits.values())
    return (
        f"{images:,} train and {splits['validation']['examples']:,} "
        f"validation images of {classes:,} {noun} are in {out} ({size / 1e6:,.0f} MB); train on "
        f"them: {arguments.train_command(recipe, out, *arguments.keys(**keys, **several))}"
    )
