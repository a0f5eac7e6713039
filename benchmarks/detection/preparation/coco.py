"""Makes TFRecords for detection from COCO's archives, or from own images in COCO's form.

    python -m scripts.prepare coco --train_images=train2017.zip --val_images=val2017.zip \\
        --annotations=annotations_trainval2017.zip --out=gs://bucket/coco
    python -m scripts.prepare coco --train_images=photos --train_annotations=train.json \\
        --val_images=photos --val_annotations=val.json --out=records
    python -m scripts.prepare coco --train_images=photos --labels=yolo --out=records

Without validation annotations a share of the images is held out. Archives are read in place. After
an interruption the same command continues. See docs/data.md.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.detection import coco
from benchmarks.detection.coco import Annotations
from benchmarks.detection.preparation import examples
from benchmarks.detection.preparation.annotations import LABEL_FORMATS, read_annotations
from common import cli, foreign
from common.data import records
from common.errors import UserError, count, some, visible
from common.images import photos
from common.preparation import arguments, holdout, sources, writing
from common.preparation.writing import report_repeated

KIND = "detection"  # in the manifest
SCORED = "instances_val2017.json"  # in OUT, whatever the name of the input
_MANY_CUT = 0.1  # of the boxes; COCO's end within a pixel of the edge
_ENOUGH = 100_000  # training images for the schedule of configs/ssd.py
_SMALL = {"ssd": (8, 10, 900), "mask_rcnn": (4, 10, 600)}  # largest batch, epochs, least steps
_SCARCE = 20  # training images: an SSD of more does not gain by stronger augmentation
_USUAL = {"train": 256, "val": 32}  # files of COCO, as Google made them
Splits = dict[str, examples.Split]


def parse(parser: cli.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments without reading files; exits with status 2 if one is invalid."""
    add, path = parser.add_argument, cli.path
    add("--train_images", required=True, type=path, help="zip or folder, local or gs://")
    add("--val_images", type=path, help="zip or folder; own images: that of training by default")
    add("--annotations", type=path, help="COCO's: zip or folder with instances_*2017.json")
    add("--train_annotations", type=path, metavar="FILE", help="of own images: COCO's form, .json")
    add("--val_annotations", type=path, metavar="FILE", help="of own images; else a share is taken")
    add("--labels", choices=LABEL_FORMATS, help="own images have labels of this form beside them")
    share = "of a set without splits (0.1)"
    add("--validation_fraction", type=holdout.fraction, metavar="F", help=share)
    group = "images in whose path it finds the same text stay in one split: '[^/_]+_'"
    add("--group", type=holdout.pattern, default="", metavar="REGEX", help=group)
    add("--masks", action="store_true", help="write each object's mask, for Mask R-CNN")
    add("--trust_boxes", action="store_true", help="accept boxes that look like no COCO boxes")
    exif = "whether the boxes are on photos as EXIF turns them, where no photo's size tells (turn)"
    add("--exif", choices=("turn", "ignore"), help=exif)
    shards = {"shards": "train files (256, or by size)", "validation_shards": "(32, or by size)"}
    args = arguments.parse_images(parser, argv, shards, "95", ("train_images", "val_images"))
    own = args.train_annotations or args.val_annotations
    if sum(map(bool, (own, args.labels, args.annotations))) != 1:
        parser.error(
            "give --annotations=annotations_trainval2017.zip for COCO, or for own images "
            "--train_annotations (and --val_annotations), or --labels"
        )
    if args.val_annotations and not args.train_annotations:
        parser.error("--val_annotations needs --train_annotations")
    is_split = bool(args.annotations or args.val_annotations)
    if is_split and (args.group or args.validation_fraction):
        both = "--group and --validation_fraction"
        parser.error(f"{both} are for images without validation annotations")
    if args.val_images and not is_split:
        parser.error("--val_images needs --val_annotations")
    if not args.annotations and not args.val_images:
        args.val_images = args.train_images
    if not args.val_images:
        parser.error("the following arguments are required: --val_images")
    args.quality = args.quality or 95
    return args


def prepare(args: argparse.Namespace) -> str:
    """Prepares the records; returns the last line to print.

    UserError for a mistake of the user's; tf.errors.OpError if reading or writing failed.
    """
    settings = _settings(args)
    flags = ("train_images", "val_images", "annotations", "train_annotations", "val_annotations")
    paths = {flag: getattr(args, flag) for flag in flags}
    inputs = sources.list_inputs(paths, args.workers, zipped=True)
    stamps = {flag: source.stamp for flag, source in inputs.items()}
    writing.State(args.out).claim({"settings": settings, "input": stamps}, args.overwrite)
    annotations, scored, inputs = read_annotations(args, inputs)
    splits = _plan(args, inputs, annotations)

    def make(name: str, k: int) -> writing.Example:
        return examples.example(splits[name], args.masks, args.quality, args.group, k)

    sizes = {name: (len(split.order), split.shards) for name, split in splits.items()}
    results = writing.write(args.out, sizes, make, args.workers, records.DETECTION_SUFFIX)
    sources.check_unchanged(inputs, args.workers)
    content = _manifest(splits, settings, results)
    writing.report(content)
    _warn(content)
    for name, split in splits.items():
        found = coco.oddities(split.annotations)
        found += coco.weaknesses(split.annotations, args.masks) if name == "train" else []
        for _, text, fix in found:
            print(visible(f"warning: {name}: {text}: {fix}"))
    report_repeated(results)
    images = content["splits"]["train"]["examples"]
    if not images:
        raise UserError("none of the training images can be used")
    writing.save(args.out, SCORED, scored)
    writing.save_data_manifest(args.out, content)
    if images < arguments.FEW:
        recipe = "mask_rcnn" if args.masks else "ssd"
        values = arguments.fitted(images, *_SMALL[recipe]) | _augmentation(images, args.masks)
        keys = arguments.keys(**values)
        command = arguments.train_command(f"small.py:{recipe}", args.out, *keys)
        print(f"without a network, from random weights: {command}")
    return _last_line(args.out, content)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the bytes of the records depend on; the manifest has them, too."""
    names = "exif", "labels", "validation_fraction", "group"
    return {name: value for name in names if (value := getattr(args, name))} | {
        "masks": args.masks,
        "seed": args.seed,
        "shards": args.shards or 0,
        "validation_shards": args.validation_shards or 0,
        "quality": args.quality,
        "tools": writing.tools(),
    }


def _plan(
    args: argparse.Namespace, inputs: dict[str, sources.Source], annotations: dict[str, Annotations]
) -> Splits:
    """Finds the images of the annotations, and plans both splits; prints their sizes."""
    images = {inputs[flag].path: inputs[flag] for flag in ("train_images", "val_images")}
    images = {path: sources.all_files(source) for path, source in images.items()}
    unused = {
        path: {i for i, f in enumerate(source.files) if f.name.lower().endswith(photos.SUFFIXES)}
        for path, source in images.items()
    }
    splits = {}
    for name, number in zip(annotations, (args.shards, args.validation_shards), strict=True):
        path = inputs[f"{name}_images"].path
        shards = (number or 0, _USUAL[name] if args.annotations else 0)
        # MLPerf's count of COCO's training images is of those with objects.
        plan = (images[path], args.seed, shards, not args.annotations)
        split = examples.plan_split(name, annotations[name], *plan)
        splits[name] = split
        unused[path] -= set(split.files.tolist())
        print(
            f"{name}: {count(len(split.files), 'image')}, {split.with_boxes:,} of them with boxes, "
            f"{count(len(split.objects), 'object')}, {count(split.shards, 'shard')}",
            flush=True,
        )
    for path, rows in unused.items():
        if rows and not args.labels:
            text = f"{path} holds {count(len(rows), 'image')} that the annotations do not list"
            print(visible(f"{text}, for one {images[path].files[min(rows)].name}"))
    return _turned(args, splits)


def _turned(args: argparse.Namespace, splits: Splits) -> Splits:
    """The splits, each with the decision whether EXIF turns its photos."""
    if args.exif or args.annotations:  # COCO's boxes are on the stored pixels
        return {k: dataclasses.replace(s, turn=args.exif == "turn") for k, s in splits.items()}
    seen = {name: examples.turned(split, args.workers) for name, split in splits.items()}
    decided = [turn for turn, _ in seen.values() if turn is not None]
    for name, (turn, doubtful) in seen.items():
        # As in the other file, which most likely is from the same tool; else as in predict.py.
        choice = turn if turn is not None else (*decided, True)[0]
        splits[name] = dataclasses.replace(splits[name], turn=choice)
        if note := examples.exif_note(choice, doubtful):
            print(f"warning: {name}: {note}")
    return splits


def _manifest(
    splits: Splits, settings: dict[str, Any], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """The content of manifest.json: a function of the input, the seed and the settings."""
    categories = splits["train"].annotations.categories
    head = {"format": 1, "kind": KIND, "num_label_classes": len(categories)}
    head |= {"settings": settings, "annotations": SCORED}
    rows = {
        number: {"label": label, "id": number, "name": name}
        for label, (number, name) in enumerate(categories, 1)
    }
    content = writing.manifest_content(head, rows, results)
    unused = {path for row in results for path, _ in row["left_out"]}
    for name, split in splits.items():
        data = split.annotations
        order = [row for row in split.order if f"{name}/{data.file_names[row]}" not in unused]
        number = np.diff(split.starts)[order]
        boxes = {
            "dropped": len(split.shares) - len(split.objects),
            "cut": split.cut,
            # Entry k is the number of records with k boxes; training needs no other scan of them.
            "per_image": np.bincount(number).tolist(),
        }
        facts = {"images": len(split.files), "with_boxes": split.with_boxes, "boxes": boxes}
        if settings["masks"]:  # which train on single objects, and on images of one orientation
            rows = data.rows[split.objects[~data.crowd[split.objects]]]
            single = np.bincount(rows, minlength=len(split.files))[order]
            boxes["single_per_image"] = np.bincount(single).tolist()
            boxes["only_crowds"] = np.flatnonzero((single == 0) & (number > 0)).tolist()
            height, width = data.sizes[order].T
            facts["upright"] = np.packbits(height > width).tobytes().hex()
        content["splits"][name] = facts | content["splits"][name]
    ids = splits["val"].annotations.image_ids[splits["val"].order]
    content["splits"]["val"]["image_ids"] = ids.tolist()  # evaluation needs no scan either
    return content


def _warn(content: dict[str, Any]) -> None:
    """Prints what differs between the annotations and the records."""
    for name, row in content["splits"].items():
        boxes = row["boxes"]
        without, empty = row["images"] - row["with_boxes"], boxes["per_image"][0]
        if name == "train" and empty:
            print(f"{name}: {count(empty, 'image')} without objects, which show what is none")
            if empty > row["with_boxes"]:
                fix = "take those out that nobody has labelled"
                print(f"warning: {name}: most images have no objects: {fix}")
        if name == "train" and without > empty:
            print(f"{name}: {count(without - empty, 'image')} without boxes: no record")
        if dropped := boxes["dropped"]:
            one, several = "box has no area inside of its", "boxes have no area inside of their"
            print(f"{name}: {count(dropped, one, several)} image")
        if cut := boxes["cut"]:
            total = sum(k * images for k, images in enumerate(boxes["per_image"]))
            one, several = "box was cut at the edge of its", "boxes were cut at the edge of their"
            text = f"{name}: {count(cut, one, several)} image"
            if cut > _MANY_CUT * total:
                text = f"warning: {text}, {cut / total:.0%} of all: look at the annotations"
            print(text)
        empty = [f"{r['id']} {r['name']}" for r in content["classes"] if not r[name]]
        if empty:
            categories = count(len(empty), "category has", "categories have")
            print(f"warning: {categories} no object in {name}: {some(empty)}")


def small_data(images: int, masks: bool = False) -> tuple[str, list[str]]:
    """The recipe, and the flags that fit it to the number of training images.

    Few images fine-tune a model. More, but fewer than COCO's, train the recipe for COCO for 60
    epochs, with its rate per image and drops at its shares of the run.
    """
    recipe, depth = ("mask_rcnn", 50) if masks else ("ssd", 34)
    values: dict[str, Any] = {"init_from": foreign.RESNET.format(depth=depth)}
    if images >= _ENOUGH:  # $MLP_GCS_RESNET_CHECKPOINT may name an SSD's backbone
        return recipe, arguments.keys(**values) if masks else []
    if images < arguments.FEW:
        values["init_from"] = foreign.MASK_RCNN if masks else values["init_from"]
        largest, epochs = (8, 20) if masks else (32, 60)  # of a ResNet, an SSD's heads are all new
        values |= arguments.fitted(images, largest, epochs, least=500)
        values |= _augmentation(images, masks)
        return f"finetune.py:{recipe}", arguments.keys(**values)
    values |= arguments.fitted(images, 16 if masks else 256, epochs=60, least=500)
    steps = values["train_steps"]
    values["learning_rate_decay_steps"] = f"{steps * 2 // 3}, {steps * 5 // 6}"
    values |= {"warmup_steps": steps // 20, "stop_at_target": False}  # the target is COCO's
    values |= {} if masks else {"bn_span": 0}  # a device has few images
    return recipe, arguments.keys(**values)


def _augmentation(images: int, masks: bool) -> dict[str, str]:
    """The key for more sizes, which so few images lack; measured for an SSD, see docs/ssd.md."""
    return {"augmentation": "medium"} if images < _SCARCE and not masks else {}


def _last_line(out: str, content: dict[str, Any]) -> str:
    splits = content["splits"]
    size = sum(split["bytes"] for split in splits.values())
    train, empty = splits["train"]["examples"], splits["train"]["boxes"]["per_image"][0]
    recipe, flags = small_data(train, content["settings"]["masks"])
    if empty and ".py" not in recipe:  # the recipes for COCO leave them out
        flags += arguments.keys(empty_images=True)
    categories = count(content["num_label_classes"], "category", "categories")
    return (
        f"{train:,} train{f' ({empty:,} without objects)' * (empty > 0)} and "
        f"{splits['val']['examples']:,} val images with objects of {categories} are in {out} "
        f"({size / 1e6:,.0f} MB); train on them: {arguments.train_command(recipe, out, *flags)}"
    )
