"""Plans the shards of a data set, writes those that are missing, and describes them in a manifest.

OUT/prepare_state/ has plan.json, which says what the folder is for, and a summary of each finished
shard, which becomes a part of the manifest. A shard without its summary is written again.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import PIL
from PIL import features

from common import console, pools
from common.data import files, records
from common.data.shards import tensorflow
from common.errors import UserError, parse_json, visible
from common.preparation.sources import SourceError

_SHARD_BYTES = 128 << 20  # large enough for object stores, small enough for a shuffle of files
FACTS = ("examples", "bytes", "sha256")  # of a shard


class State:
    """The files in OUT/prepare_state/; each is written completely or not at all."""

    def __init__(self, out: str):
        """`out` is the output folder; it need not exist."""
        self.out = out
        self._folder = os.path.join(out, "prepare_state")

    def read(self, name: str) -> Any:
        """Reads the JSON document `name`; None if it is missing or damaged."""
        try:
            return parse_json(files.read(os.path.join(self._folder, name)) or b"null")
        except ValueError:
            return None

    def write(self, name: str, content: Any) -> None:
        """Writes the JSON document `name`."""
        files.write(os.path.join(self._folder, name), [json.dumps(content).encode()])

    def claim(self, plan: dict[str, dict[str, Any]], overwrite: bool) -> None:
        """Writes plan.json, and deletes partial files of an interrupted run.

        Args:
            plan: {"settings": {...}, "input": {flag: stamp}}, JSON.
            overwrite: deletes the records of another plan.

        Raises:
            UserError: the folder holds records of another plan.
        """
        gfile = tensorflow().io.gfile
        old, existing = self.read("plan.json"), self._first_file()
        if existing and old != plan and not overwrite:
            if old is None:
                fault = f"already holds {existing}"
            else:
                before, after = ({**p["settings"], **p["input"]} for p in (old, plan))
                keys = sorted({*before, *after})
                changed = [f"--{key}" for key in keys if before.get(key) != after.get(key)]
                changes = f"(changed: {', '.join(changed)})"
                fault = f"holds shards of another input or other settings {changes}"
            raise UserError(f"{self.out} {fault}; choose another --out, or --overwrite")
        if old != plan:
            self.remove_manifest()
            if gfile.exists(self._folder):
                gfile.rmtree(self._folder)
            records.remove_shards(self.out)
            self.write("plan.json", plan)
        records.remove_unfinished(self.out)
        for name in records.list_folder(self._folder):
            if name.startswith("tmp."):
                gfile.remove(os.path.join(self._folder, name))

    def remove_manifest(self) -> None:
        """Deletes the manifest, which describes a complete set."""
        path = os.path.join(self.out, files.MANIFEST)
        if tensorflow().io.gfile.exists(path):
            tensorflow().io.gfile.remove(path)

    def refuse_others(self, is_ours: bool) -> None:
        """Raises UserError if the folder has records, unless they are of a set that may go."""
        if not is_ours and (file := self._first_file()):
            raise UserError(
                f"{self.out} already holds {file} of another data set; choose another --out"
            )

    def _first_file(self) -> str:
        """The name of a shard or manifest in the output folder; '' if it has neither."""
        names = records.list_folder(self.out)
        manifest = [files.MANIFEST] if files.MANIFEST in names else []
        return next(iter([*records.existing_shards(self.out), *manifest]), "")

    def finished(self, names: Sequence[str], key: str | None = None) -> dict[str, dict[str, Any]]:
        """The summaries of the finished shards by name; `key` as in `summary`."""
        with pools.Threads(16) as pool:
            rows = list(pool.map(lambda name: self.summary(name, key), names))
        finished = {name: row for name, row in zip(names, rows, strict=True) if row}
        if finished:
            counts = f"{len(finished):,} of {len(names):,}"
            print(f"continuing: {counts} shards are finished", flush=True)
        return finished

    def summary(self, name: str, key: str | None = None) -> dict[str, Any] | None:
        """The summary of a shard; None if it is not finished, or with another key than `key`."""
        gfile, path = tensorflow().io.gfile, os.path.join(self.out, name)
        result = self.read(f"{name}.json")
        if not result or key not in (None, result.get("key")) or not gfile.exists(path):
            return None
        return result if gfile.stat(path).length == result["bytes"] else None


@dataclasses.dataclass(frozen=True)
class Example:
    """One image as a record.

    Attributes:
        record: the serialized example; b'' if the image cannot be used.
        labels: of the image or of its objects; the manifest counts them.
        path: the file's name in the manifest.
        fault: why the image cannot be used; '' if it can.
        change: why the image was re-encoded; '' if it was not.
        digest: of the image, where equal ones are looked for.
    """

    record: bytes
    labels: tuple[int, ...]
    path: str
    fault: str = ""
    change: str = ""
    digest: str = ""


def write(
    out: str,
    splits: Mapping[str, tuple[int, int]],
    make: Callable[[str, int], Example],
    workers: int,
    suffix: str = "",
) -> list[dict[str, Any]]:
    """Writes the shards that are not finished yet, in a folder that was claimed.

    Conversion spends its time outside of Python's lock (file reads, libjpeg). Threads therefore use
    all cores, and one TensorFlow serves them.

    Args:
        out: the output folder.
        splits: {split: (examples, files)}, in order.
        make: reads and converts the k-th image of a split; threads call it.
        workers: threads that read and convert images.
        suffix: of the names of the shards.

    Returns:
        The summary of each shard in order: {"split", "name", "examples", "bytes", "sha256",
        "classes": {label: number}, "left_out": [[path, reason]], "changed": [[path, reason]],
        "digests": [[digest, label, path]]}.

    Raises:
        tf.errors.OpError, UserError: the input cannot be read, or the output cannot be written.
    """
    state, stop = State(out), threading.Event()
    planned = {
        records.shard_name(split, i, count) + suffix: (split, rows)
        for split, (examples, count) in splits.items()
        for i, rows in enumerate(records.shard_runs(examples, count))
    }
    results = state.finished(list(planned))
    unfinished = [name for name in planned if name not in results]
    # Every worker has an image to convert while one shard waits for its next image.
    writers = max(1, min(len(unfinished), 16, max(2, workers // 4)))
    ahead = -(-2 * workers // writers) + 1

    def write_one(name: str) -> None:
        split, rows = planned[name]
        classes: collections.Counter[int] = collections.Counter()
        notes: dict[str, list] = {"left_out": [], "changed": [], "digests": []}

        def serialized() -> Iterator[bytes]:
            for one in pools.ordered(pool, functools.partial(make, split), rows, ahead):
                if stop.is_set():
                    raise InterruptedError("another shard failed")
                progress.add(1, len(one.record))
                if one.fault:
                    notes["left_out"].append([one.path, one.fault])
                    continue
                if one.change:
                    notes["changed"].append([one.path, one.change])
                if one.digest:
                    notes["digests"].append([one.digest, one.labels[0], one.path])
                classes.update(one.labels)
                yield one.record

        written = records.write_shard(os.path.join(out, name), serialized())
        results[name] = written | {"classes": {str(k): classes[k] for k in sorted(classes)}} | notes
        state.write(f"{name}.json", results[name])

    if unfinished:
        state.remove_manifest()
        progress = console.ProgressBar("writing", sum(len(planned[n][1]) for n in unfinished))
        with pools.Threads(workers) as pool, pools.Threads(writers) as writer_pool:
            tasks = [writer_pool.submit(write_one, name) for name in unfinished]
            pools.all_done(tasks, stop)
        progress.close()
    return [{"split": split, "name": n, **results[n]} for n, (split, _) in planned.items()]


def draw(seed: int, purpose: str, name: str) -> bytes:
    """Random bytes: a function of the arguments, on any machine and with any library."""
    text = f"{seed} {purpose} {name}"
    return hashlib.sha256(text.encode(errors="backslashreplace")).digest()


def shuffled(seed: int, purpose: str, names: Sequence[str]) -> np.ndarray:
    """int64[n], an order of the names that `draw` decides."""
    keys = [draw(seed, purpose, name) for name in names]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def num_shards(asked: int, flag: str, examples: int, size: int, usual: int) -> int:
    """The number of files of a split.

    Args:
        asked: by --`flag`; 0 if it was not.
        flag: for the message.
        examples: of the split.
        size: their bytes.
        usual: the number of a published set, unless 0 or too many for the examples.

    Raises:
        SourceError: there are fewer examples than files.
    """
    if asked > examples:
        raise SourceError(f"--{flag}: {asked:,} files cannot be filled with {examples:,} images")
    if asked or (usual and examples >= 64 * usual):
        return asked or usual
    # Several, so that hosts can share even a small set, but no file per image.
    return min(max(8, -(-size // _SHARD_BYTES)), max(1, examples // 16))


def check_counts(
    counts: dict[str, int], expected: dict[str, int], name: str, subject: str, out: str
) -> None:
    """Raises UserError if a published data set is not complete.

    Args:
        counts: how many there are, by what is counted.
        expected: how many there should be.
        name: of the data set.
        subject: what was counted, "the input" or "the output".
        out: the output folder.
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


def tools() -> dict[str, str]:
    """Returns the versions of the libraries that re-encode images."""
    return {"pillow": PIL.__version__, "libjpeg": str(features.version("libjpeg_turbo"))}


def split_rows(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The manifest's rows of splits: examples, bytes and shards."""
    splits: dict[str, dict[str, Any]] = {}
    for row in results:
        split = splits.setdefault(row["split"], {"examples": 0, "bytes": 0, "shards": []})
        split["shards"].append({key: row[key] for key in ("name", *FACTS)})
        for key in ("examples", "bytes"):
            split[key] += row[key]
    return splits


def label_counts(results: Sequence[dict[str, Any]]) -> dict[str, collections.Counter]:
    """How often each label occurs, by split."""
    counts = {row["split"]: collections.Counter() for row in results}
    for row in results:
        counts[row["split"]].update({int(label): n for label, n in row["classes"].items()})
    return counts


def file_rows(results: Sequence[dict[str, Any]], left_out: Iterable = ()) -> dict[str, list]:
    """The manifest's rows of files that were left out, `left_out` too, or re-encoded."""
    pairs = {"left_out": [*left_out], "re_encoded": []}
    for row in results:
        pairs["left_out"] += row["left_out"]
        pairs["re_encoded"] += row["changed"]
    return {
        key: [{"file": path, "reason": reason} for path, reason in sorted(map(tuple, rows))]
        for key, rows in pairs.items()
    }


def report(content: dict[str, Any]) -> None:
    """Prints the first 20 images that were left out, and the first 20 that were re-encoded."""
    for key, title in (("left_out", "left out"), ("re_encoded", "re-encoded")):
        rows = content[key]
        for row in rows[:20]:
            print(visible(f"{title}: {row['file']}: {row['reason']}"))
        if len(rows) > 20:
            print(f"{title}: {len(rows) - 20:,} more; all are in {files.MANIFEST}")


def are_complete(out: str, sizes: Mapping[str, int]) -> bool:
    """Whether a folder has the shards with these names and bytes, and no others."""
    if set(sizes) != set(records.existing_shards(out)):
        return False
    return files.sizes([os.path.join(out, name) for name in sizes]) == list(sizes.values())


def save_manifest(out: str, content: dict) -> None:
    """Writes manifest.json; see `save`."""
    save(out, files.MANIFEST, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def save(out: str, name: str, data: bytes) -> None:
    """Writes a file completely or not at all, unless it has this content already."""
    path = os.path.join(out, name)
    if files.read(path) != data:
        files.write(path, [data])
