"""Compares the readers of the other benchmarks with plain tf.data forms, per second of CPU time.

python -m scripts.bench.readers                      all four, takes minutes
python -m scripts.bench.readers ssd transformer      only these

A reader makes batches of records on the host; scripts/bench/plain_readers.py has the plain forms.
The images are cut-outs of scikit-learn's two photos, 500 x 375 pixels, with eight objects each; the
sentences are those of `scripts.prepare phrases`, in rows of 256 that are there 16 times. Readers
take turns in one process; a turn counts its CPU time until no work is in flight. Our readers leave
the normalisation to the device, and for SSD the colours and flips, too: that costs the host nothing
and is part of the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import benchmarks
from benchmarks.translation import rows as text_rows
from engine import environment
from ops import files, records
from ops.preparation import schema
from scripts import prepare
from scripts.bench import photos, plain_readers
from scripts.bench.turns import settle

Batches = Iterator[dict[str, np.ndarray]]
_UNITS = {"ssd": "images", "mask_rcnn": "images", "transformer": "tokens", "gnmt": "tokens"}
_BATCH = {"ssd": 32, "mask_rcnn": 4, "transformer": 64, "gnmt": 512}
_TURN = {"ssd": 4, "mask_rcnn": 4, "transformer": 30, "gnmt": 30}  # batches


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the readers, prints a table, and returns the exit code."""
    flags = _flags(arguments)
    environment.set_defaults(JAX_PLATFORMS="cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in flags.names or _UNITS:
            print(f"{name}: making data", file=sys.stderr, flush=True)
            with contextlib.redirect_stdout(sys.stderr):
                data = _data(name, folder, flags.images)
            rows.append(_compare(name, data, flags.rounds))
            if flags.json:
                print(json.dumps(rows[-1]), flush=True)
    if not flags.json:
        print(table(rows))
    return 0


def _compare(name: str, data: str, rounds: int) -> dict[str, Any]:
    streams = {"ours": ours(name, data), "plain": _plain(name)(data, _BATCH[name])}
    for stream in streams.values():
        next(stream)
    rates: dict[str, list[float]] = {"ours": [], "plain": []}
    for turn in range(1, rounds + 1):
        for which, stream in streams.items():
            rates[which].append(_turn(stream, _TURN[name]))
        print(f"{name}: round {turn} of {rounds}", file=sys.stderr, flush=True)
    ratios = [own / plain for own, plain in zip(*rates.values(), strict=True)]
    return {
        **{"reader": name, "unit": _UNITS[name]},
        **{which: statistics.median(values) for which, values in rates.items()},
        **{"ratio": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)},
    }


def _plain(name: str) -> Callable[[str, int], Batches]:
    return getattr(plain_readers, name)


def ours(name: str, data: str) -> Batches:
    """The training batches of a benchmark, as train.py reads them."""
    config: Any = importlib.import_module(f"configs.{name}").get_config()
    config.update({"data_dir": data, "train_batch_size": _BATCH[name]})
    if name == "gnmt":  # records instead of text
        config.update(
            dict.fromkeys(("train_source", "train_target", "eval_source", "eval_target"), "")
        )
    benchmark = benchmarks.load(config.lock(), f"{data}/index")
    benchmark.num_examples("train")
    return benchmark.train_batches(_BATCH[name], 0, 1, 0)


def _turn(stream: Batches, count: int) -> float:
    """Images or tokens per CPU second of the next batches."""
    settle()
    before, done = time.process_time(), 0
    for batch in itertools.islice(stream, count):
        is_text = "image" not in batch
        done += sum(int((batch[s] > 0).sum()) for s in ("inputs", "targets")) if is_text else 0
        done += 0 if is_text else len(batch["image"])
    settle()
    return done / (time.process_time() - before)


def _data(name: str, folder: str, images: int) -> str:
    """Makes the records of a benchmark; returns their folder."""
    kind = "images" if _UNITS[name] == "images" else "text"
    data = os.path.join(folder, kind)
    if not os.path.exists(data) and kind == "images":
        _write_objects(os.path.join(folder, "coco"), data, images)
    elif not os.path.exists(data):
        prepare.make("phrases", [f"--out={data}.short"])
        prepare.make("text", [f"--records={data}.short", f"--out={data}"])
    target = os.path.join(folder, name)
    {"transformer": _repeat, "gnmt": _unpack}.get(name, _link)(data, target)
    return target


def _link(data: str, target: str) -> None:
    os.symlink(data, target)


def _write_objects(coco: str, data: str, images: int) -> None:
    """Records of photos, each with eight objects whose outlines have twelve corners."""
    draw, annotations = np.random.default_rng(0), []
    os.makedirs(coco)
    for image, jpeg in enumerate(photos.cut(images)):
        with open(os.path.join(coco, f"{image}.jpg"), "wb") as file:
            file.write(jpeg)
        for _ in range(8):
            radius = draw.uniform(15, 90, 2)
            middle = draw.uniform(radius, np.array([500, 375]) - radius)
            turns = 2 * np.pi * np.arange(12) / 12
            corners = middle + radius * np.stack([np.cos(turns), np.sin(turns)], axis=1)
            low, high = corners.min(axis=0), corners.max(axis=0)
            annotations.append(
                {
                    **{"id": len(annotations) + 1, "image_id": image, "iscrowd": 0},
                    **{
                        "category_id": int(draw.integers(1, 81)),
                        "area": float(2.5 * radius.prod()),
                    },
                    **{"bbox": [*low.tolist(), *(high - low).tolist()]},
                    "segmentation": [corners.ravel().tolist()],
                }
            )
    names = [{"id": i, "name": f"kind {i}"} for i in range(1, 81)]
    sizes = {"width": 500, "height": 375}
    listed = [{"id": i, "file_name": f"{i}.jpg", **sizes} for i in range(images)]
    content = {"images": listed, "annotations": annotations, "categories": names}
    path = os.path.join(coco, "objects.json")
    with open(path, "w") as file:
        json.dump(content, file)
    own = [f"--train_images={coco}", f"--train_annotations={path}", f"--val_annotations={path}"]
    prepare.make("coco", [*own, "--masks", "--shards=8", "--val_shards=1", f"--out={data}"])


def _repeat(data: str, target: str) -> None:
    """Writes the packed rows 16 times, so that few turns begin a new epoch."""
    rows = [row for path in _packed(data) for row in records.read_shard(path)]
    _write_text(data, target, "translate_packed-train", rows * 16)


def _unpack(data: str, target: str) -> None:
    """Writes the pairs of packed rows as a record each."""
    pairs = []
    for path in _packed(data):
        columns = text_rows.columns(list(records.read_shard(path)))
        for row in text_rows.split(columns):
            for number in range(1, int(row["inputs_segmentation"].max()) + 1):
                sides = {s: row[s][row[f"{s}_segmentation"] == number] for s in text_rows.SIDES}
                pairs.append(schema.serialize({s: schema.ints(x) for s, x in sides.items()}))
    _write_text(data, target, "wmt32k-encoded-train", pairs)


def _packed(data: str) -> Sequence[str]:
    return files.find(data, "*packed-train*", "train records")


def _write_text(data: str, target: str, name: str, examples: list[bytes]) -> None:
    """Writes training records in eight files, beside the vocabulary and what is evaluated."""
    others = shutil.ignore_patterns("*packed*", "manifest.json", "raw", "prepare_state")
    shutil.copytree(data, target, ignore=others)
    for shard in range(8):
        path = os.path.join(target, f"{name}-{shard:05d}-of-00008")
        records.write_shard(path, examples[shard::8])


def table(rows: list[dict[str, Any]]) -> str:
    """Formats rows as a Markdown table; a range of ratios that contains 1 is no verdict."""
    lines = ["| reader | ours, per CPU second | plain tf.data | ratio | least to largest |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in rows:
        rates = f"{row['ours']:,.0f} {row['unit']} | {row['plain']:,.0f}"
        ratio = f"{row['ratio']:.2f}" if not row["least"] <= 1 <= row["largest"] else "no verdict"
        span = f"{row['least']:.2f} to {row['largest']:.2f}"
        lines.append(f"| {row['reader']} | {rates} | {ratio} | {span} |")
    return "\n".join(lines)


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*_UNITS, []], metavar="NAME")
    parser.add_argument("--images", type=int, default=400, help="photos to make")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="an object per reader")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
