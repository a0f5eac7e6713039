"""Reads the annotations of both splits: COCO's files, own files, or other tools' labels."""

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Callable

import numpy as np

from benchmarks.detection.coco import Annotations
from benchmarks.detection.preparation import examples, label_folders, tfrecords
from benchmarks.detection.preparation.label_formats import FORMATS
from common import limits
from common.data import records
from common.errors import parse_json, visible
from common.preparation import holdout, sources
from common.preparation.folders import Folder
from common.text import alike, decoded, normal_name

LABEL_FORMATS = (*FORMATS, "tfrecords")  # the values of --labels
_Inputs = dict[str, sources.Source]


def read_annotations(
    args: argparse.Namespace, inputs: _Inputs
) -> tuple[dict[str, Annotations], bytes, _Inputs]:
    """(annotations by split, those of val in COCO's form, `inputs` with the images in records).

    Sets `args.exif` as other tools' labels tell. SourceError if a file is missing or there twice,
    the input is not of its form, or all images are one group.
    """
    if args.annotations or args.val_annotations:
        texts = {name: _file(name, inputs) for name in records.DETECTION_SPLITS}
    else:
        if args.labels:
            path = inputs["train_images"].path
            splits, inputs = _labels(args, inputs)
        else:
            path, read = _file("train", inputs)
            splits = {"train": read()}
        if "val" not in splits:
            splits = _split(splits["train"], path, args)
        elif args.group or args.validation_fraction:
            problem = f"{path} has images for train and for val already"
            fix = "leave out --group and --validation_fraction"
            raise sources.SourceError(f"{problem}: {fix}")
        splits["train"] = _labelled(splits["train"], path)
        texts = {name: (path, functools.partial(bytes, text)) for name, text in splits.items()}
    annotations, data = {}, b""
    for name, (path, read) in texts.items():  # val is the last one
        print(f"reading {name}: {path}", flush=True)
        annotations[name], data, notes = _parse(read(), path, args.masks)
        for note in notes if name == "train" else ():
            print(visible(f"warning: {path}: {note}"))
        examples.check_boxes(annotations[name], args.trust_boxes)
    examples.check_categories(*annotations.values())
    return annotations, data, inputs


def _parse(data: bytes, path: str, masks: bool) -> tuple[Annotations, bytes, list[str]]:
    """(annotations, their bytes, notes); categories whose names look the same become one."""
    annotations, notes = Annotations.parse(data, path, masks), []
    names, numbers = dict(annotations.categories), {}
    one = {key: numbers.setdefault(normal_name(name), key) for key, name in names.items()}
    if same := [key for key, first in one.items() if key != first]:
        pair = " and ".join(f"{key} {ascii(names[key])}" for key in (one[same[0]], same[0]))
        notes.append(f"categories {pair} look alike: they are one; rename one to keep both")
        content = parse_json(decoded(data, path))
        content["categories"] = [r for r in content["categories"] if r["id"] not in same]
        for row in content["annotations"]:
            row["category_id"] = one[row["category_id"]]
        data = json.dumps(content).encode()
        annotations = Annotations.parse(data, path, masks)
    for pair in alike(numbers):
        text = f"the categories {' and '.join(pair)} differ in their letters' form only"
        notes.append(f"{text}: rename one if they are one")
    return annotations, data, notes


def _file(name: str, inputs: _Inputs) -> tuple[str, Callable[[], bytes]]:
    """(name in messages, function that reads it) of the annotation file of a split."""
    if own := inputs.get(f"{name}_annotations"):
        if not own.archive:
            raise sources.SourceError(f"--{name}_annotations: {own.path} is a folder, not a file")
        return own.path, functools.partial(sources.read_all, own.path, limits.ANNOTATION_BYTES)
    path, base = inputs["annotations"].path, f"instances_{name}2017.json"
    fix = "for own images, give --train_annotations and --val_annotations"
    if inputs["annotations"].archive and not path.endswith(".zip"):
        raise sources.SourceError(f"--annotations: {path} is not a zip or folder; {fix}")
    source = sources.all_files(inputs["annotations"])
    rows = [i for i, file in enumerate(source.files) if os.path.basename(file.name) == base]
    if len(rows) != 1:
        problem = f"holds {base} more than once" if rows else f"holds no {base}"
        raise sources.SourceError(f"--annotations: {path} {problem}; {fix}")
    read = functools.partial(source.read, rows[0], limits.ANNOTATION_BYTES)
    return f"{path}/{source.files[rows[0]].name}", read


def _labels(args: argparse.Namespace, inputs: _Inputs) -> tuple[dict[str, bytes], _Inputs]:
    """(labels of other tools by split, in COCO's form; `inputs` with the images in records)."""
    images = inputs["train_images"]
    path, folder = images.path, Folder.open(images.path)
    if args.labels == "tfrecords":
        (splits, notes, _), files = tfrecords.read(folder, args.masks)
        images = dataclasses.replace(images, files=files, archive=False)
        inputs = inputs | {"train_images": images, "val_images": images}
    else:
        splits, notes, turns = label_folders.read(folder, args.labels, args.exif)
        args.exif = "turn" if turns else "ignore"
    detected = [each for each in label_folders.detect(folder) if each.format != args.labels]
    notes += [f"not read: {each.evidence} (--labels={each.format})" for each in detected]
    for note in notes:
        print(visible(f"warning: {note}"))
    rows = [row for content in splits.values() for row in content["annotations"]]
    if args.masks and (plain := sum("segmentation" not in row for row in rows)):
        problem = f"{plain:,} of {len(rows):,} objects have no outline"
        raise sources.SourceError(f"{path}: {problem}: add them, or leave out --masks")
    return {name: json.dumps(content).encode() for name, content in splits.items()}, inputs


def _labelled(data: bytes, path: str) -> bytes:
    """The annotations without the images that `label_folders` has marked."""
    content = parse_json(decoded(data, path))
    images = [row for row in content["images"] if row.get("labelled", True)]
    return json.dumps(content | {"images": images or content["images"]}).encode()


def _split(data: bytes, path: str, args: argparse.Namespace) -> dict[str, bytes]:
    """The two files that one file of annotations becomes.

    Each category gives a share of the images in which it is the rarest one, and so do the images
    without objects.
    """
    complete = Annotations.parse(data, path)
    examples.check_boxes(complete, args.trust_boxes)
    _, categories = np.unique(complete.category_ids, return_inverse=True)
    pairs = np.stack([complete.rows, categories])
    rows, categories = np.unique(pairs, axis=1)  # each category of an image once
    order = np.argsort(-np.bincount(categories)[categories], kind="stable")
    rarest = np.full(len(complete.image_ids), categories.max() + 2)
    rarest[rows[order]] = categories[order] + 1  # the last one stays, which is the rarest
    groups = holdout.groups(complete.file_names, args.group)
    share = args.validation_fraction or 0.1
    held_out = holdout.choose(groups, rarest, share, args.seed)
    if not held_out.any():
        few = f"warning: {path} has too few images of each category: the score says little"
        print(visible(few))
        held_out = holdout.choose(groups, np.ones_like(rarest), share, args.seed)
    if not held_out.any():
        problem = f"a single {'group' if args.group else 'image'}, so none is left for validation"
        raise sources.SourceError(f"{path} has {problem}")
    content, val = parse_json(decoded(data, path)), {*complete.image_ids[held_out].tolist()}

    def part(is_val: bool) -> bytes:
        lists = {
            name: [row for row in content[name] if (row[key] in val) == is_val]
            for name, key in (("images", "id"), ("annotations", "image_id"))
        }
        return json.dumps(content | lists).encode()

    return {"train": part(False), "val": part(True)}
