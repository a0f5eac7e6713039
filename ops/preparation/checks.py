"""Checks of records that all kinds of data share: files, frames, images and the manifest."""

import argparse
import collections
import dataclasses
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from errors import DataError, parse_json
from ops import console, files, parallel, records
from ops.images import manifest, photos, pixels
from ops.shards import tensorflow

_FIRST = 20  # records that the report names for each kind of fault
_NUMBERED = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(\.tfrecord)?")
Scan = Callable[..., tuple[list[dict[str, Any]], int]]  # see `validate`


class Findings:
    """Counts faults by kind and keeps the first few; errors make a set unfit, warnings do not."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, list[str]]] = {"errors": {}, "warnings": {}}
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, level: str, kind: str, text: str) -> None:
        """Adds a fault; `level` is 'errors' or 'warnings'. Any thread may call it."""
        with self._lock:
            self._counts[level, kind] += 1
            first = self._kinds[level].setdefault(kind, [])
            first.append(text)
            if len(first) >= 2 * _FIRST:  # independent of the order of the threads
                first[:] = sorted(first)[:_FIRST]

    def to_json(self, level: str) -> dict[str, dict[str, Any]]:
        """Returns {kind: {"count": int, "first": [text]}} of a level."""
        return {
            kind: {"count": self._counts[level, kind], "first": sorted(first)[:_FIRST]}
            for kind, first in sorted(self._kinds[level].items())
        }


@dataclasses.dataclass
class Shard:
    """A file and the results of its scan.

    Attributes:
        path: of the file.
        name: relative to the folder of the set.
        split: 'train' or 'validation', or 'val'.
        size: in bytes.
        examples: the number of complete records.
        sha256: of the file, in hexadecimal.
        rows: the numbers of the records that have all that training needs.
        labels: of these records, or of their objects.
        digests: of the images of these records, 16 bytes each.
        ids: of the images of these records, if they have ids.
        names: the class names by label.
    """

    path: str
    name: str
    split: str
    size: int
    examples: int = 0
    sha256: str = ""
    rows: list[int] = dataclasses.field(default_factory=list)
    labels: list[int] = dataclasses.field(default_factory=list)
    digests: bytearray = dataclasses.field(default_factory=bytearray)
    ids: list[int] = dataclasses.field(default_factory=list)
    names: dict[int, set[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """One checked record.

    Attributes:
        labels: as stored.
        names: of their classes; '' if missing.
        digest: 16 bytes of the image's SHA-256; b'' without an image.
        faults: (level, kind, text) of each fault.
        is_usable: whether the record has all that training needs.
        image_id: of the annotations; None in records without ids.
    """

    labels: list[int]
    names: list[str]
    digest: bytes
    faults: list[tuple[str, str, str]]
    is_usable: bool
    image_id: int | None = None


def find(folder: str, findings: Findings) -> list[Shard]:
    """The shards of images in a folder, and in its train/ and validation/; adds other files."""
    shards = []
    for subfolder in ("", *records.SPLITS):
        path = os.path.join(folder, subfolder)
        for name in records.existing_shards(path):
            file = os.path.join(path, name)
            size = tensorflow().io.gfile.stat(file).length
            shards.append(Shard(file, os.path.join(subfolder, name), name.split("-")[0], size))
        for name in records.stray_files(path):
            text = f"{os.path.join(subfolder, name)} would be read for training, but is no shard"
            findings.add("errors", "stray file", text)
    return shards


def validate(
    args: argparse.Namespace,
    shards: list[Shard],
    splits: tuple[str, str],
    scan: Scan,
    findings: Findings,
) -> dict[str, Any]:
    """Checks a set of images; returns the report.

    Args:
        args: folder, workers, num_label_classes and allow_duplicates.
        shards: all files.
        splits: the names of the splits for training and for evaluation.
        scan: checks all records, given args, the shards, the content of manifest.json or None, and
            the findings; returns a row for each class, and the number of classes.
        findings: takes the faults.
    """
    absent = missing(shards, findings)
    content = _manifest(args.folder, findings)
    classes, number = scan(args, shards, content, findings)
    for split, name in zip(splits, ("train", "eval"), strict=True):
        try:  # as training does
            paths = files.find(args.folder, f"{split}-*,{split}/{split}-*", f"{name} records")
            files.check_complete(paths)
            counts = [shard.examples for shard in shards if shard.split == split]
            files.check_not_empty(paths, counts, name)
        except DataError as error:
            findings.add("errors", "training refuses", str(error))
    duplicates(shards, "warnings" if args.allow_duplicates else "errors", findings)
    if content:
        try:
            rows = [row for split in content["splits"].values() for row in split["shards"]]
            compare(shards, {row["name"]: row for row in rows}, findings)
            _compare_classes(content, classes, findings)
        except (KeyError, TypeError) as error:
            findings.add("errors", "manifest", f"manifest.json lacks a key: {error}")
    facts = {"manifest": bool(content), "num_label_classes": number, "classes": classes}
    return {**report(args.folder, shards, absent, findings), **facts}


def report(
    folder: str, shards: list[Shard], absent: dict[str, list[str]], findings: Findings
) -> dict[str, Any]:
    """The part of the report that all kinds of data have, as JSON."""
    splits = {}
    for split, names in sorted(absent.items()):
        own = [shard for shard in shards if shard.split == split]
        splits[split] = {
            "shards": len(own),
            "missing": names,
            "examples": sum(shard.examples for shard in own),
            "bytes": sum(shard.size for shard in own),
        }
    errors, warnings = findings.to_json("errors"), findings.to_json("warnings")
    facts = {"folder": folder, "ok": not errors, "splits": splits}
    return {**facts, "errors": errors, "warnings": warnings}


def missing(shards: list[Shard], findings: Findings) -> dict[str, list[str]]:
    """The names of missing shards by split; adds faults of the names."""
    absent: dict[str, list[str]] = {}
    for split in dict.fromkeys(shard.split for shard in shards):
        names = [os.path.basename(shard.name) for shard in shards if shard.split == split]
        parts = [match.groups() for name in names if (match := _NUMBERED.fullmatch(name))]
        totals = sorted({total for _, _, total, _ in parts})
        absent[split] = []
        if len(totals) > 1:
            sets = ", ".join(f"-of-{total}" for total in totals)
            findings.add("errors", "mixed sets", f"{split} shards of several sets: {sets}")
        for name, number in collections.Counter(names).items():
            if number > 1:
                text = f"{name} is in the folder and in {split}/ as well"
                findings.add("errors", "mixed sets", text)
        for total in totals:
            numbers = {int(number) for _, number, of, _ in parts if of == total}
            gaps = files.missing_numbers(numbers, int(total))
            absent[split] += [f"{split}-{i:05d}-of-{total}{parts[0][3] or ''}" for i in gaps]
            for i in sorted(numbers)[int(total) - len(gaps) :]:
                text = f"{split}-{i:05d}-of-{total}: numbers end at {int(total) - 1:05d}"
                findings.add("errors", "mixed sets", text)
        for name in absent[split]:
            findings.add("errors", "missing shard", name)
    return absent


def compare(
    shards: list[Shard],
    listed: dict[str, dict[str, Any]],
    findings: Findings,
    facts: Callable[[Shard], dict[str, Any]] = lambda shard: {},
) -> None:
    """Compares shards with the manifest's rows by name; `facts` are further values of a shard."""
    by_name = {shard.name: shard for shard in shards}
    for name in sorted(listed.keys() | by_name.keys()):
        if name not in by_name:
            findings.add("errors", "manifest", f"{name} is in the manifest, but missing")
            continue
        if name not in listed:
            findings.add("errors", "manifest", f"{name} is not in the manifest")
            continue
        shard, row = by_name[name], listed[name]
        actual = {"examples": shard.examples, "bytes": shard.size, "sha256": shard.sha256}
        for key, value in {**actual, **facts(shard)}.items():
            if row[key] != value:
                text = f"{name}: {key} is {value}, in the manifest {row[key]}"
                findings.add("errors", "manifest", text)


def tally(shards: Iterable[Shard]) -> tuple[dict[str, collections.Counter[int]], dict[int, set]]:
    """How often each label occurs in each split, and the names of each label."""
    counts: dict[str, collections.Counter[int]] = {}
    names: dict[int, set[str]] = {}
    for shard in shards:
        counts.setdefault(shard.split, collections.Counter()).update(shard.labels)
        for label, texts in shard.names.items():
            names.setdefault(label, set()).update(texts)
    return counts, names


def scan_all(
    shards: list[Shard],
    check_of: Callable[[Shard], Callable[[bytes, str], Row]],
    workers: int,
    findings: Findings,
    unit: str = "images",
) -> None:
    """Scans files and fills in `shards` and `findings`.

    Args:
        shards: the files; up to 16 of them are open at a time.
        check_of: what checks the records of a file, given each and the fault of its frame, or ''.
        workers: threads that check records.
        findings: takes the faults.
        unit: what a record is, for the progress.
    """
    progress = console.Progress("checking", 0, unit, sum(shard.size for shard in shards))
    stop, open_files = threading.Event(), min(len(shards), 16, max(2, workers // 4))
    ahead = -(-2 * workers // open_files) + 1
    with console.Threads(workers) as pool, console.Threads(open_files) as readers:

        def scan(shard: Shard) -> None:
            digest = hashlib.sha256()
            frames = records.read_frames(shard.path, digest.update)
            check_record = check_of(shard)

            def check(frame: tuple[bytes, str]) -> tuple[int, Row]:
                return len(frame[0]) + 16, check_record(*frame)

            for i, (size, row) in enumerate(parallel.ordered(pool, check, frames, ahead)):
                if stop.is_set():
                    return
                _add(shard, i, row, findings)
                progress.add(1, size)
            shard.sha256 = digest.hexdigest()
            if not shard.examples:
                findings.add("warnings", "empty shard", f"{shard.name} holds no examples")

        console.all_done([readers.submit(scan, shard) for shard in shards], stop)
    progress.close()


def features(record: bytes, fault: str) -> tuple[Any, Row | None]:
    """The features of a record, and None; of a damaged one None, and the row with its fault."""
    if fault:
        kind = "truncated" if "cut short" in fault else "damaged"
        return None, Row([], [], b"", [("errors", kind, fault)], False)
    try:
        return tensorflow().train.Example.FromString(record).features.feature, None
    except Exception:  # the module of protobuf's DecodeError depends on its version
        return None, Row([], [], b"", [("errors", "damaged", "is no tf.train.Example")], False)


def has(feature: Any, key: str) -> bool:
    """Whether a record has a list of values, of any type, with this key."""
    return key in feature and bool(feature[key].WhichOneof("kind"))


def take(
    feature: Any, key: str, kind: str, level: str, values: dict[str, Any]
) -> list[tuple[str, str, str]]:
    """Puts the one value of a key into `values`; returns the fault, of this level, if it cannot."""
    value = getattr(feature[key], kind).value if has(feature, key) else []
    if len(value) == 1:
        values[key] = value[0]
        return []
    what = f"not one value ({kind}) of" if has(feature, key) else "no"
    return [(level, "keys", f"has {what} {key}")]


def duplicates(shards: list[Shard], level: str, findings: Findings) -> None:
    """Adds a fault for each image with the bytes of an earlier one, within a split or across."""
    digests = np.frombuffer(b"".join(shard.digests for shard in shards), ">u8").reshape(-1, 2)
    if not len(digests):
        return
    order = np.lexsort((np.arange(len(digests)), digests[:, 1], digests[:, 0]))
    same = (digests[order][1:] == digests[order][:-1]).all(1)
    starts = np.cumsum([0, *(len(shard.rows) for shard in shards)])

    def locate(k: int) -> tuple[str, str]:
        s = int(np.searchsorted(starts, k, "right")) - 1
        return shards[s].split, f"{shards[s].name} record {shards[s].rows[k - int(starts[s])]}"

    first = 0
    for i in np.flatnonzero(same):
        if not (i and same[i - 1]):  # else the image is a further copy of the one before
            first = int(order[i])
        (split, record), (other, copy) = locate(first), locate(int(order[i + 1]))
        kind = "duplicates within a split" if split == other else "duplicates across splits"
        findings.add(level, kind, f"{record} and {copy} hold the same image")


def _add(shard: Shard, i: int, row: Row, findings: Findings) -> None:
    for level, kind, text in row.faults:
        is_general = level == "warnings" and kind == "keys"
        record = "records" if is_general else f"{shard.name} record {i}"
        findings.add(level, kind, f"{record} {text}")
    shard.examples += not any(kind == "truncated" for _, kind, _ in row.faults)
    if not row.is_usable:
        return
    shard.rows.append(i)
    shard.labels += row.labels
    shard.digests += row.digest
    if row.image_id is not None:
        shard.ids.append(row.image_id)
    for label, name in zip(row.labels, row.names, strict=True):
        if name:
            shard.names.setdefault(label, set()).add(name)


def image_faults(encoded: bytes, values: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The faults of an image; `values` has the record's other values by their keys."""
    try:
        height, width, _ = photos.decode(encoded).shape
    except photos.BadImage as error:
        return [("errors", "undecodable image", f"({_file_name(values)}): {error}")]
    if not encoded.startswith(pixels.MAGIC):  # TensorFlow may know more formats
        text = f"({_file_name(values)}): not a JPEG, PNG, BMP or GIF image"
        return [("errors", "undecodable image", text)]
    faults = []
    stated = values.get("image/height", height), values.get("image/width", width)
    if stated != (height, width):
        text = f"is {height}x{width}, but says {stated[0]}x{stated[1]}"
        faults.append(("warnings", "image size", text))
    if not encoded.startswith(b"\xff\xd8"):
        faults.append(("warnings", "format", f"({_file_name(values)}) is no JPEG"))
    return faults


def _file_name(values: dict[str, Any]) -> str:
    """The file name in a record, with unprintable characters as question marks."""
    return re.sub(r"[^\x20-\x7e]", "?", values.get("image/filename", b"").decode(errors="replace"))


def _manifest(folder: str, findings: Findings) -> dict[str, Any] | None:
    """The content of manifest.json; None if it is missing or invalid."""
    path = os.path.join(folder, manifest.NAME)
    try:
        if (data := files.read_manifest(folder)) is None:
            return None
        manifest.parse(data, path)
        content = parse_json(data)
        if content.get("format") != 1:
            raise DataError(f"{path} has another format than the preparation's")
        return content
    except DataError as error:
        findings.add("errors", "manifest", str(error))
        return None


def _compare_classes(
    content: dict[str, Any], classes: list[dict[str, Any]], findings: Findings
) -> None:
    """Compares the counts per class with those of the manifest."""
    by_label = {row["label"]: row for row in classes}
    for row in content["classes"]:
        counts = by_label.get(row["label"], {})
        for split in content["splits"]:
            if counts.get(split, 0) != row[split]:
                text = f"class {row['label']} ({row['name']}) has {counts.get(split, 0):,} {split} "
                unit = "objects" if "id" in row else "images"
                findings.add("errors", "manifest", f"{text}{unit}, in the manifest {row[split]:,}")
