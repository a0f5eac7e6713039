"""What is checked in each record of a set: framing, keys, label, image, duplicates."""

import collections
import dataclasses
import hashlib
import re
import threading
from typing import Any

import numpy as np

from ops import parallel, records
from ops.shards import tensorflow
from scripts import console
from scripts.data import images

_FIRST = 20  # places that are named of each kind of fault
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"GIF8")  # what input_pipeline.py takes
_REQUIRED = {"image/encoded": "bytes_list", "image/class/label": "int64_list"}
_USUAL = {
    "image/height": "int64_list",
    "image/width": "int64_list",
    "image/colorspace": "bytes_list",
    "image/channels": "int64_list",
    "image/class/synset": "bytes_list",
    "image/format": "bytes_list",
    "image/filename": "bytes_list",
}


class Findings:
    """Faults by kind: how many, and the first few; errors make the set unfit, warnings do not."""

    def __init__(self) -> None:
        """None found yet."""
        self._kinds: dict[str, dict[str, list[str]]] = {"errors": {}, "warnings": {}}
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, level: str, kind: str, text: str) -> None:
        """level: 'errors' or 'warnings'; from any thread."""
        with self._lock:
            self._counts[level, kind] += 1
            first = self._kinds[level].setdefault(kind, [])
            first.append(text)
            if len(first) >= 2 * _FIRST:  # the same ones whichever thread came first
                first[:] = sorted(first)[:_FIRST]

    def to_json(self, level: str) -> dict[str, dict[str, Any]]:
        """{kind: {"count", "first": [...]}}."""
        return {
            kind: {"count": self._counts[level, kind], "first": sorted(first)[:_FIRST]}
            for kind, first in sorted(self._kinds[level].items())
        }


@dataclasses.dataclass
class Shard:
    """A file and what was found in it: `labels` and 16-byte `digests` of images, row by row."""

    path: str
    name: str
    split: str
    size: int
    examples: int = 0
    sha256: str = ""
    rows: list[int] = dataclasses.field(default_factory=list)
    labels: list[int] = dataclasses.field(default_factory=list)
    digests: bytearray = dataclasses.field(default_factory=bytearray)
    names: dict[int, set[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """One checked record; label None where there is none."""

    label: int | None
    name: str
    digest: bytes
    faults: list[tuple[str, str, str]]


def scan_all(
    shards: list[Shard], classes: int, workers: int, found: Findings, progress: console.Progress
) -> None:
    """Fills in `shards`: a few files at a time, their records in a pool of `workers` threads."""
    stop, at_once = threading.Event(), min(len(shards), 16, max(2, workers // 4))
    ahead = -(-2 * workers // at_once) + 1
    with console.Threads(workers) as pool, console.Threads(at_once) as files:

        def scan(shard: Shard) -> None:
            digest = hashlib.sha256()
            frames = records.read_frames(shard.path, digest.update)

            def check(frame: tuple[bytes, str]) -> tuple[int, Row]:
                return len(frame[0]) + 16, check_record(*frame, classes)

            for i, (size, row) in enumerate(parallel.ordered(pool, check, frames, ahead)):
                if stop.is_set():
                    return
                _add(shard, i, row, found)
                progress.add(1, size)
            shard.sha256 = digest.hexdigest()
            if not shard.examples:
                found.add("warnings", "empty shard", f"{shard.name} holds no examples")

        console.all_done([files.submit(scan, shard) for shard in shards], stop)


def check_record(record: bytes, fault: str, classes: int) -> Row:
    """Checks one record's keys, label and image; `fault` is what its frame had, or ''."""
    if fault:
        kind = "truncated" if "cut short" in fault else "damaged"
        return Row(None, "", b"", [("errors", kind, fault)])
    tf = tensorflow()
    try:
        feature = tf.train.Example.FromString(record).features.feature
    except Exception:  # protobuf's DecodeError, of which module depends on its version
        return Row(None, "", b"", [("errors", "damaged", "is no tf.train.Example")])
    faults: list[tuple[str, str, str]] = []
    values: dict[str, Any] = {}
    for key, kind in {**_REQUIRED, **_USUAL}.items():
        level = "errors" if key in _REQUIRED else "warnings"
        value = getattr(feature[key], kind).value if key in feature else []
        if len(value) == 1:
            values[key] = value[0]
        else:
            what = "no" if key not in feature else f"not one value ({kind}) of"
            faults.append((level, "keys", f"has {what} {key}"))
    text = feature["image/class/text"].bytes_list.value if "image/class/text" in feature else []
    # Synsets first: two of ImageNet's classes are "crane" in words.
    name = next((v for v in [values.get("image/class/synset", b""), *text] if v), b"")
    label = values.get("image/class/label")
    if label is not None:
        faults += _label_faults(label, classes)
    encoded, digest = values.get("image/encoded"), b""
    if encoded is not None:
        digest = hashlib.sha256(encoded).digest()[:16]
        faults += _image_faults(encoded, values)
    return Row(label, name.decode(errors="replace"), digest, faults)


def duplicates(shards: list[Shard], level: str, found: Findings) -> None:
    """Finds images with the same bytes, within a split and across."""
    digests = np.frombuffer(b"".join(shard.digests for shard in shards), ">u8").reshape(-1, 2)
    if not len(digests):
        return
    order = np.lexsort((np.arange(len(digests)), digests[:, 1], digests[:, 0]))
    same = (digests[order][1:] == digests[order][:-1]).all(1)
    starts = np.cumsum([0, *(len(shard.rows) for shard in shards)])

    def place(k: int) -> tuple[str, str]:
        s = int(np.searchsorted(starts, k, "right")) - 1
        return shards[s].split, f"{shards[s].name} record {shards[s].rows[k - int(starts[s])]}"

    first = 0
    for i in np.flatnonzero(same):
        if not (i and same[i - 1]):  # else it is one more of the image before
            first = int(order[i])
        (split, where), (other, there) = place(first), place(int(order[i + 1]))
        kind = "duplicates within a split" if split == other else "duplicates across splits"
        found.add(level, kind, f"{where} and {there} hold the same image")


def _add(shard: Shard, i: int, row: Row, found: Findings) -> None:
    for level, kind, text in row.faults:
        place = "records" if level == "warnings" and kind == "keys" else f"{shard.name} record {i}"
        found.add(level, kind, f"{place} {text}")
    shard.examples += not any(kind == "truncated" for _, kind, _ in row.faults)
    if row.label is None or not row.digest:
        return
    shard.rows.append(i)
    shard.labels.append(row.label)
    shard.digests += row.digest
    if row.name:
        shard.names.setdefault(row.label, set()).add(row.name)


def _label_faults(label: int, classes: int) -> list[tuple[str, str, str]]:
    low, high = (0, 1000) if classes == 1001 else (1, classes or label)
    if label == 0 and low:
        return [("errors", "label 0", "has label 0, which is kept for a background class")]
    if not low <= label <= high:
        return [("errors", "label range", f"has label {label}, outside of {low}..{high}")]
    return []


def _image_faults(encoded: bytes, values: dict[str, Any]) -> list[tuple[str, str, str]]:
    try:
        height, width, _ = images.decode(encoded).shape
    except images.BadImage as error:
        return [("errors", "undecodable image", f"({_shown(values)}): {error}")]
    if not encoded.startswith(_MAGIC):  # TensorFlow may know more formats than training takes
        text = f"({_shown(values)}): not a JPEG, PNG, BMP or GIF image"
        return [("errors", "undecodable image", text)]
    faults = []
    stated = values.get("image/height", height), values.get("image/width", width)
    if stated != (height, width):
        text = f"is {height}x{width}, but says {stated[0]}x{stated[1]}"
        faults.append(("warnings", "image size", text))
    if not encoded.startswith(b"\xff\xd8"):
        faults.append(("warnings", "format", f"({_shown(values)}) is no JPEG"))
    return faults


def _shown(values: dict[str, Any]) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", values.get("image/filename", b"").decode(errors="replace"))
