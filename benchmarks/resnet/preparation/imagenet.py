"""Makes TFRecords for training from ImageNet's archives or from any folder of class folders.

    python -m scripts.prepare imagenet --train=ILSVRC2012_img_train.tar \\
        --validation=ILSVRC2012_img_val.tar --validation_labels=synset_labels.txt \\
        --out=gs://bucket/imagenet
    python -m scripts.prepare imagenet --layout=folder --train=photos --out=records

The program reads the archives without unpacking them. After an interruption the same command
continues. See docs/data.md.
"""

import argparse
import collections
import hashlib
import itertools
import math
import os
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from benchmarks.resnet.preparation import plan, table
from common import console, foreign, limits
from common.data import records
from common.data.shards import tensorflow
from common.errors import UserError, some, visible
from common.images import photos
from common.images.pixels import LARGE
from common.preparation import arguments, holdout, schema, sources, writing
from common.preparation.folders import Folder, Reading

IMAGENET = {"train images": 1_281_167, "validation images": 50_000, "classes": 1_000}
_HEADS = 8  # files of a kind that `readings` looks into
_IN_CLASS = r"/(images?|imgs?)$"  # a folder in a class folder
_NO_CLASS = (  # folders of other views of the same images, or of images beside these
    r"(jpeg)?images?|imgs?|masks|labels|annotations|gt.*|ground_?truth|[hl]r"
    r"|rgb|depth|instances?|semantic|segmentation.*|dataset.*|frames"
)
_OBJECTS = (  # in a file with boxes or outlines
    rb'"annotations"\s*:|"images"\s*:\s*\[|<annotation|(?m:^\s*(names|nc)\s*:)'
)
_BOX = r"^x_?min$|^bbox|^x1$|encoded_?pixels|^rle"  # columns of boxes or outlines
_FEW = 20  # training photos, with which a class is hardly learnt
_SAMPLE = 100  # images whose sizes stand for all
_SMALL_RUN = 600_000  # images that configs/small.py:resnet sees in an hour
_USUAL_SIDE = 224  # pixels, in the recipes


def readings(folder: Folder) -> list[Reading]:
    """Recognises ImageNet's archives, class folders or a table in a folder, or in one file."""
    if archives := folder.named("ilsvrc2012_img_train.tar"):
        validation = folder.named("ilsvrc2012_img_val.tar")[:1]
        return [_official(folder, archives[0], *validation)]
    images = folder.named(*photos.SUFFIXES, ".heic", ".heif")  # HEIC is named as such later
    if folder.is_file or not images:
        return []
    by_folder = _class_folders(folder, images)
    if by_folder and by_folder.form == "imagenet":
        return [by_folder]
    few = 2 * len(images) < len(folder.files)  # something else, with pictures in it
    if few or _has_objects(folder, images):
        return []
    known = table.Photos(images)
    names = folder.named(".csv", ".tsv")[:_HEADS]
    tables = [_table(folder, images, known, name, bool(by_folder)) for name in names]
    by_table = max(filter(None, tables), key=lambda each: each.files, default=None)
    return [reading for reading in (by_folder, by_table) if reading]


def _official(folder: Folder, train: str, validation: str = "") -> Reading:
    """The reading of ImageNet's official archives; the preparation names what is missing."""
    flags = [f"--train={folder.full(train)}"]
    flags += [f"--validation={folder.full(validation)}"] if validation else []
    for name in folder.named(".txt")[:_HEADS]:
        if re.match(rb"n\d{8}\s*\n", folder.head(name, 16)):
            flags.append(f"--validation_labels={folder.full(name)}")
            break
    found = f"{', '.join(filter(None, [train, validation]))}: ImageNet's synsets"
    return Reading("imagenet", "imagenet", found, "records of ImageNet", flags, len(folder.files))


def _class_folders(folder: Folder, images: list[str]) -> Reading | None:
    """Class folders in one folder, or in one for each split; None if many images are elsewhere.

    Images elsewhere do not count if they are copies of images that are used (some archives hold
    their content twice, one inside the other), or if they are for validation and tests.
    """
    dirs = {name: re.sub(_IN_CLASS, "", os.path.dirname(name), flags=re.I) for name in images}
    parents = {name: os.path.dirname(path) for name, path in dirs.items()}
    groups: dict[str, set[str]] = collections.defaultdict(set)
    for path in {*dirs.values()} - {""}:
        groups[os.path.dirname(path)].add(os.path.basename(path))
    groups = {path: names for path, names in groups.items() if _are_classes(names)}
    root, splits = os.path.commonpath(groups) if groups else "", {}
    for path in sorted(groups, key=lambda path: (-len(path), path)):  # the inner of copies
        splits.setdefault(table.split_of(path.removeprefix(root)), path)
    train = splits.get("train", splits.get(""))
    held = splits.get("validation", splits.get("test", ""))
    sizes = {file.name: file.size for file in folder.files}
    files = {name: (os.path.basename(name), sizes[name]) for name in images}
    used = [name for name in images if parents[name] in (train, held or train)]
    copies = {files[name] for name in used}
    trained = [name for name in images if table.split_of(name) in ("", "train")]
    elsewhere = sum(files[name] not in copies for name in trained)
    if train is None or 10 * elsewhere > len(used):
        return None
    classes, prefix = groups[train], f"{train}/" if train else ""
    tops = {
        path.removeprefix(prefix).partition("/")[0]
        for path in dirs.values()
        if path.startswith(prefix)
    }
    if tops - {""} != classes:
        return None
    if len(classes) == IMAGENET["classes"] and all(re.fullmatch(r"n\d{8}", c) for c in classes):
        loose = {path for path in dirs.values() if table.split_of(path) == "validation"}
        if validation := held or min(loose, default=""):
            return _official(folder, train, validation)
    is_jpeg = all(name.lower().endswith((".jpg", ".jpeg")) for name in images)
    found = f"{train}/ and {held}/ of " if held else ""
    found += f"{len(classes):,} folders of {'JPEGs' if is_jpeg else 'images'}: classes "
    flags = ["--layout=folder", f"--train={folder.full(train)}"]
    flags += [f"--validation={folder.full(held)}"] if held else []
    share = "a tenth (or --validation_fraction) of each class for validation"
    makes = f"{held}/ is for validation" if held else share
    if left := sum(not name.startswith((prefix, f"{held}/")) for name in images):
        makes += f"; other images, which are not used: {left:,}"
    makes = f"records of {len(classes):,} classes, {makes}"
    return Reading("imagenet", "photos", found + some(sorted(classes)), makes, flags, len(used))


def _are_classes(names: Collection[str]) -> bool:
    """Whether folders beside each other may be classes: neither splits nor other views."""
    splits = {table.split_of(name) for name in names}
    views = any(re.fullmatch(_NO_CLASS, name, re.I) for name in names)
    return len(names) > 1 and "" in splits and len(splits) < 3 and not views


def _has_objects(folder: Folder, images: list[str]) -> bool:
    """Whether the folder has labels of objects: a file for each image, or one for all."""

    def stem(name: str) -> str:
        return os.path.splitext(os.path.basename(name))[0]

    stems = {*map(stem, images)}
    beside = sum(stem(name) in stems for name in folder.named(".xml", ".txt", ".json"))
    return 10 * beside > len(images) or any(
        re.search(_OBJECTS, folder.head(name))
        for suffix in (".json", ".xml", ".yaml", ".yml")
        for name in folder.named(suffix)[:_HEADS]
    )


def _table(
    folder: Folder, images: list[str], known: table.Photos, name: str, has_classes: bool
) -> Reading | None:
    """A table with a class for most images; None if the class folders give the same classes."""
    try:
        text = folder.head(name, limits.TEXT_BYTES).decode("utf-8-sig", "replace")
        content = table.parse(name, text, known, guess=not has_classes)
    except sources.SourceError:
        return None
    if any(re.search(_BOX, column, re.I) for column in content.names):
        return None
    rows = [(images[r.photos[0]], r.label) for r in content.rows if len(r.photos) == 1 and r.label]
    labels = dict(rows)
    trained = [name for name in images if table.split_of(name) in ("", "train")]
    if len(labels) < len(rows) or sum(name not in labels for name in trained) > len(labels):
        return None
    folders = {image: os.path.dirname(image) for image in labels}
    pairs = {(os.path.basename(folders[image]), text) for image, text in rows}
    classes, names = {text for _, text in pairs}, {name for name, _ in pairs}
    if len(classes) < 2 or (has_classes and len(pairs) == len(names) == len(classes)):
        return None
    top = folder.full(os.path.commonpath(folders.values()))
    flags = ["--layout=folder", f"--train={top}", f"--labels={folder.full(name)}"]
    flags += [f"--file_column={content.file}", f"--label_column={content.label}"]
    found = f"{len(labels):,} images and {name} (columns {content.file}, {content.label})"
    found += f": {len(classes):,} classes"
    by = f"split by {content.split}" if content.split else "a tenth of each for validation"
    return Reading("imagenet", "csv", found, f"records of these classes, {by}", flags, len(labels))


def parse(parser: console.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments without reading files."""
    add, path = parser.add_argument, console.path
    inputs = "tar of tars, or folder of class folders; local or gs://"
    add("--train", required=True, type=path, help=inputs)
    validation = "flat tar or folder (with labels), or folder of class folders"
    add("--validation", type=path, help=validation)
    labels = "a synset per line, by sorted file name"
    add("--validation_labels", type=path, metavar="FILE", help=labels)
    add("--layout", choices=("imagenet", "folder"), default="imagenet", help="folder: your photos")
    add("--subset", action="store_true", help="accept a part of ImageNet: do not check its counts")
    add(
        "--validation_fraction",
        type=holdout.fraction,
        metavar="F",
        help="share of your photos (0.1)",
    )
    group = "photos in whose 'CLASS/NAME' this regex finds the same text share a split: '[^_]+_'"
    add("--group", type=holdout.pattern, default="", metavar="REGEX", help=group)
    shrunk = "shrink photos whose short side is longer to N pixels, at quality 95 (never)"
    add("--max_side", type=console.integer(1, 65_535), default=0, metavar="N", help=shrunk)
    shards = {
        "shards": "train files (1024, or by size)",
        "validation_shards": "files (128, or by size)",
    }
    add("--labels", type=path, metavar="FILE", help="a table of your photos and their classes")
    for which in ("file", "label"):
        column = "column of --labels, by name, or by number without a header (guessed)"
        add(f"--{which}_column", default="", metavar="NAME", help=column)
    quality = "100; your photos 95"
    args = arguments.parse_images(parser, argv, shards, quality, ("train", "validation"))
    is_folder = args.layout == "folder"
    if not is_folder and not args.validation:
        parser.error("--layout=imagenet needs --validation; for your photos give --layout=folder")
    if is_folder and (args.subset or args.validation_labels):
        parser.error("--subset and --validation_labels are for --layout=imagenet")
    if args.validation and args.validation_fraction is not None:
        parser.error("give --validation or --validation_fraction, not both")
    if args.group and (args.validation or not is_folder):
        parser.error("--group is for --layout=folder without --validation")
    if args.labels and (args.validation or not is_folder):
        parser.error("--labels is for --layout=folder without --validation")
    args.by_split = args.validation_fraction is None and not args.group
    if args.validation_fraction is None:
        args.validation_fraction = 0.1
    args.quality = args.quality or (95 if is_folder or args.max_side else 100)
    return args


def prepare(args: argparse.Namespace) -> str:
    """Prepares the records; returns the last line to print."""
    is_folder, workers = args.layout == "folder", args.workers
    settings = _settings(args)
    lines = plan.read_labels(args.validation_labels) if args.validation_labels else []
    inputs = sources.list_inputs({"train": args.train, "validation": args.validation}, workers)
    for name, source in inputs.items():
        if is_folder and source.archive:
            raise sources.SourceError(f"--{name}: {source.path} is not a folder; unpack it")
    stamps = {name: source.stamp for name, source in inputs.items()}
    if lines:
        stamps["validation_labels"] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if args.labels:
        stamps["labels"] = sources.list_input(args.labels, workers, zipped=True).stamp
    writing.State(args.out).claim({"settings": settings, "input": stamps}, args.overwrite)
    images = {name: sources.images(source, is_folder, workers) for name, source in inputs.items()}
    if args.labels:
        columns = args.file_column, args.label_column
        images = table.label(images["train"], args.labels, *columns, args.by_split)
    for name, source in {} if args.labels else images.items():
        named = {source.class_name(i) for i in range(len(source.files))}
        if empty := [folder for folder in source.folders if folder not in named]:
            print(visible(f"warning: --{name}: the folders {some(empty)} have no images: no class"))
    classes, splits = plan.make(images["train"], images.get("validation"), lines, settings)
    official = not is_folder and not args.subset
    if official:
        counts = {f"{name} images": len(split.rows) for name, split in splits.items()}
        counts["classes"] = len(classes)
        _check_complete(counts, "the input", args.out)
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
    _warn(content, results, is_folder)
    written = {f"{name} images": row["examples"] for name, row in content["splits"].items()}
    if not written["train images"]:
        raise UserError("none of the training images can be used")
    if official:
        written["classes"] = sum(bool(row["train"]) for row in content["classes"])
        _check_complete(written, "the output", args.out)
    writing.save_manifest(args.out, content)
    return _last_line(args.out, content)


def _check_complete(counts: dict[str, int], subject: str, out: str) -> None:
    """Raises UserError if `subject`, the input or the output, is not all of ImageNet."""
    differences = ", ".join(
        f"{counts[key]:,} {key} instead of {number:,}"
        for key, number in IMAGENET.items()
        if counts[key] != number
    )
    if differences:
        raise UserError(
            f"{subject} is not ImageNet: {differences}; get the missing files, or add --subset for "
            f"a part of ImageNet (no manifest.json was written to {out})"
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
    settings |= {key: getattr(args, key) for key in ("group", "max_side") if getattr(args, key)}
    if args.labels:
        settings["label_column"] = [args.file_column, args.label_column, args.by_split]
    return settings


def _warn(content: dict[str, Any], results: list[dict[str, Any]], is_folder: bool) -> None:
    """Warns about duplicate images, and about classes with few or no images."""
    writing.report_repeated(results)
    for split in content["splits"]:
        if empty := [row["name"] for row in content["classes"] if not row[split]]:
            print(f"warning: {len(empty):,} classes have no {split} image: {', '.join(empty[:5])}")
    few = [f"{row['name']} ({row['train']})" for row in content["classes"] if row["train"] < _FEW]
    if is_folder and few:
        weak = f"have fewer than {_FEW} training photos: {some(few, 5)}"
        print(visible(f"warning: {len(few):,} classes {weak}"))


def _example(
    args: argparse.Namespace, classes: list[str], split: plan.Split, k: int
) -> writing.Example:
    """Reads and converts the k-th image of a split.

    Photos in class folders are turned upright and get image/class/text; ImageNet's images do not.
    """
    i, label, is_folder = int(split.rows[k]), int(split.labels[k]), args.layout == "folder"
    path, name = f"{split.origin}/{split.source.files[i].name}", classes[label - 1]
    try:
        jpeg = photos.to_jpeg(split.source.read(i), is_folder, args.quality, max_side=args.max_side)
    except photos.BadImage as error:
        return b"", (), {"left_out": [path, str(error)]}
    file, size = os.path.basename(path), (jpeg.height, jpeg.width)
    record = schema.example(jpeg.encoded, label, name, file, size, name if is_folder else "")
    notes: dict[str, list] = {"changed": [path, jpeg.change]} if jpeg.change else {}
    if is_folder:
        digest = hashlib.blake2b(jpeg.encoded, digest_size=8).hexdigest()
        notes["digests"] = [digest, label, path]
    return record, (label,), notes


def _sizes(out: str, shard: str) -> np.ndarray:
    """The medians of a shard's images: the shorter side, and the number of pixels."""
    sizes = []
    for record in itertools.islice(records.read_shard(os.path.join(out, shard)), _SAMPLE):
        feature = tensorflow().train.Example.FromString(record).features.feature
        height, width = (feature[f"image/{s}"].int64_list.value[0] for s in ("height", "width"))
        sizes.append((min(height, width), height * width))
    return np.median(sizes or [(_USUAL_SIDE, _USUAL_SIDE**2)], axis=0)


def small_command(out: str, images: int, batch: int, pixels: int) -> str:
    """The command that trains a small model from random weights, an hour at most on two cores."""
    epochs = min(100, _SMALL_RUN // images)
    keys: dict[str, Any] = {"train_batch_size": batch, "eval_batch_size": batch}
    keys |= {"train_steps": f"{epochs} epochs", "steps_per_eval": f"{epochs // 10} epochs"}
    keys["steps_per_checkpoint"] = keys["steps_per_eval"]
    if pixels < 96:
        keys |= {"image_size": pixels, "eval_image_size": pixels}
    return arguments.train_command("small.py:resnet", out, *arguments.keys(**keys))


def _last_line(out: str, content: dict[str, Any]) -> str:
    splits, classes = content["splits"], content["num_label_classes"]
    keys: dict[str, Any] = {}
    recipe, images = "resnet50", splits["train"]["examples"]
    side, area = _sizes(out, splits["train"]["shards"][0]["name"])
    if images < arguments.FEW:
        recipe, keys = "finetune", {"init_from": foreign.RESNET.format(depth=50)}
        keys |= arguments.fitted(images, largest=64, epochs=20, least=100)
        # Evaluation antialiases in the manner of these weights, and so does the decoder.
        keys |= {"reduced_decoding": True} if area > LARGE else {}
    # A multiple of 32; below 64 the network's last map has a single cell.
    if (pixels := min(_USUAL_SIDE, max(64, 32 * math.ceil(side / 32)))) < _USUAL_SIDE:
        keys["image_size"] = pixels
    if area > LARGE:
        print(
            f"photos of {area / 1e6:.1f} megapixels take long to decode: this command with "
            "--max_side=512 --overwrite stores smaller ones, which train several times as fast"
        )
    if images < arguments.FEW:
        command = small_command(out, images, keys["train_batch_size"], pixels)
        print(f"without a network, from random weights: {command}")
    size = sum(split["bytes"] for split in splits.values())
    return (
        f"{images:,} train and {splits['validation']['examples']:,} "
        f"validation images of {classes:,} classes are in {out} ({size / 1e6:,.0f} MB); train on "
        f"them: {arguments.train_command(recipe, out, *arguments.keys(**keys))}"
    )
