"""Decides which image goes into which split, in which order and with which label."""

import collections
import dataclasses
import hashlib
import json
import math
import os
import re

import numpy as np

from common import limits
from common.data import records
from common.data.shards import tensorflow
from common.errors import UserError
from common.images import manifest
from common.preparation.sources import Source, SourceError, read_all
from common.text import normal_name, text_lines

_SHARD_BYTES = 128 << 20  # large enough for object stores, small enough for a shuffle of files
_SHARDS = {"train": 1024, "validation": 128}  # of ImageNet
IMAGENET = {
    **{f"{split} images": number for split, number in manifest.IMAGENET.items()},
    "classes": 1_000,
}


@dataclasses.dataclass(frozen=True)
class Split:
    """One split, in the order of writing.

    Attributes:
        source: the images.
        rows: int64[n], the index in the source of the k-th image.
        labels: int32[n], the label of the k-th image, from 1.
        shards: the number of files.
    """

    source: Source
    rows: np.ndarray
    labels: np.ndarray
    shards: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A data set.

    Attributes:
        classes: the class names in the order of their labels from 1.
        splits: by name.
        own: whether the images are the user's own photos. These are turned upright and have
            image/class/text; ImageNet's images have neither.
    """

    classes: list[str]
    splits: dict[str, Split]
    own: bool


def make(
    train: Source, validation: Source | None, labels: list[str], settings: dict, own: bool
) -> Plan:
    """Plans a data set.

    Args:
        train: images in classes.
        validation: images in classes, or without classes for `labels`; None takes a share of
            `train`.
        labels: the class name of each image of `validation`, in the order of the file names.
        settings: seed, validation_fraction, shards and validation_shards (0: chosen here); with
            `group`, images in whose names this pattern finds the same text stay in one split.
        own: see `Plan`.

    Raises:
        SourceError: images without a class, classes without images, or labels that do not fit.
    """
    train_rows = np.array([i for i in range(len(train.names)) if train.class_name(i)], np.int64)
    if not len(train_rows):
        raise SourceError(f"{train.path} holds no images in class folders (CLASS/NAME.jpg)")
    classes = sorted({train.class_name(int(i)) for i in train_rows})
    if {c.lower() for c in classes} <= {"train", "val", "valid", "validation", "test"}:
        raise SourceError(
            f"{train.path} holds splits ({', '.join(classes)}), not classes: "
            f"give --train={os.path.join(train.path, classes[-1])} and so on"
        )
    number = {normal_name(name): i + 1 for i, name in enumerate(classes)}
    if len(number) < len(classes):
        first, second = next(
            (a, b) for a in classes for b in classes if a != b and normal_name(a) == normal_name(b)
        )
        raise SourceError(
            f"{train.path} holds the folders {ascii(first)} and {ascii(second)}, whose names look "
            "alike: rename one, or put their images into one folder"
        )
    train_labels = np.array(
        [number[normal_name(train.class_name(int(i)))] for i in train_rows], np.int32
    )
    seed = settings["seed"]
    if validation is None:
        groups = _groups([train.names[int(i)] for i in train_rows], settings.get("group", ""))
        fraction = settings["validation_fraction"]
        is_validation = _validation_share(train, groups, train_labels, fraction, seed)
        source, rows, val_labels = train, train_rows[is_validation], train_labels[is_validation]
        train_rows, train_labels = train_rows[~is_validation], train_labels[~is_validation]
    else:
        source = validation
        rows, val_labels = _validation(validation, number, labels)
    keys = [draw(seed, "train", train.names[int(i)]) for i in train_rows]
    shuffled = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    shards, val_shards = settings["shards"], settings["validation_shards"]
    splits = {
        "train": _split("train", train, train_rows[shuffled], train_labels[shuffled], shards, own),
        "validation": _split("validation", source, rows, val_labels, val_shards, own),
    }
    return Plan(classes, splits, own)


def read_labels(path: str) -> list[str]:
    """Reads a file with one class name per line.

    Raises:
        SourceError: the file does not exist, or it is not text.
    """
    if not tensorflow().io.gfile.exists(path) or records.is_folder(path):
        raise SourceError(f"there is no file {path}")
    data = read_all(path, limits.TEXT_BYTES)
    try:
        return text_lines(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is no text file") from error


def check_counts(
    counts: dict[str, int], expected: dict[str, int], name: str, subject: str, out: str
) -> None:
    """Checks that a published data set is complete.

    Args:
        counts: how many there are, by what is counted.
        expected: how many there should be.
        name: of the data set.
        subject: what was counted, "the input" or "the output".
        out: the output folder.

    Raises:
        UserError: a count is another one.
    """
    differences = ", ".join(
        f"{counts[key]:,} {key} instead of {number:,}"
        for key, number in expected.items()
        if counts[key] != number
    )
    if differences:
        raise UserError(
            f"{subject} is not {name}: {differences}; get the missing files, or add --subset for a "
            f"part of {name} (no manifest.json was written to {out})"
        )


def digest(plan: Plan, settings: dict) -> str:
    """Returns a digest of everything that the bytes of the shards depend on."""
    sha = hashlib.sha256(json.dumps([settings, plan.classes, plan.own]).encode())
    for name, split in plan.splits.items():
        sha.update(f"{name} {split.shards}".encode())
        for array in (split.rows, split.labels, split.source.offsets, split.source.sizes):
            sha.update(np.ascontiguousarray(array).tobytes())
        sha.update("\0".join(split.source.names).encode(errors="backslashreplace"))
    return sha.hexdigest()


def draw(seed: int, purpose: str, name: str) -> bytes:
    """Random bytes: a function of the arguments, on any machine and with any library."""
    text = f"{seed} {purpose} {name}"
    return hashlib.sha256(text.encode(errors="backslashreplace")).digest()


def _groups(names: list[str], pattern: str) -> list[str]:
    """The group of each image: its own name without a pattern."""
    if not pattern:
        return names
    matches = [re.search(pattern, name) for name in names]
    if None in matches:
        name = names[matches.index(None)]
        raise SourceError(f"--group={pattern}: the pattern finds nothing in {name}")
    return [match[min(1, match.re.groups)] or "" for match in matches if match]


def _validation_share(
    train: Source, groups: list[str], labels: np.ndarray, fraction: float, seed: int
) -> np.ndarray:
    """bool[n]: which images are for validation: complete groups, a share of each class or more.

    A class of two groups gives at least one of them, and keeps at least one image for training.
    """
    is_validation, rows = np.zeros(len(labels), bool), collections.defaultdict(list)
    for k, group in enumerate(groups):
        rows[group].append(k)
    left = np.bincount(labels)  # by label, how many stay for training
    for label in range(1, len(left)):
        members = np.flatnonzero(labels == label)
        number = max(1, math.floor(fraction * len(members) + 0.5))
        names = sorted(
            {groups[k] for k in members}, key=lambda name: draw(seed, "validation", name)
        )
        for name in names:
            if len(members) - left[label] >= number:
                break
            counts = np.bincount(labels[rows[name]], minlength=len(left))
            if not is_validation[rows[name][0]] and np.all((counts < left) | (counts == 0)):
                is_validation[rows[name]] = True
                left -= counts
    if not is_validation.any():
        raise SourceError(
            f"{train.path}: no class has two images (with --group: two groups), so no image is "
            "left for validation"
        )
    return is_validation


def _validation(
    source: Source, number: dict[str, int], labels: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, labels) in the order of the file names."""
    rows = np.arange(len(source.names))
    if not len(rows):
        raise SourceError(f"{source.path} holds no images")
    if labels:
        if len({source.class_name(int(i)) for i in rows}) > 1:
            raise SourceError(f"{source.path} has class folders: leave out --validation_labels")
        if len(labels) != len(rows):
            raise SourceError(
                f"--validation_labels has {len(labels):,} lines for the {len(rows):,} images "
                f"in {source.path}"
            )
        names = labels
    else:
        rows = np.array([i for i in rows if source.class_name(int(i))], np.int64)
        names = [source.class_name(int(i)) for i in rows]
        if not names:
            raise SourceError(f"{source.path} has no class folders: give --validation_labels")
    for i, name in enumerate(names):
        if normal_name(name) not in number:
            origin = f"line {i + 1} of --validation_labels" if labels else source.path
            hint = "; lines must be synsets such as n01440764" if name.isdigit() else ""
            raise SourceError(f"{origin}: no class '{name}' is among the training images{hint}")
    return rows, np.array([number[normal_name(name)] for name in names], np.int32)


def _split(
    name: str, source: Source, rows: np.ndarray, labels: np.ndarray, shards: int, own: bool
) -> Split:
    """A split of `shards` files; 0 chooses their number."""
    flag = "shards" if name == "train" else "validation_shards"
    check_shards(shards, len(rows), flag)
    usual = 0 if own else _SHARDS[name]
    shards = shards or num_shards(len(rows), int(source.sizes[rows].sum()), usual)
    return Split(source, rows, labels, shards)


def check_shards(shards: int, examples: int, flag: str) -> None:
    """Raises SourceError if there are more files, asked for by --`flag`, than examples."""
    if shards > examples:
        raise SourceError(f"--{flag}: {shards:,} files cannot be filled with {examples:,} images")


def num_shards(examples: int, size: int, usual: int) -> int:
    """The number of files for examples of `size` bytes: `usual`, unless 0 or too many for them."""
    if usual and examples >= 64 * usual:
        return usual
    # Several, so that hosts can share even a small set, but no file per image.
    return min(max(8, -(-size // _SHARD_BYTES)), max(1, examples // 16))


def left_out(plan: Plan) -> list[tuple[str, str]]:
    """Returns (path, reason) of the files that no split holds; damaged files are noticed later."""
    reasons = {}
    for split in plan.splits.values():
        used = set(split.rows.tolist())
        for name, reason in split.source.skipped:
            reasons[file_label(plan, split, name)] = reason
        for i, name in enumerate(split.source.names):
            if "/" not in name and i not in used:
                reasons[file_label(plan, split, name)] = "lies outside of the class folders"
    return sorted(reasons.items())


def file_label(plan: Plan, split: Split, name: str) -> str:
    """Returns a file's name in messages and the manifest: 'train/CLASS/FILE'."""
    is_train = split.source is plan.splits["train"].source
    return f"{'train' if is_train else 'validation'}/{name}"
