"""Checks a folder of TFRecords of images, of images with boxes, or of translations: every record.

    python -m scripts.validate gs://bucket/imagenet

Exit code 0: the folder is fit for training; 1: it is not; 2: it has no records. docs/data.md lists
the checks.
"""

import argparse
import collections
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.detection.preparation import checks as object_checks
from benchmarks.translation.preparation import checks as text_checks
from engine import environment
from errors import ConfigError, DataError, one_line
from ops import console, records
from ops.images import labelled, photos
from ops.images import manifest as data_manifest
from ops.preparation.checks import Findings, Row, Shard, check_record, duplicates, scan_all
from ops.shards import tensorflow

_NAME = "validate"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the arguments; exits with status 2 if one is invalid."""
    parser = console.Parser(prog="python -m scripts.validate", description=console.summary(__doc__))
    add = parser.add_argument
    add("folder", metavar="DIR", type=console.path, help="local or gs://bucket/folder")
    add("--json", action="store_true", help="print the report as JSON")
    add("--num_label_classes", type=console.whole(1, 10**7), metavar="K", help="labels are 1..K")
    add("--allow_duplicates", action="store_true", help="images that occur twice are no error")
    add("--workers", type=console.whole(1), help="threads (one per core; 8 each if DIR is gs://)")
    args = parser.parse_args(argv)
    args.workers = args.workers or console.threads(args.folder)
    return args


def validate(args: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the report, as --json prints it; None if there are no shards.

    Raises:
        tf.errors.OpError: a file cannot be read.
    """
    findings = Findings()
    if pairs := text_checks.find(args.folder):
        report = text_checks.validate(args.folder, pairs, args.workers, findings)
        errors, warnings = findings.to_json("errors"), findings.to_json("warnings")
        return {**report, "ok": not errors, "errors": errors, "warnings": warnings}
    shards = _find(args.folder, findings)
    if not shards:
        return None
    is_detection = object_checks.is_detection(shards)
    names = records.DETECTION_SPLITS if is_detection else records.SPLITS
    missing = _missing(shards, names, findings)
    manifest = _manifest(args.folder, findings)
    scan = _scan_objects if is_detection else _scan_images
    counts, number = scan(args, shards, manifest, findings)
    _check_splits(args.folder, shards, names, findings)
    duplicates(shards, "warnings" if args.allow_duplicates else "errors", findings)
    if manifest:
        try:
            compare(shards, manifest, counts, findings)
        except (KeyError, TypeError) as error:
            findings.add("errors", "manifest", f"manifest.json lacks a key: {error}")
    errors, warnings = findings.to_json("errors"), findings.to_json("warnings")
    splits = {}
    for split in sorted({shard.split for shard in shards}):
        files = [shard for shard in shards if shard.split == split]
        splits[split] = {
            "shards": len(files),
            "missing": missing[split],
            "examples": sum(shard.examples for shard in files),
            "bytes": sum(shard.size for shard in files),
        }
    return {
        "folder": args.folder,
        "ok": not errors,
        "manifest": bool(manifest),
        "splits": splits,
        "num_label_classes": number,
        "classes": counts,
        "errors": errors,
        "warnings": warnings,
    }


def _scan_images(
    args: argparse.Namespace,
    shards: list[Shard],
    manifest: dict[str, Any] | None,
    findings: Findings,
) -> tuple[list[dict[str, Any]], int]:
    """Scans labelled images; returns the counts per class, and the number of classes."""
    declared = len(manifest["classes"]) if manifest else 0
    labels = _labels(args.num_label_classes or 0, declared, findings)
    _scan(args, shards, lambda shard: functools.partial(check_record, labels=labels), findings)
    declared = args.num_label_classes or declared
    present = (label for shard in shards for label in shard.labels if label in labels)
    highest = labels[-1] if declared else max(present, default=0)
    return _counts(shards, highest, findings), declared or highest


def _scan_objects(
    args: argparse.Namespace,
    shards: list[Shard],
    manifest: dict[str, Any] | None,
    findings: Findings,
) -> tuple[list[dict[str, Any]], int]:
    """Scans images with objects, as `_scan_images`."""
    if args.num_label_classes:
        text = f"--num_label_classes is not for the records of detection in {args.folder}"
        findings.add("errors", "arguments", f"{text}; the annotations list the categories")
    for shard in shards:
        if not shard.name.endswith(records.DETECTION_SUFFIX):
            text = f"{shard.name} lies beside files that end in {records.DETECTION_SUFFIX}"
            findings.add("errors", "mixed sets", text)
    known = object_checks.known(args.folder, manifest, findings)

    def check(shard: Shard) -> Callable[[bytes, str], Row]:
        return functools.partial(
            object_checks.check_record,
            is_train=shard.split == "train",
            categories=known.categories,
        )

    _scan(args, shards, check, findings)
    rows = object_checks.counts(shards, known, findings)
    return rows, len(rows)


def _scan(
    args: argparse.Namespace,
    shards: list[Shard],
    check: Callable[[Shard], Callable[[bytes, str], Row]],
    findings: Findings,
) -> None:
    progress = console.Progress("checking", 0, total_bytes=sum(shard.size for shard in shards))
    scan_all(shards, check, args.workers, findings, progress)
    progress.close()


def compare(
    shards: list[Shard], manifest: dict[str, Any], counts: list[dict], findings: Findings
) -> None:
    """Compares the shards and their counts per class with manifest.json."""
    by_name, listed = {shard.name: shard for shard in shards}, set()
    for split in manifest["splits"].values():
        for row in split["shards"]:
            shard = by_name.get(row["name"])
            listed.add(row["name"])
            if shard is None:
                findings.add("errors", "manifest", f"{row['name']} is in the manifest, but missing")
                continue
            actual = {"examples": shard.examples, "bytes": shard.size, "sha256": shard.sha256}
            for key, value in actual.items():
                if row[key] != value:
                    text = f"{shard.name}: {key} is {value}, in the manifest {row[key]}"
                    findings.add("errors", "manifest", text)
    for name in sorted(set(by_name) - listed):
        findings.add("errors", "manifest", f"{name} is not in the manifest")
    by_label = {row["label"]: row for row in counts}
    for row in manifest["classes"]:
        images = by_label.get(row["label"], {})
        for split in manifest["splits"]:
            if images.get(split, 0) != row[split]:
                text = f"class {row['label']} ({row['name']}) has {images.get(split, 0):,} {split} "
                unit = "objects" if "id" in row else "images"
                findings.add("errors", "manifest", f"{text}{unit}, in the manifest {row[split]:,}")


def print_report(report: dict[str, Any]) -> None:
    """Prints a report as text."""
    for split, row in report["splits"].items():
        missing = f", {len(row['missing'])} missing" if row["missing"] else ""
        size = row["bytes"] / 1e6
        files = f"{row['shards']} shards{missing}"
        print(f"{split}: {row['examples']:,} examples, {files}, {size:,.1f} MB")
        if "pairs" in row:
            tokens = " and ".join(f"{number:,}" for number in row["tokens"])
            print(
                f"  {row['pairs']:,} pairs, {tokens} tokens, rows of {row['length'] or 'one pair'}"
            )
    if "vocabulary" in report:
        print(f"vocabulary: {report['vocabulary']:,} entries")
    else:
        _print_classes(report)
    print(f"manifest.json: {'compared' if report['manifest'] else 'none'}")
    for level in ("errors", "warnings"):
        for kind, group in report[level].items():
            print(f"{level[:-1].upper()} {kind}: {group['count']:,}")
            for text in group["first"]:
                print(f"  {text}")
            if group["count"] > len(group["first"]):
                print(f"  and {group['count'] - len(group['first']):,} more")
    print("fit for training" if report["ok"] else "NOT fit for training: see the errors above")


def _print_classes(report: dict[str, Any]) -> None:
    rows = report["classes"]
    print(f"classes: {len(rows):,}, num_label_classes={report['num_label_classes']}")
    for split in report["splits"]:
        numbers = sorted(row[split] for row in rows)
        if numbers:
            middle = numbers[len(numbers) // 2]
            unit = "objects" if "id" in rows[0] else "images"
            print(
                f"  {split} {unit} per class: {numbers[0]:,} to {numbers[-1]:,}, median {middle:,}"
            )
    if len(rows) <= 20:
        for row in rows:
            split = ", ".join(f"{row[split]:,} {split}" for split in report["splits"])
            print(f"  {row.get('id', row['label'])} {row['name']}: {split}")


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    args = parse(argv)
    photos.quiet()
    print(f"{_NAME}: starting TensorFlow, up to 10 s", file=sys.stderr, flush=True)
    tf = tensorflow()
    try:
        if not records.is_folder(args.folder):
            print(f"{_NAME}: there is no folder {args.folder}", file=sys.stderr)
            sys.exit(2)
        report = validate(args)
    except KeyboardInterrupt:
        print(f"\n{_NAME}: stopped", file=sys.stderr)
        sys.exit(130)
    except (OSError, UnicodeError, tf.errors.OpError) as error:
        sys.exit(f"{_NAME}: cannot read {args.folder}: {one_line(error)}")
    if report is None:
        names = "train-00000-of-01024 and the like"
        print(f"{_NAME}: {args.folder} holds no records ({names})", file=sys.stderr)
        sys.exit(2)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
    sys.exit(0 if report["ok"] else 1)


def _find(folder: str, findings: Findings) -> list[Shard]:
    """The shards in a folder and in its train/ and validation/, which training reads as well."""
    gfile, shards = tensorflow().io.gfile, []
    for subfolder in ("", *records.SPLITS):
        path = os.path.join(folder, subfolder)
        for name in records.existing_shards(path):
            file = os.path.join(path, name)
            size = gfile.stat(file).length
            shards.append(Shard(file, os.path.join(subfolder, name), name.split("-")[0], size))
        for name in records.stray_files(path):
            text = f"{os.path.join(subfolder, name)} would be read for training, but is no shard"
            findings.add("errors", "stray file", text)
    return shards


def _missing(
    shards: list[Shard], splits: tuple[str, ...], findings: Findings
) -> dict[str, list[str]]:
    """The names of missing shards by split; adds faults of the names."""
    missing: dict[str, list[str]] = {}
    for split in splits:
        files = [os.path.basename(shard.name) for shard in shards if shard.split == split]
        if not files:
            continue
        suffix = records.DETECTION_SUFFIX if files[0].endswith(records.DETECTION_SUFFIX) else ""
        names = [file.removesuffix(records.DETECTION_SUFFIX) for file in files]
        totals = sorted({int(name.rsplit("-", 1)[1]) for name in names})
        missing[split] = []
        if len(totals) > 1:
            sets = ", ".join(f"-of-{n:05d}" for n in totals)
            findings.add("errors", "mixed sets", f"{split} shards of several sets: {sets}")
        for name, number in collections.Counter(names).items():
            if number > 1:
                findings.add(
                    "errors", "mixed sets", f"{name} is in the folder and in {split}/ as well"
                )
        for n in totals:
            numbers = {int(name.split("-")[1]) for name in names if name.endswith(f"-of-{n:05d}")}
            missing[split] += [
                f"{split}-{i:05d}-of-{n:05d}{suffix}" for i in range(n) if i not in numbers
            ]
            for i in sorted(numbers):
                if i >= n:
                    text = f"{split}-{i:05d}-of-{n:05d}: numbers end at {n - 1:05d}"
                    findings.add("errors", "mixed sets", text)
        for name in missing[split]:
            findings.add("errors", "missing shard", name)
    return missing


def _manifest(folder: str, findings: Findings) -> dict[str, Any] | None:
    """The data manifest of a folder; None if it is missing or invalid."""
    gfile, path = tensorflow().io.gfile, os.path.join(folder, data_manifest.NAME)
    if not gfile.exists(path):
        return None
    with gfile.GFile(path, "rb") as file:
        data = file.read()
    try:
        data_manifest.parse(data, path)
        content = json.loads(data)
        if content.get("format") != 1:
            raise DataError(f"{path} has another format than the preparation's")
        return content
    except DataError as error:
        findings.add("errors", "manifest", str(error))
        return None


def _labels(num_classes: int, data_classes: int, findings: Findings) -> range:
    """The labels that training accepts; adds an error if it refuses the number of classes."""
    try:
        return labelled.valid_labels(num_classes, data_classes)
    except ConfigError as error:
        findings.add("errors", "label range", str(error))
        return labelled.valid_labels(0, data_classes)


def _check_splits(
    folder: str, shards: list[Shard], splits: tuple[str, ...], findings: Findings
) -> None:
    """Adds an error for each split that training refuses to open."""
    for split, name in zip(splits, ("train", "eval"), strict=True):
        try:
            paths = labelled.find_shards(folder, f"{split}-*,{split}/{split}-*", name)
            counts = [shard.examples for shard in shards if shard.split == split]
            labelled.check_not_empty(paths, counts, name)
        except DataError as error:
            findings.add("errors", "training refuses", str(error))


def _counts(shards: list[Shard], highest: int, findings: Findings) -> list[dict[str, Any]]:
    """Rows of {"label", "name", split: images}; adds warnings about names and empty classes.

    Labels 1 to `highest` should have images.
    """
    counts: dict[str, collections.Counter[int]] = {}
    names: dict[int, set[str]] = {}
    for shard in shards:
        counts.setdefault(shard.split, collections.Counter()).update(shard.labels)
        for label, shard_names in shard.names.items():
            names.setdefault(label, set()).update(shard_names)
    labels = sorted(set().union(*counts.values()))
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
        for label in labels
    ]


if __name__ == "__main__":
    # Up to 16 files are read at a time, each through a buffer of one block.
    environment.set_defaults(GCS_READ_CACHE_BLOCK_SIZE_MB="16", TF_CPP_MIN_LOG_LEVEL="3")
    console.run(main)
