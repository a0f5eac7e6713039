"""Writes the planned shards that are not finished yet, and then the manifest.

The output folder has the state: `prepare_state/` holds the settings, the index of the input, and a
summary of each finished shard. A shard without a summary is written again.
"""

import collections
import dataclasses
import functools
import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import PIL
from PIL import features

from common import console, pools
from common.data import files, records
from common.data.shards import tensorflow
from common.errors import UserError, parse_json, visible

_STATE = "prepare_state"
FACTS = ("examples", "bytes", "sha256")


class State:
    """The files in OUT/prepare_state/; each is written completely or not at all."""

    def __init__(self, out: str):
        """`out` is the output folder; it need not exist."""
        self.out = out
        self._folder = os.path.join(out, _STATE)

    def read(self, name: str) -> Any:
        """Reads the JSON document `name`; None if it is missing or damaged."""
        gfile, path = tensorflow().io.gfile, os.path.join(self._folder, name)
        if not gfile.exists(path):
            return None
        with gfile.GFile(path, "rb") as file:
            data = file.read()
        try:
            return parse_json(gzip.decompress(data) if name.endswith(".gz") else data)
        except (ValueError, OSError, EOFError):  # damaged
            return None

    def write(self, name: str, content: Any) -> None:
        """Writes the JSON document `name`, compressed if the name ends with .gz."""
        data = json.dumps(content).encode()
        if name.endswith(".gz"):
            data = gzip.compress(data, 6, mtime=0)
        self._makedirs()
        files.write(os.path.join(self._folder, name), [data])

    def clear(self) -> None:
        """Deletes the manifest, the state and the shards, in this order."""
        self.remove_manifest()
        self.forget()
        records.remove_shards(self.out)

    def remove_manifest(self) -> None:
        """Deletes the manifest, which describes a complete set."""
        path = os.path.join(self.out, files.MANIFEST)
        if tensorflow().io.gfile.exists(path):
            tensorflow().io.gfile.remove(path)

    def claim(self, plan: dict[str, dict[str, Any]], overwrite: bool) -> None:
        """Writes plan.json, which says what the folder is for.

        Args:
            plan: {"settings": {...}, "input": {flag: stamp}}, JSON.
            overwrite: deletes the records of another plan.

        Raises:
            UserError: the folder holds records, or shards of another plan.
        """
        old, existing = self.read("plan.json"), self.first_record_file()
        if overwrite and existing and old != plan:  # else this is an interrupted --overwrite
            self.clear()
            old, existing = None, ""
        if existing and old is None:
            raise UserError(
                f"{self.out} already holds {existing}; choose another --out, or --overwrite"
            )
        if existing and old and old != plan:
            changed = [
                key
                for part in ("settings", "input")
                for key in sorted({*plan[part], *old.get(part, {})})
                if plan[part].get(key) != old.get(part, {}).get(key)
            ]
            raise UserError(
                f"{self.out} holds shards of another input or other settings (changed: "
                f"{', '.join(f'--{key}' for key in changed)}); choose another --out, or --overwrite"
            )
        if old != plan:
            self.write("plan.json", plan)

    def forget(self) -> None:
        """Deletes the state."""
        if tensorflow().io.gfile.exists(self._folder):
            tensorflow().io.gfile.rmtree(self._folder)

    def first_record_file(self) -> str:
        """The name of a shard or manifest in the output folder; '' if it has neither."""
        manifest = os.path.join(self.out, files.MANIFEST)
        names = [files.MANIFEST] if tensorflow().io.gfile.exists(manifest) else []
        return next(iter([*records.existing_shards(self.out), *names]), "")

    def finished(self, names: list[str], key: str) -> dict[str, dict[str, Any]]:
        """The summaries of the shards that were finished with this key, by name."""
        with pools.Threads(16) as pool:
            summaries = list(pool.map(lambda name: self.summary(name, key), names))
        finished = {name: row for name, row in zip(names, summaries, strict=True) if row}
        if finished:
            print(
                f"continuing: {len(finished):,} of {len(names):,} shards are finished", flush=True
            )
        return finished

    def summary(self, name: str, key: str) -> dict[str, Any] | None:
        """The summary of a shard; None unless the shard was finished with this key."""
        gfile, path = tensorflow().io.gfile, os.path.join(self.out, name)
        result = self.read(f"{name}.json")
        if not result or result["key"] != key or not gfile.exists(path):
            return None
        return result if gfile.stat(path).length == result["bytes"] else None

    def refuse_others(self, is_ours: bool) -> None:
        """Raises UserError if the folder has records, unless they are of a set that may go."""
        if not is_ours and (file := self.first_record_file()):
            raise UserError(
                f"{self.out} already holds {file} of another data set; choose another --out"
            )

    def sweep(self) -> None:
        """Deletes partial files of interrupted writers in the output folder and in the state."""
        records.remove_unfinished(self.out)
        for name in records.list_folder(self._folder):
            if name.startswith("tmp."):
                tensorflow().io.gfile.remove(os.path.join(self._folder, name))

    def _makedirs(self) -> None:
        if "://" not in self._folder:  # see common.data.files.write
            tensorflow().io.gfile.makedirs(self._folder)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of the plan and the rows of its split that it holds."""

    name: str
    split: str
    rows: range


def shards(sizes: dict[str, tuple[int, int]], suffix: str = "") -> list[Shard]:
    """Lists the files of splits in order; `sizes` is {split: (examples, files)}."""
    return [
        Shard(records.shard_name(name, i, count) + suffix, name, rows)
        for name, (examples, count) in sizes.items()
        for i, rows in enumerate(records.shard_runs(examples, count))
    ]


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
    out: str, planned: list[Shard], make: Callable[[str, int], Example], key: str, workers: int
) -> dict[str, dict]:
    """Writes the shards that are not finished yet.

    Args:
        out: the output folder.
        planned: all shards.
        make: reads and converts the k-th image of a split; threads call it.
        key: the plan's digest; a shard that was finished with another key is written again.
        workers: threads that read and convert images.

    Returns:
        The summary of each shard by its name: {"examples", "bytes", "sha256",
        "classes": {label: number}, "left_out": [[path, reason]], "changed": [[path, reason]]}.

    Raises:
        tf.errors.OpError, UserError: the input cannot be read, or the output cannot be written.
    """
    state = State(out)
    state.sweep()
    results = state.finished([shard.name for shard in planned], key)
    unfinished = [shard for shard in planned if shard.name not in results]
    if not unfinished:
        return results
    state.remove_manifest()
    progress = console.ProgressBar("writing", sum(len(shard.rows) for shard in unfinished))
    results |= _Writer(state, make, key, workers, progress).run(unfinished)
    progress.close()
    return results


class _Writer:
    """Writes shards in a few threads, with a pool of threads that read and convert the images.

    Conversion spends its time outside of Python's lock (file reads, libjpeg). Threads therefore use
    all cores, and one TensorFlow serves them.
    """

    def __init__(self, state: State, make: Callable, key: str, workers: int, progress):
        self.state, self.make, self.key = state, make, key
        self.workers, self.progress = workers, progress
        self.stop = threading.Event()

    def run(self, unfinished: list[Shard]) -> dict[str, dict]:
        """Writes shards; returns their summaries as `write` does."""
        writers = min(len(unfinished), 16, max(2, self.workers // 4))
        # Every worker has an image to convert while one shard waits for its next image.
        ahead = -(-2 * self.workers // writers) + 1
        with pools.Threads(self.workers) as pool, pools.Threads(writers) as writer_pool:
            tasks = [writer_pool.submit(self._write, shard, pool, ahead) for shard in unfinished]
            pools.all_done(tasks, self.stop)
        return {shard.name: task.result() for shard, task in zip(unfinished, tasks, strict=True)}

    def _write(self, shard: Shard, pool: futures.Executor, ahead: int) -> dict:
        classes, left_out, changed = collections.Counter(), [], []
        digests = []

        def examples() -> Iterator[bytes]:
            convert = functools.partial(self.make, shard.split)
            for one in pools.ordered(pool, convert, shard.rows, ahead):
                if self.stop.is_set():
                    raise InterruptedError("another shard failed")
                self.progress.add(1, len(one.record))
                if one.fault:
                    left_out.append([one.path, one.fault])
                    continue
                if one.change:
                    changed.append([one.path, one.change])
                if one.digest:
                    digests.append([one.digest, one.labels[0], one.path])
                classes.update(one.labels)
                yield one.record

        written = records.write_shard(os.path.join(self.state.out, shard.name), examples())
        result = {
            "key": self.key,
            "examples": written.count,
            "bytes": written.bytes,
            "sha256": written.sha256,
            "classes": {str(label): number for label, number in sorted(classes.items())},
            "left_out": left_out,
            "changed": changed,
            "digests": digests,
        }
        self.state.write(f"{shard.name}.json", result)
        return result


def tools() -> dict[str, str]:
    """Returns the versions of the libraries that re-encode images."""
    return {"pillow": PIL.__version__, "libjpeg": str(features.version("libjpeg_turbo"))}


def split_rows(planned: list[Shard], results: dict[str, dict]) -> dict[str, dict[str, Any]]:
    """The manifest's rows of splits: examples, bytes and shards."""
    splits = {}
    for name in dict.fromkeys(shard.split for shard in planned):
        shard_rows: list[dict[str, Any]] = [
            {"name": shard.name, **{key: results[shard.name][key] for key in FACTS}}
            for shard in planned
            if shard.split == name
        ]
        total = {key: sum(row[key] for row in shard_rows) for key in ("examples", "bytes")}
        splits[name] = {**total, "shards": shard_rows}
    return splits


def label_counts(planned: list[Shard], results: dict[str, dict]) -> dict[str, collections.Counter]:
    """How often each label occurs, by split."""
    counts = {shard.split: collections.Counter() for shard in planned}
    for shard in planned:
        for label, number in results[shard.name]["classes"].items():
            counts[shard.split][int(label)] += number
    return counts


def file_rows(planned: list[Shard], results: dict[str, dict], left_out: list) -> dict[str, list]:
    """The manifest's rows of files that were left out, `left_out` too, or re-encoded."""
    rows = {
        key: [row for s in planned for row in results[s.name][key]]
        for key in ("left_out", "changed")
    }

    def named(pairs: list) -> list[dict[str, str]]:
        return [{"file": path, "reason": reason} for path, reason in sorted(map(tuple, pairs))]

    return {"left_out": named([*left_out, *rows["left_out"]]), "re_encoded": named(rows["changed"])}


def report(content: dict[str, Any]) -> None:
    """Prints the first 20 images that were left out, and the first 20 that were re-encoded."""
    for key, title in (("left_out", "left out"), ("re_encoded", "re-encoded")):
        rows = content[key]
        for row in rows[:20]:
            print(visible(f"{title}: {row['file']}: {row['reason']}"))
        if len(rows) > 20:
            print(f"{title}: {len(rows) - 20:,} more; all are in {files.MANIFEST}")


def is_complete(out: str, *others: str) -> bool:
    """Whether a folder has the shards that its manifest lists, no other ones, and `others`."""
    if not all(tensorflow().io.gfile.exists(os.path.join(out, name)) for name in others):
        return False
    content = parse_json(files.read_manifest(out) or b"{}")
    shards = [row for split in content.get("splits", {}).values() for row in split["shards"]]
    if {row["name"] for row in shards} != set(records.existing_shards(out)):
        return False
    sizes = files.sizes([os.path.join(out, row["name"]) for row in shards])
    return bool(shards) and sizes == [row["bytes"] for row in shards]


def save_manifest(out: str, content: dict) -> None:
    """Writes manifest.json; see `save`."""
    save(out, files.MANIFEST, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def save(out: str, name: str, data: bytes) -> None:
    """Writes a file completely or not at all, unless it has this content already."""
    path, gfile = os.path.join(out, name), tensorflow().io.gfile
    if gfile.exists(path):
        with gfile.GFile(path, "rb") as file:
            if file.read() == data:
                return
    files.write(path, [data])
