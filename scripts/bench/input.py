"""Compares the input pipeline, in images per second of one core, with that of flax's example.

python -m scripts.bench.input                  on cut-outs of scikit-learn's two photos
python -m scripts.bench.input --data=DIR       on the first images of your own train-* TFRecords

The baseline reads the same JPEGs as a TFDS set, as flax's example does. Each pipeline has its own
process. Our pipelines have your environment and the variables that main.py adds
(engine/environment.py); the baseline has your environment, and with --same_environment all have.
The pipelines take turns. A turn counts the CPU time of its process until no work is in flight. It
measures `train_batches` as train.py calls it, from records to batches on the host. A ratio is that
of all rounds together, because our reader works in blocks; the least and the largest of a round are
shown beside it, and where 1 lies between them there is no verdict. --json prints an object per row.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
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

import jax.numpy as jnp
import numpy as np
from PIL import Image

import input_pipeline
from benchmarks.resnet.input import cache as in_memory
from benchmarks.resnet.settings import Images
from engine import environment
from ops import shards as records
from ops.images import pixels as images
from ops.images.libraries import NAMED
from ops.order import Order
from ops.shards import DataError, tensorflow
from scripts.bench import photos, spread
from scripts.bench.turns import settle

USER = dict(os.environ)
Batches = Iterator[dict[str, np.ndarray]]
_COLUMNS = {
    **{"pipeline": "pipeline", "rate": "images per CPU second", "ratio": "ratio"},
    **{"rmse": "RMSE of 255", "psnr": "PSNR, dB"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the pipelines, prints the table, and returns the exit code."""
    flags = _flags(arguments)
    if flags.images < flags.batch:
        sys.exit(f"ERROR: --images={flags.images}: must be at least a batch, {flags.batch}")
    if not any(flags.only in name for name in PIPELINES):
        known = "; ".join(PIPELINES)  # names have commas
        sys.exit(f"ERROR: --only={flags.only}: no pipeline has this name; there are {known}")
    try:
        return serve(flags) if flags.serve else _main(flags)
    except DataError as error:
        sys.exit(f"ERROR: {error}")


def _main(flags: argparse.Namespace) -> int:
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else oneDNN prints notes
    with tempfile.TemporaryDirectory() as folder:
        data, count = flags.data, flags.images
        encoded = photos.first(data, count) if data else photos.cut(count)
        photos.write(folder, encoded)
        seconds_per_batch = measure(folder, flags)
        errors = quality(encoded[:100], flags.size, flags.cache)
    rows = []
    for name, seconds in seconds_per_batch.items():
        base = "flax's example, eval" if name.endswith("eval") else "flax's example"
        row: dict[str, Any] = {
            "pipeline": name,
            "rate": flags.batch / statistics.mean(seconds),
            "ratio": statistics.mean(seconds_per_batch[base]) / statistics.mean(seconds),
        }
        pairs = zip(seconds_per_batch[base], seconds, strict=True)
        row |= {} if name == base else spread.span([theirs / ours for theirs, ours in pairs])
        rows.append(row | errors.get(name, {}))
        if flags.json:
            print(json.dumps(rows[-1]), flush=True)
    if not flags.json:
        print(table(rows))
    return 0


PIPELINES = {  # whether the pipeline has the environment of main.py
    **{"flax's example": False, "reading only": False, "decoding and cropping only": True},
    **{"our reading only": True, "exact": True, "fast": True, "in memory": True},
    **{"flax's example, eval": False, "exact, eval": True, "fast, eval": True},
}


def environment_of(name: str, same: bool) -> dict[str, str]:
    """Returns the environment of a pipeline's process; with `same` it is always the user's."""
    extra = environment.DEFAULTS if PIPELINES[name] and not same else {}
    return extra | USER


def _keys(size: int) -> dict[str, Any]:
    return {"image_size": size, "crop_area_min": 0.08, "random_flip": True}


def pipeline(name: str, folder: str, flags: argparse.Namespace) -> Batches:
    """Yields the batches of one of `PIPELINES` without end."""
    source, examples = photos.open_both(folder)
    size, batch = flags.size, flags.batch

    def ours(mode: str, cache: int = 0) -> Batches:
        keys = Images(**_keys(size), preprocessing=mode, decoded_cache=cache)
        buffer = None if cache else 16 * batch
        order = Order.make(source.shards.counts, 0, batch, photos.SHARDS, buffer)
        train_batches = in_memory.train_batches if cache else input_pipeline.train_batches
        return train_batches(source, keys, order, range(order.streams), 0)

    def reading() -> Batches:
        order = Order.make(source.shards.counts, 0, batch, photos.SHARDS, 16 * batch)
        stream = records.train_stream(source.shards, order, range(photos.SHARDS), 0)
        tf = tensorflow()

        def length(block: Any, example: Any, row: Any, seeds: Any) -> dict[str, Any]:
            return {"bytes": tf.strings.length(source.parse(tf.gather(block, row))[0])}

        return stream.map(length).batch(batch).prefetch(2).as_numpy_iterator()

    def evaluated(mode: str) -> Batches:
        keys = Images(**_keys(size), preprocessing=mode)
        while True:
            yield from input_pipeline.eval_batches(source, keys, batch, 0, 1)

    def flax(image: Callable[[Any], Any], train: bool = True) -> Batches:
        return flax_batches(examples, batch, image, train)

    makers: dict[str, Callable[[], Batches]] = {
        "flax's example": lambda: flax(lambda e: flax_image(e, size, True)),
        "reading only": lambda: flax(lambda e: tensorflow().strings.length(e)),
        "decoding and cropping only": lambda: flax(lambda e: decoded(e, size)),
        "our reading only": reading,
        "exact": lambda: ours("exact"),
        "fast": lambda: ours("fast"),
        "in memory": lambda: ours("exact", flags.cache),
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
    crop = images.decode(
        encoded, lambda h, w: input_pipeline.random_window(h, w, seed, 0.08, size), only_jpeg=True
    )
    return crop[0, 0]


class Server:
    """A process that serves one pipeline."""

    def __init__(self, name: str, folder: str, flags: argparse.Namespace):
        self.name = name
        # TensorFlow's messages, and the reason of a crash.
        self._log = os.path.join(folder, f"{name}.log")
        command = [sys.executable, "-m", "scripts.bench.input", f"--folder={folder}"]
        command += [f"--{k}={vars(flags)[k]}" for k in ("images", "size", "cache", "batch")]
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [*command, f"--batches={flags.batches}", f"--serve={name}"],
                env=environment_of(name, flags.same_environment),
                **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log},
                text=True,
            )

    def ready(self) -> None:
        """Waits for the first batch."""
        self._answer()

    def turn(self) -> tuple[float, int]:
        """Runs a turn; returns its CPU seconds and the memory after it in bytes."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_answer` reports the end of the process
        return self._answer()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        with open(self._log, errors="replace") as log:
            print(log.read()[-2000:], end="", file=sys.stderr)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        sys.exit(f"ERROR: the process of {self.name!r} ended with {how}")


def measure(folder: str, flags: argparse.Namespace) -> dict[str, list[float]]:
    """Measures CPU seconds per batch in each round, by pipeline.

    It prints the memory of the processes to stderr.
    """
    names = [n for n in PIPELINES if flags.only in n or n.startswith("flax")]
    servers = []
    try:
        for name in names:
            servers.append(Server(name, folder, flags))
        for server in servers:
            server.ready()
        return _turns(servers, flags)
    finally:
        for server in servers:
            server.stop()


def _turns(servers: list[Server], flags: argparse.Namespace) -> dict[str, list[float]]:
    spent: dict[str, list[float]] = {server.name: [] for server in servers}
    memory = dict.fromkeys(spent, 0)
    begun = time.monotonic()
    for turn in range(1, flags.rounds + 1):
        for server in servers:
            seconds, memory[server.name] = server.turn()
            spent[server.name].append(seconds / flags.batches)
        left = (time.monotonic() - begun) / turn * (flags.rounds - turn)
        most = max(memory, key=lambda name: memory[name])
        shown = f"{sum(memory.values()) / 1e6:,.0f} MB held, {memory[most] / 1e6:,.0f} by {most!r}"
        print(f"round {turn} of {flags.rounds}, {shown}, {left:.0f} s left", file=sys.stderr)
    return spent


def serve(flags: argparse.Namespace) -> int:
    """Serves one pipeline: each line of stdin asks for a turn; the answer is that of `turn`."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print to stdout
    stream = pipeline(flags.serve, flags.folder, flags)
    next(stream)
    settle()
    print("[]", file=answers, flush=True)
    for _ in sys.stdin:
        before = time.process_time()
        for _ in itertools.islice(stream, flags.batches):
            pass
        settle()
        print(json.dumps([time.process_time() - before, _resident()]), file=answers, flush=True)
    return 0


def _resident() -> int:
    """The memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def quality(jpegs: list[bytes], size: int, cache: int) -> dict[str, dict[str, float]]:
    """Measures the error of train crops against Pillow's antialiased bicubic crops, by pipeline."""
    squares: dict[str, list[float]] = {}
    for i, encoded in enumerate(jpegs):
        photo = Image.open(io.BytesIO(encoded)).convert("RGB")
        window = input_pipeline.random_window(photo.height, photo.width, [0, i], 0.08, size)
        y, x, height, width = window.numpy().tolist()
        box = (x, y, x + width, y + height)
        best = np.asarray(photo.resize((size, size), Image.Resampling.BICUBIC, box), np.float64)
        for name, pixels in _crops(encoded, window, size, cache, photo).items():
            squares.setdefault(name, []).append(float(np.mean((pixels - best) ** 2)))
    means = {name: statistics.mean(errors) for name, errors in squares.items()}
    return {
        name: {"rmse": mean**0.5, "psnr": 10 * math.log10(255**2 / mean)}
        for name, mean in means.items()
    }


def _crops(
    encoded: Any, window: Any, size: int, cache: int, photo: Image.Image
) -> dict[str, np.ndarray]:
    """float[size, size, 3] of a window, by each pipeline."""
    tf = tensorflow()
    plain = tf.io.decode_and_crop_jpeg(encoded, window, channels=3)  # the default, fast DCT
    crop = images.decode(encoded, lambda height, width: window)
    shrunk = images.shrink(images.decode(encoded), cache).numpy()
    scale = np.tile([cache / photo.height, cache / photo.width], 2)
    device = in_memory.crop_on_device(
        jnp.asarray(shrunk[None]),
        jnp.asarray((window.numpy() * scale)[None], jnp.float32),
        jnp.zeros(1, bool),
        size,
        jnp.bfloat16,
    )
    crops = {
        "flax's example": tf.image.resize(plain, [size, size], method="bicubic"),
        "exact": input_pipeline.resize(crop, size, "exact"),
        "fast": input_pipeline.resize(crop, size, "fast"),
        "in memory": device[0],
    }
    return {name: np.asarray(pixels, np.float64) for name, pixels in crops.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Formats rows as a Markdown table."""
    digits = {"rate": 0, "ratio": 2, "rmse": 1, "psnr": 1}
    lines = [list(_COLUMNS.values()), ["---"] * len(_COLUMNS)]
    for row in rows:
        cells = [f"{row[k]:,.{digits[k]}f}" if k in row else "" for k in list(_COLUMNS)[1:]]
        if "verdict" in row:
            cells[1] = spread.text(row["ratio"], row)
        lines.append([row["pipeline"], *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="", help="folder of train-* records in ImageNet's schema")
    for name, default in {"images": 1000, "size": 224, "batch": 128, "rounds": 5}.items():
        add(f"--{name}", type=int, default=default)
    add("--cache", type=int, default=256, help="config.decoded_cache")
    add("--batches", type=int, default=4, help="of each pipeline in a round")
    add("--only", default="", help="pipelines with this in their name, and flax's")
    add("--same_environment", action="store_true", help="your environment for all pipelines")
    add("--json", action="store_true")
    add("--serve", default="", help=argparse.SUPPRESS)  # what a process is for
    add("--folder", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
