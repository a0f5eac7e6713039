"""Plans the shards of a data set, writes those that are missing, and describes them.

OUT/prepare_state/ has plan.json, which says what the folder is for, and a summary of each finished
shard, which becomes a part of the data manifest. A shard without its summary is written again.
"""

import collections
import functools
import hashlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import PIL
from PIL import features

from common import pools
from common.data import data_manifest, records, storage
from common.errors import DataError, UserError, parse_json, visible
from common.preparation.sources import Source, SourceError
from common.progress import ProgressBar
from common.tensorflow import tensorflow

_SHARD_BYTES = 128 << 20  # large enough for object stores, small enough for a shuffle of files
FACTS = ("examples", "bytes", "sha256")  # of a shard

# A record, or b"" if the image cannot be used; the labels to count; and rows of the shard's summary
# by their lists: "left_out" or "changed": [path, reason], "digests": [digest, labels, path].
Example = tuple[bytes, Sequence[int], dict[str, list]]


class State:
    """The files in OUT/prepare_state/; each is written completely or not at all."""

    def __init__(self, out: str):
        """`out` is the output folder; it need not exist."""
        self.out = out
        self._folder = os.path.join(out, data_manifest.STATE)

    def read(self, name: str) -> Any:
        """Reads the JSON document `name`; None if it is missing or damaged."""
        try:
            return parse_json(storage.read(os.path.join(self._folder, name)) or b"null")
        except ValueError:
            return None

    def write(self, name: str, content: Any) -> None:
        """Writes the JSON document `name`."""
        storage.write(os.path.join(self._folder, name), [json.dumps(content).encode()])

    def claim(self, plan: dict[str, dict[str, Any]], overwrite: bool) -> None:
        """Writes plan.json, {"settings": {...}, "input": {flag: stamp}}, and deletes partial files.

        UserError if the folder holds records of another plan, which only `overwrite` deletes.
        """
        old, existing = self.read(data_manifest.PLAN), self._first_file()
        for name in ("fraction", "shards") if old else ():  # as 0.3.0 named them
            if f"val_{name}" in old["settings"]:
                old["settings"][f"validation_{name}"] = old["settings"].pop(f"val_{name}")
        if existing and old != plan and not overwrite:
            problem = f"already holds {existing}"
            if old:
                before = old["settings"] | old["input"]
                after = plan["settings"] | plan["input"]
                keys = sorted({*before, *after})
                changed = [f"--{key}" for key in keys if before.get(key) != after.get(key)]
                changes = f"(changed: {', '.join(changed)})"
                problem = f"holds shards of another input or other settings {changes}"
            raise UserError(f"{self.out} {problem}; choose another --out, or --overwrite")
        if old != plan:
            command = shlex.join(["python", "-m", "scripts.prepare", *sys.argv[1:]])
            self.write(data_manifest.COMMAND, command)  # first: it ends what is interrupted
            # Without a data manifest it marks an unfinished folder.
            self.write(data_manifest.PLAN, None)
            self.remove_data_manifest()
            records.remove_shards(self.out)
            for name in storage.list_folder(self._folder):
                if name not in (data_manifest.PLAN, data_manifest.COMMAND):
                    tensorflow().io.gfile.remove(os.path.join(self._folder, name))
            self.write(data_manifest.PLAN, plan)
        records.remove_unfinished(self.out)
        records.remove_unfinished(self._folder)

    def remove_data_manifest(self) -> None:
        """Deletes the data manifest, which describes a complete set."""
        path = os.path.join(self.out, data_manifest.FILE_NAME)
        if tensorflow().io.gfile.exists(path):
            tensorflow().io.gfile.remove(path)

    def refuse_others(self, is_ours: bool) -> None:
        """Raises UserError if the folder has another set's records; ours may be replaced."""
        if not is_ours and (file := self._first_file()):
            raise UserError(
                f"{self.out} already holds {file} of another data set; choose another --out"
            )

    def _first_file(self) -> str:
        """The name of a shard or data manifest in the output folder; '' if it has neither."""
        if shards := records.existing_shards(self.out):
            return shards[0]
        name = data_manifest.FILE_NAME
        return name if name in storage.list_folder(self.out) else ""

    def finished(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The summaries of the shards that are there and not cut short, by name."""
        existing = sorted({*records.existing_shards(self.out)} & {*names})
        sizes = storage.sizes([os.path.join(self.out, name) for name in existing])
        with pools.Threads(16) as pool:
            summaries = list(pool.map(lambda name: self.read(f"{name}.json"), existing))
        rows = zip(existing, sizes, summaries, strict=True)
        finished = {name: row for name, size, row in rows if row and row["bytes"] == size}
        if finished:
            counts = f"{len(finished):,} of {len(names):,}"
            print(f"continuing: {counts} shards are finished", flush=True)
        return finished


def write(
    out: str,
    splits: Mapping[str, tuple[int, int]],
    make: Callable[[str, int], Example],
    workers: int,
    suffix: str = "",
) -> list[dict[str, Any]]:
    """Writes the shards that are not finished yet, in a folder that was claimed.

    Conversion spends its time outside of Python's lock (file reads, libjpeg). Threads therefore use
    all cores, and one TensorFlow serves them. `splits` is {split: (examples, files)}, in order.
    `make(split, k)` reads and converts the k-th image of a split; `workers` threads call it.

    Returns the summary of each shard in order: {"split", "name", "examples", "bytes", "sha256",
    "classes": {label: number}, "left_out", "changed", "digests"}; `Example` has the last three.
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
        examples = pools.ordered(pool, functools.partial(make, split), rows, ahead)
        results[name] = _write_shard(os.path.join(out, name), examples, progress, stop)
        state.write(f"{name}.json", results[name])

    if unfinished:
        state.remove_data_manifest()
        progress = ProgressBar("writing", sum(len(planned[n][1]) for n in unfinished))
        with pools.Threads(workers) as pool, pools.Threads(writers) as writer_pool:
            tasks = [writer_pool.submit(write_one, name) for name in unfinished]
            pools.all_done(tasks, stop)
        progress.close()
    return [{"split": split, "name": n, **results[n]} for n, (split, _) in planned.items()]


def _write_shard(
    path: str, examples: Iterable[Example], progress: ProgressBar, stop: threading.Event
) -> dict[str, Any]:
    """Writes a shard; returns its summary. It ends with an error when `stop` is set."""
    classes: collections.Counter[int] = collections.Counter()
    lists: dict[str, list] = {"left_out": [], "changed": [], "digests": []}

    def serialized() -> Iterator[bytes]:
        for record, labels, notes in examples:
            if stop.is_set():
                raise InterruptedError("another shard failed")
            progress.add(1, len(record))
            classes.update(labels)
            for key, row in notes.items():
                lists[key].append(row)
            if record:
                yield record

    written = records.write_shard(path, serialized())
    return written | {"classes": {str(k): classes[k] for k in sorted(classes)}} | lists


def shuffled(seed: int, purpose: str, names: Sequence[str]) -> np.ndarray:
    """int64[n], an order of names: the same on any machine and with any library."""
    texts = (f"{seed} {purpose} {name}".encode(errors="backslashreplace") for name in names)
    keys = [hashlib.sha256(text).digest() for text in texts]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def num_shards(asked: int, flag: str, source: Source, rows: np.ndarray, usual: int) -> int:
    """The number of files for the images `rows`: `asked` by --`flag`, or `usual`, or by their size.

    `asked` and `usual` may be 0; a set that is too small for `usual` gets fewer files. SourceError
    if there are fewer images than `asked` files.
    """
    examples = len(rows)
    if asked > examples:
        raise SourceError(f"--{flag}: {asked:,} files cannot be filled with {examples:,} images")
    if asked or (usual and examples >= 64 * usual):
        return asked or usual
    # Several, so that hosts can share even a small set, but no file per image.
    by_size = -(-sum(source.files[i].size for i in rows) // _SHARD_BYTES)
    return min(max(8, by_size), max(1, examples // 16))


def tools() -> dict[str, str]:
    """Returns the versions of the libraries that re-encode images."""
    return {"pillow": PIL.__version__, "libjpeg": str(features.version("libjpeg_turbo"))}


def manifest_content(
    head: dict[str, Any],
    classes: dict[int, dict[str, Any]],
    results: Sequence[dict[str, Any]],
    left_out: Iterable[tuple[str, str]] = (),
) -> dict[str, Any]:
    """The content of a data manifest, which begins with `head`.

    `classes` has facts about each label, to which its number of examples in each split is added.
    `results` are from `write`; `left_out` has (path, reason) of other files that were left out.
    """
    splits: dict[str, dict[str, Any]] = {}
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    pairs: dict[str, list] = {"left_out": [*left_out], "re_encoded": []}
    for row in results:
        split = splits.setdefault(row["split"], {"examples": 0, "bytes": 0, "shards": []})
        split["shards"].append({key: row[key] for key in ("name", *FACTS)})
        for key in ("examples", "bytes"):
            split[key] += row[key]
        counts[row["split"]].update({int(label): n for label, n in row["classes"].items()})
        pairs["left_out"] += row["left_out"]
        pairs["re_encoded"] += row["changed"]
    rows = [facts | {s: counts[s][label] for s in splits} for label, facts in classes.items()]
    files_ = {
        key: [{"file": path, "reason": reason} for path, reason in sorted(map(tuple, pair))]
        for key, pair in pairs.items()
    }
    return {**head, "splits": splits, "classes": rows, **files_}


def report(content: dict[str, Any]) -> None:
    """Prints the first images that were left out, and the first ones that were re-encoded."""
    for key, title, limit in (("left_out", "left out", 20), ("re_encoded", "re-encoded", 5)):
        rows = content[key]
        for row in rows[:limit]:
            print(visible(f"{title}: {row['file']}: {row['reason']}"))
        if len(rows) > limit:
            print(f"{title}: {len(rows) - limit:,} more; all are in {data_manifest.FILE_NAME}")


def is_complete(out: str, *others: str) -> bool:
    """Whether a folder has the shards that its data manifest lists, no other ones, and `others`."""
    if not all(tensorflow().io.gfile.exists(os.path.join(out, name)) for name in others):
        return False
    try:
        content = parse_json(data_manifest.read_bytes(out) or b"{}")
    except (ValueError, DataError):  # damaged, or unfinished
        return False
    shards = [row for split in content.get("splits", {}).values() for row in split["shards"]]
    if {row["name"] for row in shards} != {*records.existing_shards(out)}:
        return False
    sizes = storage.sizes([os.path.join(out, row["name"]) for row in shards])
    return bool(shards) and sizes == [row["bytes"] for row in shards]


def save_data_manifest(out: str, content: dict) -> None:
    """Writes the data manifest, with the digest of its splits, unless it is there already."""
    if "splits" in content:
        content = content | {data_manifest.DIGEST: data_manifest.splits_digest(content["splits"])}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    save(out, data_manifest.FILE_NAME, f"{text}\n".encode())


def save(out: str, name: str, data: bytes) -> None:
    """Writes a file completely or not at all, unless it has this content already."""
    path = os.path.join(out, name)
    if storage.read(path) != data:
        storage.write(path, [data])


_SHOWN_GROUPS = 3  # groups of equal images that a line names
_KINDS_OF_REPEATS = (
    "under two labels, of which one is wrong",
    "in both splits, so that the score counts what was trained on",
    "several times in one split",
)


def repeated_images(
    digests: np.ndarray, labels: np.ndarray, splits: np.ndarray, name: Callable[[int], str]
) -> list[str]:
    """A line for each kind of images that occur several times, the worst kind first.

    The arrays are [n]; equal images have equal digests. `name(i)` describes the i-th image, for the
    few that a line names.
    """
    _, number, counts = np.unique(digests, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[number] > 1)
    order = repeated[np.argsort(number[repeated], kind="stable")]
    kinds: dict[str, list[np.ndarray]] = {kind: [] for kind in _KINDS_OF_REPEATS}
    for group in np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if len(order) else ():
        kind = 0 if len({*labels[group].tolist()}) > 1 else 1 if len(set(splits[group])) > 1 else 2
        kinds[_KINDS_OF_REPEATS[kind]].append(group)
    return [
        f"{len(groups):,} {'image is' if len(groups) == 1 else 'images are'} there {kind}: "
        + "; ".join(" = ".join(map(name, group.tolist()[:4])) for group in groups[:_SHOWN_GROUPS])
        + (f"; and {len(groups) - _SHOWN_GROUPS:,} more" if len(groups) > _SHOWN_GROUPS else "")
        for kind, groups in kinds.items()
        if groups
    ]


def report_repeated(results: Sequence[Mapping[str, Any]]) -> None:
    """Prints which images are several times in the shards; `writing.write` returned `results`."""
    seen = [(*row, shard["split"]) for shard in results for row in shard.get("digests", ())]
    if seen:
        digests, labels, paths, splits = map(np.array, zip(*seen, strict=True))
        for line in repeated_images(digests, labels, splits, lambda i: str(paths[i])):
            print(visible(f"warning: {line}"))
