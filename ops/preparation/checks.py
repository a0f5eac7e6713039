"""Checks each record of a data set: framing, keys, label and image; finds duplicate images."""

import collections
import dataclasses
import hashlib
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ops import console, parallel, records
from ops.images import labelled, photos
from ops.shards import tensorflow

_FIRST = 20  # records that the report names for each kind of fault
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


def scan_all(
    shards: list[Shard],
    check_of: Callable[[Shard], Callable[[bytes, str], Row]],
    workers: int,
    findings: Findings,
    progress: console.Progress,
) -> None:
    """Scans files and fills in `shards` and `findings`.

    Args:
        shards: the files; up to 16 of them are open at a time.
        check_of: what checks the records of a file, given each and the fault of its frame, or ''.
        workers: threads that check records.
        findings: takes the faults.
        progress: counts records and bytes.
    """
    stop, readers = threading.Event(), min(len(shards), 16, max(2, workers // 4))
    ahead = -(-2 * workers // readers) + 1
    with console.Threads(workers) as pool, console.Threads(readers) as files:

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

        console.all_done([files.submit(scan, shard) for shard in shards], stop)


def features(record: bytes, fault: str) -> tuple[Any, Row | None]:
    """The features of a record, and None; of a damaged one None, and the row with its fault."""
    if fault:
        kind = "truncated" if "cut short" in fault else "damaged"
        return None, Row([], [], b"", [("errors", kind, fault)], False)
    try:
        return tensorflow().train.Example.FromString(record).features.feature, None
    except Exception:  # the module of protobuf's DecodeError depends on its version
        return None, Row([], [], b"", [("errors", "damaged", "is no tf.train.Example")], False)


def check_record(record: bytes, fault: str, labels: range) -> Row:
    """Checks the keys, label and image of a record; `fault` is that of its frame, or ''."""
    feature, broken = features(record, fault)
    if broken:
        return broken
    faults: list[tuple[str, str, str]] = []
    values: dict[str, Any] = {}
    for key, kind in {**_REQUIRED, **_USUAL, **_NAMES}.items():
        is_present = key in feature and feature[key].WhichOneof("kind")
        value = getattr(feature[key], kind).value if is_present else []
        if len(value) == 1:
            values[key] = value[0]
        elif is_present or key != "image/class/text":
            # Training parses the names as well, and refuses one of another form.
            level = "errors" if key in _REQUIRED or key in _NAMES and is_present else "warnings"
            what = f"not one value ({kind}) of" if is_present else "no"
            faults.append((level, "keys", f"has {what} {key}"))
    # Synsets first: two of ImageNet's classes are "crane" in words.
    name = next((values[key] for key in _NAMES if values.get(key)), b"")
    label = values.get("image/class/label")
    if label is not None:
        faults += _label_faults(label, labels)
    encoded, digest = values.get("image/encoded"), b""
    if encoded is not None:
        digest = hashlib.sha256(encoded).digest()[:16]
        faults += image_faults(encoded, values)
    present = [] if label is None else [label]
    names = [name.decode(errors="replace")] * len(present)
    return Row(present, names, digest, faults, bool(present and digest))


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


def _label_faults(label: int, labels: range) -> list[tuple[str, str, str]]:
    if label in labels:
        return []
    if label == 0:
        return [("errors", "label 0", "has label 0, which is reserved for a background class")]
    text = f"has label {label}, outside of {labels[0]}..{labels[-1]} (see --num_label_classes)"
    return [("errors", "label range", text)]


def image_faults(encoded: bytes, values: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The faults of an image; `values` has the record's other values by their keys."""
    try:
        height, width, _ = photos.decode(encoded).shape
    except photos.BadImage as error:
        return [("errors", "undecodable image", f"({_file_name(values)}): {error}")]
    if not encoded.startswith(labelled.MAGIC):  # TensorFlow may know more formats
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
