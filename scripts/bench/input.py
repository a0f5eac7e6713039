"""Compares the input of photos with torch's DataLoader, in images per second.

python -m scripts.bench.input --data=DIR    on the first images of your train-* TFRecords
python -m scripts.bench.input               on cut-outs of scikit-learn's two photos

Each pipeline goes from files to normalised float32 batches on the device. All read the same JPEGs:
our pipelines read records, torch's an ImageFolder with RandomResizedCrop and a flip. Each pipeline
has its process: ours with the variables that main.py adds (engine/environment.py), torch's with
your environment. The pipelines take turns. A turn counts the time of the clock and the CPU time of
the process and its workers, until no work is in flight. Photos of 12 megapixels want --images=128
--batch=32.
"""

import argparse
import functools
import importlib
import io
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from etils import epath
from PIL import Image

import input_pipeline
from benchmarks.resnet.records import open_records
from common import entry
from common.data import files, records
from common.data.order import Order
from common.data.shards import tensorflow
from common.errors import ConfigError
from common.images.input_spec import IMAGENET
from common.preparation import schema
from engine import environment
from scripts.bench.peers import on_torch

SHARDS = 8
OURS: Mapping[str, Mapping[str, Any]] = {  # the config keys of each of our pipelines
    "exact": {"preprocessing": "exact"},
    "fast": {"preprocessing": "fast"},
    "exact, reduced_decoding": {"preprocessing": "exact", "reduced_decoding": True},
}
WORKERS = {f"torch's DataLoader, {n} workers": n for n in sorted({0, 1, 2, os.cpu_count() or 1})}
Seconds = dict[str, list[np.ndarray]]  # (CPU, clock) seconds of a batch in each round, by pipeline


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the pipelines, prints the table, and returns the exit code."""
    flags = _flags(arguments)
    if flags.images < flags.batch:
        raise ConfigError(f"--images={flags.images}: must be at least a batch, {flags.batch}")
    on_torch.require("torch", "torchvision")
    photos = first(flags.data, flags.images) if flags.data else cut(flags.images)
    with tempfile.TemporaryDirectory() as folder:
        write(folder, photos)
        seconds = measure(folder, flags)
    print(table(seconds, flags.batch))
    return 0


def table(seconds: Seconds, batch: int) -> str:
    """Markdown: images/s of the clock, the ratio to torch's best, and images per CPU second."""
    means = {name: np.mean(turns, 0) for name, turns in seconds.items()}
    best = min(means[name][1] for name in WORKERS if name in means)
    lines = ["| pipeline | images/s | ratio | images per CPU second |", "| --- " * 4 + "|"]
    for name, (cpu, clock) in means.items():
        lines.append(f"| {name} | {batch / clock:,.0f} | {best / clock:.2f} | {batch / cpu:,.0f} |")
    return "\n".join(lines)


def cut(count: int) -> list[bytes]:
    """Cuts `count` JPEGs of 500 x 375 pixels and about 110 KB out of scikit-learn's two photos.

    The cut-outs differ in position, and some are mirrored, darker or lighter.
    """
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    draw, jpegs = np.random.default_rng(0), []
    for i in range(count):
        photo = photos[i % len(photos)]
        width = draw.uniform(480, min(photo.width, photo.height * 4 / 3))
        x, y = draw.uniform(0, photo.width - width), draw.uniform(0, photo.height - 0.75 * width)
        box = (x, y, x + width, y + 0.75 * width)
        pixels = np.asarray(photo.resize((500, 375), Image.Resampling.LANCZOS, box))
        pixels = pixels[:, :: draw.choice([-1, 1])] * draw.uniform(0.7, 1.1)
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=97)
        jpegs.append(file.getvalue())
    return jpegs


def first(folder: str, count: int) -> list[bytes]:
    """Reads the first `count` images of the train-* records in a folder, in ImageNet's schema."""
    tf = tensorflow()
    feature = {"image/encoded": tf.io.FixedLenFeature([], tf.string)}
    paths = files.find(folder, "train-*", "train records")
    read = tf.data.TFRecordDataset(paths).take(count)
    return [tf.io.parse_single_example(r, feature)["image/encoded"].numpy() for r in read]


def write(folder: str, photos: list[bytes]) -> None:
    """Writes photos as records in ImageNet's schema, and as files of ten classes for torch."""
    examples = [
        schema.example(photo, i % 1000 + 1, "photo", "photo.JPEG", (375, 500))
        for i, photo in enumerate(photos)
    ]
    for shard, run in enumerate(records.shard_runs(len(examples), SHARDS)):
        path = os.path.join(folder, records.shard_name("train", shard, SHARDS))
        records.write_shard(path, (examples[i] for i in run))
    for i, photo in enumerate(photos):
        path = epath.Path(folder) / "files" / str(i % 10) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo)


def pipeline(name: str, folder: str, flags: argparse.Namespace) -> Iterator[Any]:
    """The batches of a pipeline, of `OURS` or `WORKERS`, without end."""
    if name in WORKERS:
        return _torch_batches(os.path.join(folder, "files"), flags, WORKERS[name])
    index = os.path.join(folder, f"index-{os.getpid()}.json")
    source = open_records(folder, "train-*", 1000, index, "train")
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
    mean, std = ([value / 255 for value in values] for values in IMAGENET)
    steps = [
        vision.transforms.RandomResizedCrop(flags.size),
        vision.transforms.RandomHorizontalFlip(),
        vision.transforms.ToTensor(),
        vision.transforms.Normalize(mean, std),
    ]
    photos = vision.datasets.ImageFolder(folder, vision.transforms.Compose(steps))
    # Without an end: workers do not wait for each other between two epochs.
    sampler = data.RandomSampler(photos, replacement=True, num_samples=1 << 30)
    return iter(data.DataLoader(photos, flags.batch, sampler=sampler, num_workers=workers))


class Server:
    """A process that runs one pipeline and measures its turns in seconds."""

    def __init__(self, name: str, folder: str, flags: argparse.Namespace):
        self.name = name
        context = multiprocessing.get_context("spawn")  # without the libraries of this process
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, folder, flags))
        self._process.start()
        theirs.close()

    def ask(self) -> None:
        """Asks for a turn."""
        self._connection.send("go")

    def answer(self) -> np.ndarray:
        """Waits for the first batch, or for the end of a turn: its CPU and its clock's seconds."""
        try:
            return np.array(self._connection.recv())
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            sys.exit(f"ERROR: the process of {self.name!r} ended with exit code {code}")

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def measure(folder: str, flags: argparse.Namespace) -> Seconds:
    """Measures all pipelines in turn."""
    servers: list[Server] = []
    seconds: Seconds = {name: [] for name in (*WORKERS, *OURS)}
    try:
        for name in seconds:
            servers.append(Server(name, folder, flags))
        for server in servers:
            server.answer()
        for turn in range(1, flags.rounds + 1):
            for server in servers:
                server.ask()
                seconds[server.name].append(server.answer() / flags.batches)
            print(f"round {turn} of {flags.rounds}", file=sys.stderr)
        return seconds
    finally:
        for server in servers:
            server.stop()


def serve(connection: Connection, name: str, folder: str, flags: argparse.Namespace) -> None:
    """Runs one pipeline in a child process; answers each message with the seconds of a turn."""
    if name in OURS:
        environment.set_defaults()
    stream = pipeline(name, folder, flags)
    next(stream)
    workers = psutil.Process().children()

    def spent() -> float:
        return time.process_time() + sum(sum(worker.cpu_times()[:2]) for worker in workers)

    wait_until_idle(spent)
    connection.send((0.0, 0.0))
    while connection.recv():
        before, begin = spent(), time.monotonic()
        for _ in itertools.islice(stream, flags.batches):
            pass
        end = wait_until_idle(spent)
        connection.send((spent() - before, end - begin))


def wait_until_idle(spent: Callable[[], float]) -> float:
    """Waits until the CPU seconds `spent` do not grow any more; the clock's time of that moment."""
    while True:
        before, begin = spent(), time.monotonic()
        time.sleep(0.1)
        if spent() - before < 0.005:
            return begin


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="", help="folder of train-* records in ImageNet's schema")
    for name, default in {"images": 1000, "size": 224, "batch": 128, "rounds": 5}.items():
        add(f"--{name}", type=int, default=default)
    add("--batches", type=int, default=4, help="batches of each pipeline in a round")
    add("--peer", choices=("torch",), default="torch", help="the library to compare with")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    entry.run(main)
