"""Plans and makes records of images: which split, order and label each gets, and its bytes."""

import argparse
import collections
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.resnet.preparation import recognise
from common.errors import some, visible
from common.images import photos
from common.preparation import holdout, schema, writing
from common.preparation.folders import whole_split
from common.preparation.sources import Source, SourceError
from common.text import alike, normal_name

_SHARDS = {"train": 1024, "validation": 128}  # ImageNet's usual numbers of files


@dataclasses.dataclass(frozen=True)
class Split:
    """One split, in the order of writing."""

    source: Source
    origin: str  # 'train' or 'validation', the flag of the source
    rows: np.ndarray  # int64[n], the index in the source of the k-th image
    labels: Mapping[int, tuple[int, ...]]  # of images by their index in the source, from 1
    shards: int  # the number of files

    def left_out(self) -> list[tuple[str, str]]:
        """(path, reason) of each file that is no image or has no class."""
        rows, used = [*self.source.skipped], set(self.rows.tolist())
        for i, file in enumerate(self.source.files):
            if not (self.source.several or self.source.class_names(i) or i in used):
                rows.append((file.name, "lies outside of the class folders"))
        return [(f"{self.origin}/{name}", reason) for name, reason in rows]


def make(
    train: Source, validation: Source | None, lines: Sequence[str], settings: dict[str, Any]
) -> tuple[list[str], dict[str, Split]]:
    """Plans a data set: its class names in the order of their labels from 1, and its splits.

    Args:
        train: images in classes.
        validation: images in classes, or without classes for `lines`; None takes a share of
            `train`.
        lines: the class name of each image of `validation`, in the order of the file names.
        settings: layout, seed, validation_fraction, and shards and validation_shards (0 chooses
            them by the layout and the size); images in whose names the pattern `group` finds the
            same text stay in one split.
    """
    classes = _classes(train, validation)
    numbers = {normal_name(name): i for i, name in enumerate(classes, 1)}
    rows, labels = _labelled(train, numbers)
    seed = settings["seed"]
    if validation is None:
        names = [train.files[i].name for i in rows]
        groups = holdout.groups(names, settings.get("group", ""))
        strata = np.array([*map(_rarest(labels, len(classes)), rows.tolist())])
        share = holdout.choose(groups, strata, settings["validation_fraction"], seed)
        if not share.any():
            reason = "no class has two images (with --group: two groups)"
            raise SourceError(f"{train.path}: {reason}, so no image is left for validation")
        parts = {"validation": (train, "train", rows[share], labels)}
        rows = rows[~share]
    else:
        parts = {"validation": (validation, "validation", *_labelled(validation, numbers, lines))}
    order = writing.shuffled(seed, "train", [train.files[i].name for i in rows])
    parts = {"train": (train, "train", rows[order], labels), **parts}
    splits = {}
    for name, (source, origin, rows, labels) in parts.items():
        flag = "shards" if name == "train" else "validation_shards"
        usual = 0 if settings["layout"] == "folder" else _SHARDS[name]
        shards = writing.num_shards(settings[flag], flag, source, rows, usual)
        splits[name] = Split(source, origin, rows, labels, shards)
    return classes, splits


def _classes(train: Source, validation: Source | None) -> list[str]:
    """The sorted names of the classes; of several labels also those that validation alone has."""
    named = [train, validation] if train.several and validation else [train]
    rows = (source.class_names(i) for source in named for i in range(len(source.files)))
    classes = sorted({*itertools.chain(*rows)})
    if not classes:
        why = "".join(f"; {name} is {reason}" for name, reason in train.skipped[:1])
        raise SourceError(f"{train.path} holds no images in class folders (CLASS/NAME.jpg){why}")
    if not train.classes:
        _check_folders(train, classes)
    for group in alike(classes):
        if len({*map(normal_name, group)}) < len(group):
            raise SourceError(
                f"{train.path} holds the folders {' and '.join(map(ascii, group))}, whose names "
                "look alike: rename one, or put their images into one folder"
            )
        text = "become different classes: if they are one, rename one"
        print(visible(f"warning: {' and '.join(map(repr, group))} {text}"))
    return classes


def _check_folders(train: Source, classes: Sequence[str]) -> None:
    """SourceError if the folders are splits, or other views of the same images, not classes."""
    splits = {whole_split(name): name for name in reversed(classes)}
    held = splits.get("validation", splits.get("test", ""))
    others = {*classes} - {*recognise.views(classes), *filter(whole_split, classes)}
    if others and not (held and "train" in splits):
        return
    fix = "put the photos of each class into a folder of its name"
    inner = {file.name.split("/")[0] for file in train.files if file.name.count("/") > 1}
    if splits.get("train") in inner:
        fix = f"give --train={os.path.join(train.path, splits['train'])}"
        fix += f" --validation={os.path.join(train.path, held)}" if held in inner else ""
    problem = "splits" if "train" in splits or held else "views of the same images"
    raise SourceError(f"{train.path} holds {problem} ({some(classes)}), not classes: {fix}")


def _rarest(labels: Mapping[int, tuple[int, ...]], classes: int) -> Callable[[int], int]:
    """The label of an image, of several the one that the fewest images have.

    Those without a label are alike, too. A share of each is a share of every label, as far as
    images can give it.
    """
    counts = collections.Counter(itertools.chain(*labels.values()))
    return lambda i: min(labels[i], key=lambda label: (counts[label], label), default=classes + 1)


def _labelled(
    source: Source, numbers: dict[str, int], lines: Sequence[str] = ()
) -> tuple[np.ndarray, dict[int, tuple[int, ...]]]:
    """(rows, labels of the rows) of the images with a class: of the folder, a table or `lines`."""
    names = [source.class_names(i) for i in range(len(source.files))]
    if not names:
        raise SourceError(f"{source.path} holds no images")
    if lines and len(set(names)) > 1:
        raise SourceError(f"{source.path} has class folders: leave out --validation_labels")
    if lines and len(lines) != len(names):
        raise SourceError(
            f"--validation_labels has {len(lines):,} lines for the {len(names):,} images "
            f"in {source.path}"
        )
    names = [(line,) for line in lines] or names
    rows = [i for i, own in enumerate(names) if own or source.several]
    if not rows:
        raise SourceError(f"{source.path} has no class folders: give --validation_labels")
    labels = {}
    for i in rows:
        if absent := [name for name in names[i] if normal_name(name) not in numbers]:
            origin = f"line {i + 1} of --validation_labels" if lines else source.path
            hint = "; lines must be synsets such as n01440764" if absent[0].isdigit() else ""
            raise SourceError(
                f"{origin}: no class '{absent[0]}' is among the training images{hint}"
            )
        labels[i] = tuple(numbers[normal_name(name)] for name in names[i])
    return np.array(rows, np.int64), labels


def example(args: argparse.Namespace, classes: list[str], split: Split, k: int) -> writing.Example:
    """Reads and converts the k-th image of a split.

    Photos in class folders are turned upright and get image/class/text; ImageNet's images do not.
    """
    i, is_folder = int(split.rows[k]), args.layout == "folder"
    path, labels = f"{split.origin}/{split.source.files[i].name}", split.labels[i]
    names = [classes[label - 1] for label in labels]
    try:
        jpeg = photos.to_jpeg(split.source.read(i), is_folder, args.quality, max_side=args.max_side)
    except photos.BadImage as error:
        return b"", (), {"left_out": [path, str(error)]}
    file, size = os.path.basename(path), (jpeg.height, jpeg.width)
    group = holdout.group(split.source.files[i].name, args.group) if args.group else ""
    texts = names if is_folder else []
    record = tf_example(jpeg.encoded, labels, names, file, size, texts, group or "")
    notes: dict[str, list] = {"changed": [path, jpeg.change]} if jpeg.change else {}
    if is_folder:
        digest = hashlib.blake2b(jpeg.encoded, digest_size=8).hexdigest()
        notes["digests"] = [digest, " ".join(map(str, labels)), path]
    return record, labels, notes


def tf_example(
    encoded: bytes,
    label: int | Sequence[int],
    synset: str | Sequence[str],
    filename: str,
    size: tuple[int, int],
    text: str | Sequence[str] = "",
    group: str = "",
) -> bytes:
    """Serializes an image, an RGB JPEG, in the ImageNet schema; always to the same bytes.

    The first class has the `label` 1, and readers subtract 1. `synset` is the WordNet id of the
    class, 'n01440764', or another short name; `text` is the class in words, if there are any. All
    three may be sequences, of images with any number of labels.
    `filename` has no folders, and `size` is height and width in pixels. `group` is what the flag
    --group has found in the image's name.
    """

    def encoded_names(names: str | Sequence[str]) -> list[bytes]:
        return [name.encode() for name in np.atleast_1d(names).tolist() if name]

    feature = {
        **schema.image(encoded, size, filename, b"JPEG", group),
        "image/colorspace": schema.strings([b"RGB"]),
        "image/channels": schema.ints([3]),
        "image/class/label": schema.ints(np.atleast_1d(np.array(label, int)).tolist()),
        "image/class/synset": schema.strings(encoded_names(synset)),
    }
    if texts := encoded_names(text):
        feature["image/class/text"] = schema.strings(texts)
    return schema.serialize(feature)
