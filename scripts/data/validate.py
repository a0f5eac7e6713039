"""Checks a folder of ImageNet-like TFRecords: every file, every record, every image.

    python -m scripts.data.validate gs://bucket/imagenet

Exit code 0: fit for training; 1: not fit; 2: there is nothing to check. docs/data.md lists the
checks.
"""

import argparse
import collections
import json
import os
import sys
from typing import Any

from engine import environment
from errors import one_line
from ops import records
from ops.shards import tensorflow
from scripts import console
from scripts.data import images
from scripts.data.checks import Findings, Shard, duplicates, scan_all

_NAME = "validate_records"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; leaves with status 2 if one is bad."""
    parser = console.Parser(prog=_NAME, description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("folder", metavar="DIR", help="local or gs://bucket/folder")
    add("--json", action="store_true", help="print the report as JSON")
    add("--num_label_classes", type=console.whole(1), metavar="K", help="labels are 1..K")
    add("--allow_duplicates", action="store_true", help="images that occur twice are no error")
    add("--workers", type=console.whole(1), help="threads (one per core; 8 each if DIR is gs://)")
    args = parser.parse_args(argv)
    args.workers = args.workers or console.threads(args.folder)
    return args


def validate(args: argparse.Namespace) -> dict[str, Any] | None:
    """The report, as --json prints it; None if there are no shards.

    Raises:
        tf.errors.OpError: a file cannot be read.
    """
    found = Findings()
    shards = _find(args.folder, found)
    if not shards:
        return None
    missing = _missing(shards, found)
    manifest = _manifest(args.folder, found)
    classes = args.num_label_classes or (manifest or {}).get("num_label_classes", 0)
    progress = console.Progress("checking", 0, total_bytes=sum(shard.size for shard in shards))
    scan_all(shards, classes, args.workers, found, progress)
    progress.close()
    counts = _counts(shards, classes, found)
    duplicates(shards, "warnings" if args.allow_duplicates else "errors", found)
    if manifest:
        compare(shards, manifest, counts, found)
    errors, warnings = found.to_json("errors"), found.to_json("warnings")
    splits = {}
    for split in sorted({shard.split for shard in shards}):
        own = [shard for shard in shards if shard.split == split]
        splits[split] = {
            "shards": len(own),
            "missing": missing[split],
            "examples": sum(shard.examples for shard in own),
            "bytes": sum(shard.size for shard in own),
        }
    return {
        "folder": args.folder,
        "ok": not errors,
        "manifest": bool(manifest),
        "splits": splits,
        "num_label_classes": classes or max([row["label"] for row in counts], default=0),
        "classes": counts,
        "errors": errors,
        "warnings": warnings,
    }


def compare(
    shards: list[Shard], manifest: dict[str, Any], counts: list[dict], found: Findings
) -> None:
    """Compares what was found with manifest.json."""
    there, listed = {shard.name: shard for shard in shards}, set()
    for split in manifest["splits"].values():
        for row in split["shards"]:
            shard = there.get(row["name"])
            listed.add(row["name"])
            if shard is None:
                found.add("errors", "manifest", f"{row['name']} is in the manifest, but not there")
                continue
            for key, is_so in (
                ("examples", shard.examples),
                ("bytes", shard.size),
                ("sha256", shard.sha256),
            ):
                if row[key] != is_so:
                    text = f"{shard.name}: {key} is {is_so}, in the manifest {row[key]}"
                    found.add("errors", "manifest", text)
    for name in sorted(set(there) - listed):
        found.add("errors", "manifest", f"{name} is not in the manifest")
    actual = {row["label"]: row for row in counts}
    for row in manifest["classes"]:
        mine = actual.get(row["label"], {})
        for split in manifest["splits"]:
            if mine.get(split, 0) != row[split]:
                text = f"class {row['label']} ({row['name']}) has {mine.get(split, 0):,} {split} "
                found.add("errors", "manifest", f"{text}images, in the manifest {row[split]:,}")


def print_report(report: dict[str, Any]) -> None:
    """Prints a report for people."""
    for split, row in report["splits"].items():
        gone = f", {len(row['missing'])} missing" if row["missing"] else ""
        size = row["bytes"] / 1e6
        print(
            f"{split}: {row['examples']:,} examples, {row['shards']} shards{gone}, {size:,.1f} MB"
        )
    rows = report["classes"]
    print(f"classes: {len(rows):,}, num_label_classes={report['num_label_classes']}")
    for split in report["splits"]:
        numbers = sorted(row[split] for row in rows)
        if numbers:
            middle = numbers[len(numbers) // 2]
            print(
                f"  {split} images per class: {numbers[0]:,} to {numbers[-1]:,}, median {middle:,}"
            )
    if len(rows) <= 20:
        for row in rows:
            split = ", ".join(f"{row[split]:,} {split}" for split in report["splits"])
            print(f"  {row['label']} {row['name']}: {split}")
    print(f"manifest.json: {'compared' if report['manifest'] else 'none'}")
    for level in ("errors", "warnings"):
        for kind, group in report[level].items():
            print(f"{level[:-1].upper()} {kind}: {group['count']:,}")
            for text in group["first"]:
                print(f"  {text}")
            if group["count"] > len(group["first"]):
                print(f"  and {group['count'] - len(group['first']):,} more")
    print("fit for training" if report["ok"] else "NOT fit for training: see the errors above")


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    args = parse(argv)
    images.quiet()
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
    except (OSError, tf.errors.OpError) as error:
        sys.exit(f"{_NAME}: cannot read {args.folder}: {one_line(error)}")
    if report is None:
        wanted = "train-00000-of-01024 and the like"
        print(f"{_NAME}: {args.folder} holds no records ({wanted})", file=sys.stderr)
        sys.exit(2)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
    sys.exit(0 if report["ok"] else 1)


def _find(folder: str, found: Findings) -> list[Shard]:
    """The shards in a folder, or in its train/ and validation/, where training looks, too."""
    gfile, shards = tensorflow().io.gfile, []
    for where in ("", *records.SPLITS):
        path = os.path.join(folder, where)
        for name in records.existing_shards(path):
            full = os.path.join(path, name)
            size = gfile.stat(full).length
            shards.append(Shard(full, os.path.join(where, name), name.split("-")[0], size))
        for name in records.stray_files(path):
            text = f"{os.path.join(where, name)} would be read for training, but is no shard"
            found.add("errors", "stray file", text)
    return shards


def _missing(shards: list[Shard], found: Findings) -> dict[str, list[str]]:
    missing: dict[str, list[str]] = {}
    for split in records.SPLITS:
        names = [os.path.basename(shard.name) for shard in shards if shard.split == split]
        if not names:
            found.add("warnings", "no split", f"there are no {split} shards")
            continue
        totals = sorted({int(name.rsplit("-", 1)[1]) for name in names})
        missing[split] = []
        if len(totals) > 1:
            sets = ", ".join(f"-of-{n:05d}" for n in totals)
            found.add("errors", "mixed sets", f"{split} shards of several sets: {sets}")
        for name, number in collections.Counter(names).items():
            if number > 1:
                found.add("errors", "mixed sets", f"{name} is there and in {split}/ as well")
        for n in totals:
            there = {int(name.split("-")[1]) for name in names if name.endswith(f"-of-{n:05d}")}
            missing[split] += [f"{split}-{i:05d}-of-{n:05d}" for i in range(n) if i not in there]
            for i in sorted(there):
                if i >= n:
                    text = f"{split}-{i:05d}-of-{n:05d}: numbers end at {n - 1:05d}"
                    found.add("errors", "mixed sets", text)
        for name in missing[split]:
            found.add("errors", "missing shard", name)
    return missing


def _manifest(folder: str, found: Findings) -> dict[str, Any] | None:
    gfile, path = tensorflow().io.gfile, os.path.join(folder, "manifest.json")
    if not gfile.exists(path):
        return None
    with gfile.GFile(path, "rb") as file:
        data = file.read()
    try:
        content = json.loads(data)
        if content["format"] == 1 and content["splits"] and content["classes"]:
            return content
        raise KeyError("format")
    except (ValueError, KeyError, TypeError):
        found.add("errors", "manifest", "manifest.json is not one of prepare_imagenet's")
        return None


def _counts(shards: list[Shard], classes: int, found: Findings) -> list[dict[str, Any]]:
    """Rows of {"label", "name", split: images}; faults in names and gaps in labels are added."""
    counts: dict[str, collections.Counter[int]] = {}
    names: dict[int, set[str]] = {}
    for shard in shards:
        counts.setdefault(shard.split, collections.Counter()).update(shard.labels)
        for label, more in shard.names.items():
            names.setdefault(label, set()).update(more)
    labels = sorted(set().union(*counts.values()))
    for label, several in sorted(names.items()):
        if len(several) > 1:
            text = f"label {label} has several names: {', '.join(sorted(several)[:5])}"
            found.add("warnings", "class names", text)
    owners: dict[str, list[int]] = {}
    for label, several in sorted(names.items()):
        for name in several:
            owners.setdefault(name, []).append(label)
    for name, several in sorted(owners.items()):
        if len(several) > 1:
            text = f"{name} is the name of labels {', '.join(map(str, several[:5]))}"
            found.add("warnings", "class names", text)
    for label in range(1, max([classes if classes != 1001 else 0, *labels], default=0) + 1):
        for split, here in counts.items():
            if not here[label]:
                found.add("warnings", "no images", f"class {label} has no {split} images")
    return [
        {"label": label, "name": min(names.get(label, {""}))}
        | {split: here[label] for split, here in counts.items()}
        for label in labels
    ]


if __name__ == "__main__":
    # Up to 16 files are read at a time, each through a buffer of a block.
    environment.set_defaults(GCS_READ_CACHE_BLOCK_SIZE_MB="16", TF_CPP_MIN_LOG_LEVEL="3")
    console.run(main)
