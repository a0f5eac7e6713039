"""Opens the annotations of both splits: COCO's files, one own file, or other tools' labels."""

import argparse
import functools
import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.detection.coco import Annotations
from benchmarks.detection.preparation import labels, objects, tfrecords
from common import limits
from common.data import records
from common.errors import parse_json, visible
from common.preparation import holdout, sources
from common.preparation.folders import Folder

FORMS = ("yolo", "voc", "cvat", "labelme", "openimages", "tfrecords")


class Input(NamedTuple):
    """The annotations of a split: their name in messages, and what reads them."""

    path: str
    read: Callable[[], bytes]


def open_all(
    args: argparse.Namespace, inputs: dict[str, sources.Source]
) -> tuple[dict[str, Input], sources.Source | None]:
    """The annotations of both splits, and the images where they are not those of --train_images.

    Raises:
        SourceError: the input is not of its form, a file is missing or there twice, or images of
            one file cannot be split.
        DataError: as `Annotations.parse`.
        tf.errors.OpError: reading failed.
    """
    if args.annotations or args.val_annotations:
        return {name: _file(name, inputs) for name in records.DETECTION_SPLITS}, None
    images = None
    if not args.labels:
        path, read = _file("train", inputs)
        texts = {"train": read()}
    else:
        path = inputs["train_images"].path
        folder = Folder.open(path)
        if args.labels == "tfrecords":
            splits, notes, images = tfrecords.read(folder, args.masks)
        else:
            splits, notes = labels.read(folder, args.labels)
        for note in notes:
            print(visible(f"warning: {note}"))
        rows = [row for content in splits.values() for row in content["annotations"]]
        if args.masks and (plain := sum("segmentation" not in row for row in rows)):
            fault = f"{plain:,} of {len(rows):,} objects have no outline"
            raise sources.SourceError(f"{path}: {fault}: add them, or leave out --masks")
        texts = {name: json.dumps(content).encode() for name, content in splits.items()}
    if "val" not in texts:
        texts = _split(texts["train"], path, args)
    elif args.group or args.val_fraction:
        fault = f"--group and --val_fraction: {path} has images for train and for val already"
        raise sources.SourceError(f"{fault}: leave them out")
    opened = {name: Input(path, functools.partial(bytes, text)) for name, text in texts.items()}
    return opened, images


def _file(name: str, inputs: dict[str, sources.Source]) -> Input:
    """The annotation file of a split; SourceError if it is missing or there twice."""
    if own := inputs.get(f"{name}_annotations"):
        if not own.archive:
            raise sources.SourceError(f"--{name}_annotations: {own.path} is a folder, not a file")
        read = functools.partial(sources.read_all, own.path, limits.ANNOTATION_BYTES)
        return Input(own.path, read)
    path, base = inputs["annotations"].path, f"instances_{name}2017.json"
    fix = "for own images, give --train_annotations and --val_annotations"
    if inputs["annotations"].archive and not path.endswith(".zip"):
        raise sources.SourceError(f"--annotations: {path} is no zip or folder; {fix}")
    source = sources.all_files(inputs["annotations"])
    rows = [i for i, file in enumerate(source.files) if os.path.basename(file.name) == base]
    if len(rows) != 1:
        fault = f"holds {base} more than once" if rows else f"holds no {base}"
        raise sources.SourceError(f"--annotations: {path} {fault}; {fix}")
    read = functools.partial(source.read, rows[0], limits.ANNOTATION_BYTES)
    return Input(f"{path}/{source.files[rows[0]].name}", read)


def _split(data: bytes, path: str, args: argparse.Namespace) -> dict[str, bytes]:
    """The two files that one file of annotations becomes.

    Each category gives a share of the images in which it is the rarest one, and so do the images
    without objects.
    """
    whole = Annotations.parse(data, path)
    objects.check_boxes(whole, args.trust_boxes)
    _, kinds = np.unique(whole.category_ids, return_inverse=True)
    rows, kinds = np.unique(np.stack([whole.rows, kinds]), axis=1)  # each category of an image once
    order = np.argsort(-np.bincount(kinds)[kinds], kind="stable")
    rarest = np.full(len(whole.image_ids), kinds.max() + 2)
    rarest[rows[order]] = kinds[order] + 1  # the last one stays, which is the rarest
    groups = holdout.groups(whole.file_names, args.group)
    share = args.val_fraction or 0.1
    held_out = holdout.choose(groups, rarest, share, args.seed)
    if not held_out.any():  # each category is in one image
        held_out = holdout.choose(groups, np.ones_like(rarest), share, args.seed)
    if not held_out.any():
        fault = "a single image (with --group: group), so none is left for validation"
        raise sources.SourceError(f"{path} has {fault}")
    content, val = parse_json(data.decode("utf-8-sig")), {*whole.image_ids[held_out].tolist()}

    def part(is_val: bool) -> bytes:
        def kept(list_: str, key: str) -> list[Any]:
            return [row for row in content[list_] if (row[key] in val) == is_val]

        lists = {"images": kept("images", "id"), "annotations": kept("annotations", "image_id")}
        return json.dumps(content | lists).encode()

    return {"train": part(False), "val": part(True)}
