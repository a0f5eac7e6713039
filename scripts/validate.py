"""Checks a folder of TFRecords of images, of images with boxes, or of translations: every record.

    python -m scripts.validate gs://bucket/imagenet

Exit code 0: the folder is fit for training; 1: it is not; 2: it has no records. docs/data.md lists
the checks.
"""

import argparse
import json
import sys
from typing import Any

from benchmarks.detection.preparation import checks as objects
from benchmarks.resnet.preparation import checks as images
from benchmarks.translation.preparation import checks as pairs
from engine import environment
from errors import one_line
from ops import console, records
from ops.images import photos
from ops.preparation import checks
from ops.shards import tensorflow

_NAME = "validate"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the arguments; exits with status 2 if one is invalid."""
    about = console.summary(__doc__)
    parser = console.Parser(prog="python -m scripts.validate", description=about)
    add = parser.add_argument
    add("folder", metavar="DIR", type=console.path, help="local or gs://bucket/folder")
    add("--json", action="store_true", help="print the report as JSON")
    add("--num_label_classes", type=console.whole(1, 10**7), metavar="K", help="labels are 1..K")
    add("--allow_duplicates", action="store_true", help="images that occur twice are no error")
    threads = "threads (one per core; 8 each if DIR is gs://)"
    add("--workers", type=console.whole(1, console.MOST_WORKERS), help=threads)
    args = parser.parse_args(argv)
    args.workers = args.workers or console.threads(args.folder)
    return args


def validate(args: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the report, as --json prints it; None if there are no shards.

    Raises:
        tf.errors.OpError: a file cannot be read.
    """
    findings = checks.Findings()
    if shards := pairs.find(args.folder):
        return pairs.validate(args, shards, findings)
    shards = checks.find(args.folder, findings)
    if not shards:
        return None
    if objects.is_detection(shards):
        return checks.validate(args, shards, records.DETECTION_SPLITS, objects.scan, findings)
    return checks.validate(args, shards, records.SPLITS, images.scan, findings)


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


if __name__ == "__main__":
    # Up to 16 files are read at a time, each through a buffer of one block.
    environment.set_defaults(GCS_READ_CACHE_BLOCK_SIZE_MB="16", TF_CPP_MIN_LOG_LEVEL="3")
    console.run(main)
