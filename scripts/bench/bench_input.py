"""Compares the input pipeline, in images per second of one core, with that of flax's example.

python scripts/bench/bench_input.py                  on photos cut from scikit-learn's two
python scripts/bench/bench_input.py --data=DIR       on the first of your own train-* TFRecords

The baseline reads the same JPEGs as a TFDS set, as that example does. Pipelines take turns, and
each round counts the CPU time of this process until nothing is left in flight. What is measured is
`train_batches` as train.py calls it, from records to batches on the host. --json prints an object
per row.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import jax.numpy as jnp
import numpy as np
import records as shards
from PIL import Image

import input_pipeline
from input_pipeline import Preprocessing
from ops import files, image_records, images, records
from ops.records import DataError, Order, tensorflow

Batches = Iterator[dict[str, np.ndarray]]
_SHARDS = 8
_COLUMNS = {
    **{"pipeline": "pipeline", "rate": "images per CPU second", "ratio": "ratio"},
    **{"rmse": "RMSE of 255", "psnr": "PSNR, dB"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and returns the exit code."""
    flags = _flags(arguments)
    if flags.images < flags.batch:
        sys.exit(f"ERROR: --images={flags.images}: must be at least a batch, {flags.batch}")
    try:
        return _main(flags)
    except DataError as error:
        sys.exit(f"ERROR: {error}")


def _main(flags: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        photos = first(flags.data, flags.images) if flags.data else cut(flags.images)
        source, examples = write(folder, photos)
        measured = pipelines(source, examples, flags)
        found = measure(measured, flags.rounds, flags.batches)
        errors = quality(photos[:100], flags.size, flags.cache)
    rows = []
    for name, seconds in found.items():
        base = "flax's example, eval" if name.endswith("eval") else "flax's example"
        row = {"pipeline": name, "rate": flags.batch / seconds, "ratio": found[base] / seconds}
        rows.append(row | errors.get(name, {}))
        if flags.json:
            print(json.dumps(rows[-1]), flush=True)
    if not flags.json:
        print(table(rows))
    return 0


def cut(count: int) -> list[bytes]:
    """`count` JPEGs of 500 x 375 pixels and about 110 KB.

    Each is another cut-out of one of scikit-learn's two photos, mirrored or not, darker or lighter.
    """
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    draw, found = np.random.default_rng(0), []
    for i in range(count):
        photo = photos[i % len(photos)]
        width = draw.uniform(480, min(photo.width, photo.height * 4 / 3))
        x, y = draw.uniform(0, photo.width - width), draw.uniform(0, photo.height - 0.75 * width)
        box = (x, y, x + width, y + 0.75 * width)
        pixels = np.asarray(photo.resize((500, 375), Image.Resampling.LANCZOS, box))
        pixels = pixels[:, :: draw.choice([-1, 1])] * draw.uniform(0.7, 1.1)
        file = io.BytesIO()
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(file, "JPEG", quality=97)
        found.append(file.getvalue())
    return found


def first(folder: str, count: int) -> list[bytes]:
    """The first `count` images of the train-* records in a folder, in ImageNet's schema."""
    tf = tensorflow()
    feature = {"image/encoded": tf.io.FixedLenFeature([], tf.string)}
    paths = files.find(folder, "train-*", "train records")
    read = tf.data.TFRecordDataset(paths).take(count)
    return [tf.io.parse_single_example(r, feature)["image/encoded"].numpy() for r in read]


def write(folder: str, photos: list[bytes]) -> tuple[image_records.Source, Any]:
    """Writes photos as records in ImageNet's schema and, beside them, as a TFDS set.

    Returns the records, and tf.data of the TFDS set's examples with the images still encoded.
    """
    import tensorflow_datasets as tfds

    train, names = tensorflow().train, [f"{i}.JPEG" for i in range(len(photos))]
    labels = [i % 1000 for i in range(len(photos))]
    rows = list(zip(photos, labels, names, strict=True))
    examples = [shards.example(p, label + 1, "photo", name, 375, 500) for p, label, name in rows]
    shards.write_shards(folder, "train", examples, _SHARDS)
    index = os.path.join(folder, "index.json")
    source = image_records.open_records(folder, "train-*", 1000, index, "train")

    def text(value: bytes) -> Any:
        return train.Feature(bytes_list=train.BytesList(value=[value]))

    def serialized(photo: bytes, label: int, name: str) -> bytes:
        number = train.Feature(int64_list=train.Int64List(value=[label]))
        feature = {"image": text(photo), "label": number, "file_name": text(name.encode())}
        return train.Example(features=train.Features(feature=feature)).SerializeToString()

    place, lengths = os.path.join(folder, "photos", "1.0.0"), []
    os.makedirs(place)
    for shard in range(_SHARDS):
        path = os.path.join(place, f"photos-train.tfrecord-{shard:05d}-of-{_SHARDS:05d}")
        mine = rows[shard::_SHARDS]
        with tensorflow().io.TFRecordWriter(path) as writer:
            for row in mine:
                writer.write(serialized(*row))
        lengths.append(len(mine))
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=1000),
            "file_name": tfds.features.Text(),
        }
    )
    size = sum(map(len, photos))
    split = tfds.core.SplitInfo(name="train", shard_lengths=lengths, num_bytes=size)
    tfds.folder_dataset.write_metadata(data_dir=place, features=features, split_infos=[split])
    builder: Any = tfds.builder_from_directory(place)
    return source, builder.as_dataset(
        split="train", decoders={"image": tfds.decode.SkipDecoding()}, shuffle_files=True
    )


# What is compared.


def pipelines(
    source: image_records.Source, examples: Any, flags: argparse.Namespace
) -> dict[str, Batches]:
    """Endless batches by name."""
    size, batch = flags.size, flags.batch

    def ours(mode: str, cache: int = 0) -> Batches:
        settings = Preprocessing(size, 0.08, True, mode, cache)
        buffer = None if cache else 16 * batch
        order = Order.make(source.shards, 0, batch, _SHARDS, buffer)
        return input_pipeline.train_batches(source, settings, order, 0, 1, 0)

    def reading() -> Batches:
        order = Order.make(source.shards, 0, batch, _SHARDS, 16 * batch)
        found = records.train_stream(order, range(_SHARDS), 0)
        tf = tensorflow()

        def length(block: Any, example: Any, row: Any, seeds: Any) -> dict[str, Any]:
            return {"bytes": tf.strings.length(source.parse(tf.gather(block, row))[0])}

        found = found.map(length)
        return found.batch(batch).prefetch(2).as_numpy_iterator()

    def evaluated(mode: str) -> Batches:
        settings = Preprocessing(size, 0.08, True, mode)
        while True:
            yield from input_pipeline.eval_batches(source, settings, batch, 0, 1)

    def flax(image: Callable[[Any], Any], train: bool = True) -> Batches:
        return flax_batches(examples, batch, image, train)

    found = {
        "flax's example": flax(lambda e: flax_image(e, size, True)),
        "reading only": flax(lambda e: tensorflow().strings.length(e)),
        "decoding and cropping only": flax(lambda e: decoded(e, size)),
        "our reading only": reading(),
        "exact": ours("exact"),
        "fast": ours("fast"),
        "in memory": ours("exact", flags.cache),
        "flax's example, eval": flax(lambda e: flax_image(e, size, False), train=False),
        "exact, eval": evaluated("exact"),
        "fast, eval": evaluated("fast"),
    }
    return {k: v for k, v in found.items() if flags.only in k or k.startswith("flax")}


def flax_batches(examples: Any, batch: int, image: Callable[[Any], Any], train: bool) -> Batches:
    """The pipeline of flax's ImageNet example (2024): one shuffle buffer, 48 threads."""
    tf = tensorflow()
    options = tf.data.Options()
    options.threading.private_threadpool_size = 48
    found = examples.with_options(options)
    found = found.repeat().shuffle(2000, seed=0) if train else found
    found = found.map(
        lambda e: {"image": image(e["image"]), "label": e["label"]},
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    found = found.batch(batch, drop_remainder=True)
    return (found if train else found.repeat()).prefetch(10).as_numpy_iterator()


def flax_image(encoded: Any, size: int, train: bool) -> Any:
    """Its arithmetic: bicubic resize and normalisation to float32 on the host."""
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
        whole = tf.reduce_all(tf.equal(tf.shape(crop), shape))
        image = tf.cond(whole, centre, lambda: crop)
    image = tf.image.resize([image], [size, size], method="bicubic")[0]
    image = tf.reshape(image, [size, size, 3])
    image = tf.image.random_flip_left_right(image) if train else image
    image -= tf.constant(input_pipeline.MEAN_RGB, shape=[1, 1, 3])
    return image / tf.constant(input_pipeline.STDDEV_RGB, shape=[1, 1, 3])


def decoded(encoded: Any, size: int) -> Any:
    """A random crop that is not resized: what no pipeline that decodes can be quicker than."""
    tf = tensorflow()
    seed = tf.random.uniform([2], maxval=1 << 30, dtype=tf.int32)
    crop = images.decode(
        encoded, lambda h, w: images.random_window(h, w, seed, 0.08, size), only_jpeg=True
    )
    return crop[0, 0]


# How.


def measure(found: dict[str, Batches], rounds: int, batches: int) -> dict[str, float]:
    """CPU seconds per batch, by name; says on stderr how much memory this process holds."""
    for stream in found.values():
        next(stream)
        _settle()
    spent = dict.fromkeys(found, 0.0)
    begun = time.monotonic()
    for turn in range(1, rounds + 1):
        for name, stream in found.items():
            before = time.process_time()
            for _ in itertools.islice(stream, batches):
                pass
            _settle()
            spent[name] += time.process_time() - before
        left = (time.monotonic() - begun) / turn * (rounds - turn)
        held = f"{_resident() / 1e6:,.0f} MB held"
        print(f"round {turn} of {rounds}, {held}, {left:.0f} s left", file=sys.stderr, flush=True)
    # Totals, as our reader works in blocks: rounds that read one cost more than those that do not.
    return {name: seconds / rounds / batches for name, seconds in spent.items()}


def _settle() -> None:
    """Waits until no thread of this process works any more."""
    while True:
        before = time.process_time()
        time.sleep(0.1)
        if time.process_time() - before < 0.005:
            return


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def quality(photos: list[bytes], size: int, cache: int) -> dict[str, dict[str, float]]:
    """How far train crops are from Pillow's antialiased bicubic ones, by pipeline."""
    squares: dict[str, list[float]] = {}
    for i, encoded in enumerate(photos):
        photo = Image.open(io.BytesIO(encoded)).convert("RGB")
        window = images.random_window(photo.height, photo.width, [0, i], 0.08, size)
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
    whole = images.shrink(images.decode(encoded), cache).numpy()
    scale = np.tile([cache / photo.height, cache / photo.width], 2)
    device = images.crop_on_device(
        jnp.asarray(whole[None]),
        jnp.asarray((window.numpy() * scale)[None], jnp.float32),
        jnp.zeros(1, bool),
        size,
        jnp.bfloat16,
    )
    found = {
        "flax's example": tf.image.resize(plain, [size, size], method="bicubic"),
        "exact": images.resize(crop, size, "exact"),
        "fast": images.resize(crop, size, "fast"),
        "in memory": device[0],
    }
    return {name: np.asarray(pixels, np.float64) for name, pixels in found.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    digits = {"rate": 0, "ratio": 2, "rmse": 1, "psnr": 1}
    lines = [list(_COLUMNS.values()), ["---"] * len(_COLUMNS)]
    for row in rows:
        cells = [f"{row[k]:,.{digits[k]}f}" if k in row else "" for k in list(_COLUMNS)[1:]]
        lines.append([row["pipeline"], *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="", help="folder of train-* records in ImageNet's schema")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--cache", type=int, default=256, help="config.decoded_cache")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, default=4, help="of each pipeline in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="pipelines whose name holds this, and flax's")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
