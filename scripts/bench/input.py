"""Compares the input of photos with torch's DataLoader, in images per second.

python -m scripts.bench.input --data=DIR    on the first images of your train-* TFRecords

Each pipeline goes from files to normalised float32 batches on the device. All read the same JPEGs:
our pipelines read records, torch's an ImageFolder with RandomResizedCrop and a flip. The pipelines
take turns, each turn in a new process: ours with the variables that main.py adds
(engine/environment.py), torch's with your environment. Photos of 12 megapixels want --images=128
--batch=32.
"""

import argparse
import concurrent.futures
import functools
import importlib
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from etils import epath

import input_pipeline
from benchmarks.records import RecordFiles
from benchmarks.resnet.preparation.examples import tf_example
from benchmarks.resnet.records import open_records
from common import cli, entry, pools
from common.data import files, records
from common.data.order import Order
from common.errors import ConfigError
from common.images.input_spec import IMAGENET_UNIT
from common.tensorflow import tensorflow
from engine import environment
from scripts.bench.peers import on_torch

SHARDS = 8
OURS: Mapping[str, Mapping[str, Any]] = {  # the config keys of each of our pipelines
    "exact": {"preprocessing": "exact"},
    "fast": {"preprocessing": "fast"},
    "exact, reduced_decoding": {"preprocessing": "exact", "reduced_decoding": True},
}
WORKERS = {f"torch's DataLoader, {n} workers": n for n in sorted({0, 1, 2, pools.cores()})}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the pipelines, prints the table, and returns the exit code."""
    flags = _flags(arguments)
    if flags.images < flags.batch:
        raise ConfigError(f"--images={flags.images}: must be at least a batch, {flags.batch}")
    on_torch.require("torch", "torchvision")
    photos = first(flags.data, flags.images)
    rates: dict[str, list[float]] = {name: [] for name in (*WORKERS, *OURS)}
    spawn = multiprocessing.get_context("spawn")  # without the libraries of this process
    with tempfile.TemporaryDirectory() as folder:
        write(folder, photos)
        for number, name in itertools.product(range(flags.rounds), rates):
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
                rates[name].append(process.submit(turn, name, folder, flags).result())
            print(f"round {number + 1} of {flags.rounds}: {name}", file=sys.stderr)
    print(table({name: statistics.mean(turns) for name, turns in rates.items()}))
    return 0


def table(rates: Mapping[str, float]) -> str:
    """Markdown: the images per second of each pipeline, and the ratio to torch's best."""
    best = max(rates[name] for name in WORKERS if name in rates)
    lines = ["| pipeline | images/s | ratio |", "| --- | --- | --- |"]
    lines += [f"| {name} | {rate:,.0f} | {rate / best:.2f} |" for name, rate in rates.items()]
    return "\n".join(lines)


def first(folder: str, count: int) -> list[bytes]:
    """Reads the first `count` images of the train-* records in a folder, in ImageNet's schema."""
    tf = tensorflow()
    feature = {"image/encoded": tf.io.FixedLenFeature([], tf.string)}
    paths = files.find(folder, "train-*", "train records")
    read = tf.data.TFRecordDataset(paths).take(count)
    return [tf.io.parse_single_example(r, feature)["image/encoded"].numpy() for r in read]


def write(folder: str, photos: list[bytes]) -> None:
    """Writes photos as records in ImageNet's schema, and as files of ten classes for torch."""
    for shard, run in enumerate(records.shard_runs(len(photos), SHARDS)):
        path = os.path.join(folder, records.shard_name("train", shard, SHARDS))
        rows = (tf_example(photos[i], 1 + i % 10, "photo", "a.JPEG", (375, 500)) for i in run)
        records.write_shard(path, rows)
    for i, photo in enumerate(photos):
        path = epath.Path(folder) / "files" / str(i % 10) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo)


def pipeline(name: str, folder: str, flags: argparse.Namespace) -> Iterator[Any]:
    """The batches of a pipeline, of `OURS` or `WORKERS`, without end."""
    if name in WORKERS:
        return _torch_batches(os.path.join(folder, "files"), flags, WORKERS[name])
    index = os.path.join(folder, f"index-{os.getpid()}.json")
    source = open_records(RecordFiles(folder, "train-*", "train", index), 1000)
    settings = input_pipeline.Preprocessing(
        image_size=flags.size, crop_area_min=0.08, random_flip=True, **OURS[name]
    )
    order = Order.make(source.shards.counts, 0, flags.batch, SHARDS, 16 * flags.batch)
    batches = input_pipeline.train_batches(source, settings, order, range(order.streams), 0)
    program = jax.jit(functools.partial(input_pipeline.normalize, dtype=jnp.float32))
    return (jax.block_until_ready(program(b["image"], b["flip"])) for b in batches)


def _torch_batches(folder: str, flags: argparse.Namespace, workers: int) -> Iterator[Any]:
    """Batches [images float32[b, 3, size, size], labels int64[b]] of PyTorch's ImageNet example."""
    data: Any = importlib.import_module("torch.utils.data")
    vision: Any = importlib.import_module("torchvision")
    mean, std = map(list, IMAGENET_UNIT)
    transforms = vision.transforms
    steps = [transforms.RandomResizedCrop(flags.size), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize(mean, std)]
    photos = vision.datasets.ImageFolder(folder, transforms.Compose(steps))
    # Without an end: workers do not wait for each other between two epochs.
    sampler = data.RandomSampler(photos, replacement=True, num_samples=1 << 30)
    return iter(data.DataLoader(photos, flags.batch, sampler=sampler, num_workers=workers))


def turn(name: str, folder: str, flags: argparse.Namespace) -> float:
    """The images per second of a pipeline in this process, after as many batches to warm up."""
    if name in OURS:
        environment.set_defaults()
    stream = pipeline(name, folder, flags)
    for _ in itertools.islice(stream, flags.batches):
        pass
    started = time.monotonic()
    for _ in itertools.islice(stream, flags.batches):
        pass
    return flags.batches * flags.batch / (time.monotonic() - started)


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "folder of train-* records in ImageNet's schema"
    parser.add_argument("--data", required=True, help=text)
    sizes = {"images": 1000, "size": 224, "batch": 128, "rounds": 3, "batches": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    entry.run(main)
