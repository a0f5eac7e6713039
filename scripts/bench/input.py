"""Compares the input pipeline, in images per second of one core, with that of flax's example.

python -m scripts.bench.input                  on cut-outs of scikit-learn's two photos
python -m scripts.bench.input --data=DIR       on the first images of your own train-* TFRecords
python -m scripts.bench.input --peer=torch --data=DIR   with torch's DataLoader, in images/s

The baseline reads the same JPEGs as a TFDS set, as flax's example does. Each pipeline has its own
process. Ours have your environment and the variables that main.py adds (engine/environment.py); the
baseline has your environment. The pipelines take turns. A turn counts the CPU time of its process
until no work is in flight. It measures `train_batches` as train.py calls it, from records to
batches on the host. A ratio is that of all rounds, because our reader works in blocks; beside it
are the least and the largest of a round. Where 1 lies between them there is no verdict.

--peer=torch compares complete paths, from files to normalised float32 batches on the device, in
seconds of the clock. Both read the same JPEGs, ours from records, torch's as ImageFolder. Photos of
12 megapixels want --images=128 --batch=32.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from PIL import Image

import input_pipeline
from benchmarks.resnet.records import open_records
from common import entry
from common.data import files, records
from common.data.order import Order
from common.data.shards import tensorflow
from common.errors import UserError
from common.images.input_spec import NAMED
from common.images.pixels import decode
from common.preparation import schema
from engine import environment
from scripts.bench.peers import data_loader, on_torch

USER = dict(os.environ)
SHARDS = 8
Batches = Iterator[Any]  # {name: array}; with a peer what the network gets
PIPELINES = {  # whether the pipeline has the environment of main.py
    **{"flax's example": False, "decoding and cropping only": True},
    **{"exact": True, "fast": True},
    **{"flax's example, eval": False, "exact, eval": True, "fast, eval": True},
}
WITH_TORCH = {  # the pipelines with --peer=torch
    **{f"torch's DataLoader, {n} workers": False for n in sorted({0, 1, 2, os.cpu_count() or 1})},
    **{"exact": True, "fast": True, "exact, reduced_decoding": True},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the pipelines, prints the table, and returns the exit code."""
    flags = _flags(arguments)
    if flags.images < flags.batch:
        sys.exit(f"ERROR: --images={flags.images}: must be at least a batch, {flags.batch}")
    if not any(flags.only in name for name in flags.names):  # the names have commas
        names = "; ".join(flags.names)
        sys.exit(f"ERROR: --only={flags.only}: no pipeline of {names} has this name")
    if flags.serve:
        return serve(flags)
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else oneDNN prints notes
    try:
        if flags.peer:
            on_torch.require("torch", "torchvision")
        photos = first(flags.data, flags.images) if flags.data else cut(flags.images)
    except UserError as error:
        sys.exit(f"ERROR: {error}")
    with tempfile.TemporaryDirectory() as folder:
        write(folder, photos, flags.peer)
        seconds = measure(folder, flags)
    if flags.peer:
        print(clock_table(seconds, flags.batch))
        return 0
    spent = {name: [float(cpu) for cpu, _ in turns] for name, turns in seconds.items()}
    print(table(spent, flags.batch, quality(photos[:100], flags.size)))
    return 0


def clock_table(seconds: dict[str, list[np.ndarray]], batch: int) -> str:
    """Markdown: images/s, and the ratio to torch's best, from (CPU, clock) seconds per batch."""
    spent = {name: np.mean(turns, 0) for name, turns in seconds.items()}
    best = min(clock for name, (_, clock) in spent.items() if name.startswith("torch"))
    lines = ["| pipeline | images/s | ratio | images per CPU second |", "| --- " * 4 + "|"]
    for name, (cpu, clock) in spent.items():
        lines.append(f"| {name} | {batch / clock:,.0f} | {best / clock:.2f} | {batch / cpu:,.0f} |")
    return "\n".join(lines)


def table(
    seconds: dict[str, list[float]], batch: int, errors: dict[str, tuple[float, float]]
) -> str:
    """Markdown: a row for each pipeline, from its seconds per batch and what `quality` returns."""
    lines = ["| pipeline | images per CPU second | ratio | RMSE of 255 | PSNR, dB |"]
    lines.append("| --- " * 5 + "|")
    for name, ours in seconds.items():
        base = seconds["flax's example, eval" if name.endswith("eval") else "flax's example"]
        ratio = f"{statistics.mean(base) / statistics.mean(ours):.2f}"
        if ours is not base:
            ratios = [theirs / own for theirs, own in zip(base, ours, strict=True)]
            bounds = f"{min(ratios):.2f} to {max(ratios):.2f}"
            is_clear = not min(ratios) <= 1 <= max(ratios)
            ratio = f"{ratio} ({bounds})" if is_clear else f"no verdict: {bounds}"
        rmse, psnr = (f"{x:.1f}" for x in errors[name]) if name in errors else ("", "")
        rate = batch / statistics.mean(ours)
        lines.append(f"| {name} | {rate:,.0f} | {ratio} | {rmse} | {psnr} |")
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


def write(folder: str, photos: list[bytes], peer: str = "") -> None:
    """Writes photos as records in ImageNet's schema, and as the peer's files in the same folder."""
    rows = [(photo, i % 1000) for i, photo in enumerate(photos)]
    examples = [schema.example(p, n + 1, "photo", "photo.JPEG", (375, 500)) for p, n in rows]
    runs = records.shard_runs(len(rows), SHARDS)
    for shard, run in enumerate(runs):
        path = os.path.join(folder, records.shard_name("train", shard, SHARDS))
        records.write_shard(path, (examples[i] for i in run))
    if peer:
        data_loader.write(os.path.join(folder, "files"), photos)
        return
    import tensorflow_datasets as tfds

    target = os.path.join(folder, "photos", "1.0.0")
    os.makedirs(target)
    features = [{"image": schema.strings([p]), "label": schema.ints([n])} for p, n in rows]
    for shard, run in enumerate(runs):
        path = os.path.join(target, f"photos-train.tfrecord-{shard:05d}-of-{SHARDS:05d}")
        records.write_shard(path, (schema.serialize(features[i]) for i in run))
    kinds = {"image": tfds.features.Image(encoding_format="jpeg")}
    kinds |= {"label": tfds.features.ClassLabel(num_classes=1000)}
    lengths, size = [len(run) for run in runs], sum(map(len, photos))
    split = tfds.core.SplitInfo(name="train", shard_lengths=lengths, num_bytes=size)
    tfds.folder_dataset.write_metadata(
        data_dir=target, features=tfds.features.FeaturesDict(kinds), split_infos=[split]
    )


def open_both(folder: str, peer: str = "") -> tuple[input_pipeline.Source, Any]:
    """Opens the records of `write`, and its TFDS set as a tf.data set of encoded examples."""
    index = os.path.join(folder, f"index-{os.getpid()}.json")
    source = open_records(folder, "train-*", 1000, index, "train")
    if peer:
        return source, None
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder_from_directory(os.path.join(folder, "photos", "1.0.0"))
    return source, builder.as_dataset(
        split="train", decoders={"image": tfds.decode.SkipDecoding()}, shuffle_files=True
    )


def environment_of(name: str) -> dict[str, str]:
    """The environment of a pipeline's process."""
    return (environment.DEFAULTS if (PIPELINES | WITH_TORCH)[name] else {}) | USER


def pipeline(name: str, folder: str, flags: argparse.Namespace) -> Batches:
    """Yields the batches of one of `PIPELINES` or `WITH_TORCH` without end."""
    size, batch = flags.size, flags.batch
    if name.startswith("torch"):
        workers = int(name.split()[-2])
        return data_loader.batches(os.path.join(folder, "files"), size, batch, workers)
    source, examples = open_both(folder, flags.peer)
    keys: dict[str, Any] = {"image_size": size, "crop_area_min": 0.08, "random_flip": True}

    def ours(mode: str, reduced: bool = False) -> Batches:
        settings = input_pipeline.Preprocessing(
            **keys, preprocessing=mode, reduced_decoding=reduced
        )
        order = Order.make(source.shards.counts, 0, batch, SHARDS, 16 * batch)
        streams = range(order.streams)
        batches = input_pipeline.train_batches(source, settings, order, streams, 0)
        if not flags.peer:
            return batches
        program = jax.jit(functools.partial(input_pipeline.normalize, dtype=jnp.float32))
        return (jax.block_until_ready(program(b["image"], b["flip"])) for b in batches)

    def evaluated(mode: str) -> Batches:
        while True:
            settings = input_pipeline.Preprocessing(**keys, preprocessing=mode)
            yield from input_pipeline.eval_batches(source, settings, batch, 0, 1)

    def flax(image: Callable[[Any], Any], train: bool = True) -> Batches:
        return flax_batches(examples, batch, image, train)

    makers: dict[str, Callable[[], Batches]] = {
        "flax's example": lambda: flax(lambda e: flax_image(e, size, True)),
        "decoding and cropping only": lambda: flax(lambda e: decoded(e, size)),
        "exact": lambda: ours("exact"),
        "exact, reduced_decoding": lambda: ours("exact", reduced=True),
        "fast": lambda: ours("fast"),
        "flax's example, eval": lambda: flax(lambda e: flax_image(e, size, False), train=False),
        "exact, eval": lambda: evaluated("exact"),
        "fast, eval": lambda: evaluated("fast"),
    }
    return makers[name]()


def flax_batches(examples: Any, batch: int, image: Callable[[Any], Any], train: bool) -> Batches:
    """Yields the batches of flax's ImageNet example (2024): one shuffle buffer, 48 threads."""
    tf = tensorflow()
    options = tf.data.Options()
    options.threading.private_threadpool_size = 48
    dataset = examples.with_options(options)
    dataset = dataset.repeat().shuffle(2000, seed=0) if train else dataset
    dataset = dataset.map(
        lambda e: {"image": image(e["image"]), "label": e["label"]},
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    dataset = dataset.batch(batch, drop_remainder=True)
    return (dataset if train else dataset.repeat()).prefetch(10).as_numpy_iterator()


def flax_image(encoded: Any, size: int, train: bool) -> Any:
    """The arithmetic of flax's example: bicubic resize, then normalisation to float32."""
    tf = tensorflow()
    shape = tf.io.extract_jpeg_shape(encoded)

    def centre() -> Any:
        side = tf.cast(
            size / (size + 32) * tf.cast(tf.minimum(shape[0], shape[1]), tf.float32), tf.int32
        )
        top, left = (shape[0] - side + 1) // 2, (shape[1] - side + 1) // 2
        return tf.io.decode_and_crop_jpeg(encoded, [top, left, side, side], channels=3)

    image = centre() if not train else None
    if train:
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            shape,
            bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            min_object_covered=0.1,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], extent[0], extent[1]])
        crop = tf.io.decode_and_crop_jpeg(encoded, window, channels=3)
        is_full = tf.reduce_all(tf.equal(tf.shape(crop), shape))
        image = tf.cond(is_full, centre, lambda: crop)
    image = tf.image.resize([image], [size, size], method="bicubic")[0]
    image = tf.reshape(image, [size, size, 3])
    image = tf.image.random_flip_left_right(image) if train else image
    own = NAMED["tensorflow"]
    return (image - tf.constant(own.mean, shape=[1, 1, 3])) / tf.constant(own.std, shape=[1, 1, 3])


def decoded(encoded: Any, size: int) -> Any:
    """A random crop without resizing: the limit of every pipeline that decodes JPEGs."""
    tf = tensorflow()
    seed = tf.random.uniform([2], maxval=1 << 30, dtype=tf.int32)
    crop = decode(
        encoded, lambda h, w: input_pipeline.random_window(h, w, seed, 0.08, size), only_jpeg=True
    )
    return crop[0, 0]


class Server:
    """A process that serves one pipeline."""

    def __init__(self, name: str, folder: str, flags: argparse.Namespace):
        self.name = name
        command = [sys.executable, "-m", "scripts.bench.input", f"--folder={folder}"]
        command += [f"--{k}={vars(flags)[k]}" for k in ("images", "size", "batch", "peer")]
        self._process = subprocess.Popen(
            [*command, f"--batches={flags.batches}", f"--serve={name}"],
            env=environment_of(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> np.ndarray:
        """Waits for the first batch, or for the end of a turn: its CPU and its clock's seconds."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return np.array(line.split(), float)
        sys.exit(f"ERROR: the process of {self.name!r} ended with exit code {self._process.wait()}")

    def turn(self) -> np.ndarray:
        """Runs a turn; returns its CPU and its clock's seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` reports the end of the process
        return self.answer()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(folder: str, flags: argparse.Namespace) -> dict[str, list[np.ndarray]]:
    """Measures (CPU, clock) seconds per batch in each round, by pipeline."""
    names = [n for n in flags.names if flags.only in n or n.startswith(("flax", "torch"))]
    servers, spent = [], {name: [] for name in names}
    try:
        for name in names:
            servers.append(Server(name, folder, flags))
        for server in servers:
            server.answer()
        for turn in range(1, flags.rounds + 1):
            for server in servers:
                spent[server.name].append(server.turn() / flags.batches)
            print(f"round {turn} of {flags.rounds}", file=sys.stderr)
        return spent
    finally:
        for server in servers:
            server.stop()


def serve(flags: argparse.Namespace) -> int:
    """Serves one pipeline: each line of stdin asks for a turn; the answer is `Server.turn`'s."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print to stdout
    stream = pipeline(flags.serve, flags.folder, flags)
    next(stream)
    workers = psutil.Process().children()

    def spent() -> float:
        return time.process_time() + sum(sum(w.cpu_times()[:2]) for w in workers)

    settle(spent)
    print(0, 0, file=answers, flush=True)
    for _ in sys.stdin:
        before, begin = spent(), time.monotonic()
        for _ in itertools.islice(stream, flags.batches):
            pass
        end = settle(spent)
        print(spent() - before, end - begin, file=answers, flush=True)
    return 0


def settle(spent: Callable[[], float]) -> float:
    """Waits until the CPU seconds `spent` do not grow any more; the clock's time of that moment."""
    while True:
        before, begin = spent(), time.monotonic()
        time.sleep(0.1)
        if spent() - before < 0.005:
            return begin


def quality(jpegs: list[bytes], size: int) -> dict[str, tuple[float, float]]:
    """(RMSE of 255, PSNR in dB) of train crops against Pillow's antialiased bicubic crops."""
    squares: dict[str, list[float]] = {}
    for i, encoded in enumerate(jpegs):
        photo = Image.open(io.BytesIO(encoded)).convert("RGB")
        window = input_pipeline.random_window(photo.height, photo.width, [0, i], 0.08, size)
        y, x, height, width = window.numpy().tolist()
        box = (x, y, x + width, y + height)
        best = np.asarray(photo.resize((size, size), Image.Resampling.BICUBIC, box), np.float64)
        for name, pixels in _crops(encoded, window, size).items():
            squares.setdefault(name, []).append(float(np.mean((pixels - best) ** 2)))
    means = {name: statistics.mean(errors) for name, errors in squares.items()}
    return {name: (mean**0.5, 10 * math.log10(255**2 / mean)) for name, mean in means.items()}


def _crops(encoded: Any, window: Any, size: int) -> dict[str, np.ndarray]:
    """float[size, size, 3] of a window, by each pipeline."""
    tf = tensorflow()
    plain = tf.io.decode_and_crop_jpeg(encoded, window, channels=3)  # the default, fast DCT
    crop = decode(encoded, lambda height, width: window)
    crops = {
        "flax's example": tf.image.resize(plain, [size, size], method="bicubic"),
        "exact": input_pipeline.resize(crop, size, "exact"),
        "fast": input_pipeline.resize(crop, size, "fast"),
    }
    return {name: np.asarray(pixels, np.float64) for name, pixels in crops.items()}


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="", help="folder of train-* records in ImageNet's schema")
    for name, default in {"images": 1000, "size": 224, "batch": 128, "rounds": 5}.items():
        add(f"--{name}", type=int, default=default)
    add("--batches", type=int, default=4, help="of each pipeline in a round")
    add("--peer", choices=("", "torch"), default="", help="the peer of a comparison by the clock")
    add("--only", default="", help="pipelines with this in their name, and flax's")
    add("--serve", default="", help=argparse.SUPPRESS)  # what a process is for
    add("--folder", default="", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    flags.names = WITH_TORCH if flags.peer else PIPELINES
    return flags


if __name__ == "__main__":
    entry.run(main)
