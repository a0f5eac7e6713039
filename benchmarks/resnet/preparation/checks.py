"""Checks records of labelled images: keys, label and image, and the number of each class."""

import argparse
import functools
import hashlib
from typing import Any

from benchmarks.resnet import records
from errors import ConfigError
from ops.preparation import checks
from ops.preparation.checks import Findings, Row, Shard

_REQUIRED = {"image/encoded": "bytes_list", "image/class/label": "int64_list"}
_USUAL = {
    "image/height": "int64_list",
    "image/width": "int64_list",
    "image/colorspace": "bytes_list",
    "image/channels": "int64_list",
    "image/format": "bytes_list",
    "image/filename": "bytes_list",
}
_NAMES = {"image/class/synset": "bytes_list", "image/class/text": "bytes_list"}


def scan(
    args: argparse.Namespace,
    shards: list[Shard],
    manifest: dict[str, Any] | None,
    findings: Findings,
) -> tuple[list[dict[str, Any]], int]:
    """Checks all records; returns a row for each class that occurs, and the number of classes."""
    declared = len(manifest["classes"]) if manifest else 0
    labels = _labels(args.num_label_classes or 0, declared, findings)
    check = functools.partial(check_record, labels=labels)
    checks.scan_all(shards, lambda shard: check, args.workers, findings)
    present = (label for shard in shards for label in shard.labels if label in labels)
    number = args.num_label_classes or declared
    highest = labels[-1] if number else max(present, default=0)
    return _counts(shards, highest, findings), number or highest


def check_record(record: bytes, fault: str, labels: range) -> Row:
    """Checks the keys, label and image of a record; `fault` is that of its frame, or ''."""
    feature, broken = checks.features(record, fault)
    if broken:
        return broken
    faults: list[tuple[str, str, str]] = []
    values: dict[str, Any] = {}
    for key, kind in {**_REQUIRED, **_USUAL, **_NAMES}.items():
        if key == "image/class/text" and not checks.has(feature, key):
            continue
        # Training parses the names as well, and refuses one of another form.
        must = key in _REQUIRED or key in _NAMES and checks.has(feature, key)
        faults += checks.take(feature, key, kind, "errors" if must else "warnings", values)
    # Synsets first: two of ImageNet's classes are "crane" in words.
    name = next((values[key] for key in _NAMES if values.get(key)), b"")
    label = values.get("image/class/label")
    if label is not None:
        faults += _label_faults(label, labels)
    encoded, digest = values.get("image/encoded"), b""
    if encoded is not None:
        digest = hashlib.sha256(encoded).digest()[:16]
        faults += checks.image_faults(encoded, values)
    present = [] if label is None else [label]
    names = [name.decode(errors="replace")] * len(present)
    return Row(present, names, digest, faults, bool(present and digest))


def _label_faults(label: int, labels: range) -> list[tuple[str, str, str]]:
    if label in labels:
        return []
    if label == 0:
        return [("errors", "label 0", "has label 0, which is reserved for a background class")]
    text = f"has label {label}, outside of {labels[0]}..{labels[-1]} (see --num_label_classes)"
    return [("errors", "label range", text)]


def _labels(num_classes: int, data_classes: int, findings: Findings) -> range:
    """The labels that training accepts; adds an error if it refuses the number of classes."""
    try:
        return records.valid_labels(num_classes, data_classes)
    except ConfigError as error:
        findings.add("errors", "label range", str(error))
        return records.valid_labels(0, data_classes)


def _counts(shards: list[Shard], highest: int, findings: Findings) -> list[dict[str, Any]]:
    """Rows of {"label", "name", split: images}; adds warnings about names and empty classes.

    Labels 1 to `highest` should have images.
    """
    counts, names = checks.tally(shards)
    labels_by_name: dict[str, list[int]] = {}
    for label, label_names in sorted(names.items()):
        if len(label_names) > 1:
            text = f"label {label} has several names: {', '.join(sorted(label_names)[:5])}"
            findings.add("warnings", "class names", text)
        for name in label_names:
            labels_by_name.setdefault(name, []).append(label)
    for name, name_labels in sorted(labels_by_name.items()):
        if len(name_labels) > 1:
            text = f"{name} is the name of labels {', '.join(map(str, name_labels[:5]))}"
            findings.add("warnings", "class names", text)
    for label in range(1, highest + 1):
        for split, images_by_label in counts.items():
            if not images_by_label[label]:
                findings.add("warnings", "no images", f"class {label} has no {split} images")
    return [
        {"label": label, "name": min(names.get(label, {""}))}
        | {split: numbers[label] for split, numbers in counts.items()}
        for label in sorted(set().union(*counts.values()))
    ]
