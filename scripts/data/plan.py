"""Decides which image goes into which split, in which order and with which label."""

import dataclasses
import hashlib
import json
import math
import os

import numpy as np

from ops import records
from ops.shards import tensorflow
from scripts.data.sources import Source, SourceError

_SHARD_BYTES = 128 << 20  # large enough for object stores, small enough to shuffle by files
_SHARDS = {"train": 1024, "validation": 128}  # of ImageNet


@dataclasses.dataclass(frozen=True)
class Split:
    """One split, in the order of writing.

    rows: int64[n], which image of the source is the k-th.
    labels: int32[n], of the k-th, from 1.
    shards: how many files.
    """

    source: Source
    rows: np.ndarray
    labels: np.ndarray
    shards: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A data set: its class names in the order of labels from 1, and its splits by name.

    own: the user's own photos, which are turned upright and carry image/class/text. ImageNet's
    images stay as their readers know them.
    """

    classes: list[str]
    splits: dict[str, Split]
    own: bool


def make(
    train: Source, validation: Source | None, labels: list[str], settings: dict, own: bool
) -> Plan:
    """The plan of a data set.

    Args:
        train: images in classes.
        validation: images in classes, or flat with `labels`; None takes a share of `train`.
        labels: the class of each image of a flat `validation`, in the order of the file names.
        settings: seed, validation_fraction, shards and validation_shards (0: chosen here).
        own: see `Plan`.

    Raises:
        SourceError: images without a class, classes without images, or labels that do not fit.
    """
    kept = np.array([i for i in range(len(train.names)) if train.class_name(i)], np.int64)
    if not len(kept):
        raise SourceError(f"{train.path} holds no images in class folders (CLASS/NAME.jpg)")
    classes = sorted({train.class_name(int(i)) for i in kept})
    if {c.lower() for c in classes} <= {"train", "val", "valid", "validation", "test"}:
        raise SourceError(
            f"{train.path} holds splits ({', '.join(classes)}), not classes: "
            f"give --train={os.path.join(train.path, classes[-1])} and so on"
        )
    number = {name: i + 1 for i, name in enumerate(classes)}
    wanted = np.array([number[train.class_name(int(i))] for i in kept], np.int32)
    seed = settings["seed"]
    if validation is None:
        held = _held_out(train, kept, wanted, settings["validation_fraction"], seed)
        source, rows, val_labels = train, kept[held], wanted[held]
        kept, wanted = kept[~held], wanted[~held]
    else:
        source = validation
        rows, val_labels = _validation(validation, number, labels)
    keys = [_draw(seed, "train", train.names[int(i)]) for i in kept]
    shuffled = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    asked = settings["shards"], settings["validation_shards"]
    splits = {
        "train": _split("train", train, kept[shuffled], wanted[shuffled], asked[0], own),
        "validation": _split("validation", source, rows, val_labels, asked[1], own),
    }
    return Plan(classes, splits, own)


def read_labels(path: str) -> list[str]:
    """A file of one class name per line.

    Raises:
        SourceError: the file does not exist, or it is no text.
    """
    gfile = tensorflow().io.gfile
    if not gfile.exists(path) or records.is_folder(path):
        raise SourceError(f"there is no file {path}")
    with gfile.GFile(path, "rb") as file:
        data = file.read()
    try:
        return [line.strip() for line in data.decode("utf-8-sig").rstrip().splitlines()]
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is no text file") from error


def imagenet() -> dict[str, int]:
    """The numbers of images and classes of ImageNet."""
    from benchmarks import mlperf  # imports jax, which nothing else here needs

    declared = mlperf.entry("resnet").declares
    images = {"train": declared["num_train_images"], "validation": declared["num_eval_images"]}
    return images | {"classes": 1_000}


def not_imagenet(counts: dict[str, int]) -> str:
    """How the numbers of images and classes differ from ImageNet's; '' if they do not."""
    wrong = [
        f"{counts[key]:,} {key} {'' if key == 'classes' else 'images '}instead of {number:,}"
        for key, number in imagenet().items()
        if counts[key] != number
    ]
    return ", ".join(wrong)


def digest(plan: Plan, settings: dict) -> str:
    """Identifies everything that the bytes of the shards depend on."""
    sha = hashlib.sha256(json.dumps([settings, plan.classes, plan.own]).encode())
    for name, split in plan.splits.items():
        sha.update(f"{name} {split.shards}".encode())
        for array in (split.rows, split.labels, split.source.offsets, split.source.sizes):
            sha.update(np.ascontiguousarray(array).tobytes())
        sha.update("\0".join(split.source.names).encode(errors="backslashreplace"))
    return sha.hexdigest()


def _draw(seed: int, purpose: str, name: str) -> bytes:
    """Random bytes: a function of the arguments on any machine and with any library."""
    text = f"{seed} {purpose} {name}"
    return hashlib.sha256(text.encode(errors="backslashreplace")).digest()


def _held_out(
    train: Source, kept: np.ndarray, labels: np.ndarray, fraction: float, seed: int
) -> np.ndarray:
    """bool[n]: the share of each class, at least one of two images, that is for validation."""
    held = np.zeros(len(kept), bool)
    for label in range(1, int(labels.max()) + 1):
        here = np.flatnonzero(labels == label)
        number = min(max(1, math.floor(fraction * len(here) + 0.5)), len(here) - 1)
        drawn = sorted(here, key=lambda k: _draw(seed, "validation", train.names[int(kept[k])]))
        held[drawn[:number]] = True
    if not held.any():
        raise SourceError(f"{train.path}: no class has two images, so none is left to validate on")
    return held


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
        if name not in number:
            where = f"line {i + 1} of --validation_labels" if labels else source.path
            hint = "; lines must be synsets such as n01440764" if name.isdigit() else ""
            raise SourceError(f"{where}: no class '{name}' is among the training images{hint}")
    return rows, np.array([number[name] for name in names], np.int32)


def _split(
    name: str, source: Source, rows: np.ndarray, labels: np.ndarray, asked: int, own: bool
) -> Split:
    if asked > len(rows):
        flag = "shards" if name == "train" else "validation_shards"
        raise SourceError(f"--{flag}: {asked:,} files cannot be filled with {len(rows):,} images")
    if asked:
        shards = asked
    elif not own and len(rows) >= 64 * _SHARDS[name]:
        shards = _SHARDS[name]
    else:  # several even of a small set, so that hosts can share it, but not a file per image
        size = int(source.sizes[rows].sum())
        shards = min(max(8, -(-size // _SHARD_BYTES)), max(1, len(rows) // 16))
    return Split(source, rows, labels, shards)


def left_out(plan: Plan) -> list[tuple[str, str]]:
    """(path, reason) of the files that no split holds; damaged files are found later."""
    reasons = {}
    for split in plan.splits.values():
        used = set(split.rows.tolist())
        for name, reason in split.source.skipped:
            reasons[place(plan, split, name)] = reason
        for i, name in enumerate(split.source.names):
            if "/" not in name and i not in used:
                reasons[place(plan, split, name)] = "lies outside of the class folders"
    return sorted(reasons.items())


def place(plan: Plan, split: Split, name: str) -> str:
    """A file as messages and the manifest name it: 'train/CLASS/FILE', wherever the input is."""
    own = split.source is plan.splits["train"].source
    return f"{'train' if own else 'validation'}/{name}"
