"""Photos for scripts.bench.input: ImageNet records and a TFDS set of the same JPEGs."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.resnet.records import open_records
from input_pipeline import Source
from ops import files, records
from ops.preparation import schema
from ops.shards import tensorflow

SHARDS = 8


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
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(file, "JPEG", quality=97)
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
    """Writes photos as records in ImageNet's schema, and as a TFDS set in the same folder."""
    import tensorflow_datasets as tfds

    names = [f"{i}.JPEG" for i in range(len(photos))]
    labels = [i % 1000 for i in range(len(photos))]
    rows = list(zip(photos, labels, names, strict=True))
    examples = [schema.example(p, label + 1, "photo", name, (375, 500)) for p, label, name in rows]
    records.write_shards(folder, "train", examples, SHARDS)

    def serialized(photo: bytes, label: int, name: str) -> bytes:
        feature = {"image": schema.strings([photo]), "label": schema.ints([label])}
        return schema.serialize({**feature, "file_name": schema.strings([name.encode()])})

    target, lengths = os.path.join(folder, "photos", "1.0.0"), []
    os.makedirs(target)
    for shard in range(SHARDS):
        path = os.path.join(target, f"photos-train.tfrecord-{shard:05d}-of-{SHARDS:05d}")
        shard_rows = rows[shard::SHARDS]
        with tensorflow().io.TFRecordWriter(path) as writer:
            for row in shard_rows:
                writer.write(serialized(*row))
        lengths.append(len(shard_rows))
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=1000),
            "file_name": tfds.features.Text(),
        }
    )
    size = sum(map(len, photos))
    split = tfds.core.SplitInfo(name="train", shard_lengths=lengths, num_bytes=size)
    tfds.folder_dataset.write_metadata(data_dir=target, features=features, split_infos=[split])


def open_both(folder: str) -> tuple[Source, Any]:
    """Opens the records of `write`, and its TFDS set as a tf.data set of encoded examples."""
    import tensorflow_datasets as tfds

    index = os.path.join(folder, f"index-{os.getpid()}.json")
    source = open_records(folder, "train-*", 1000, index, "train")
    builder: Any = tfds.builder_from_directory(os.path.join(folder, "photos", "1.0.0"))
    return source, builder.as_dataset(
        split="train", decoders={"image": tfds.decode.SkipDecoding()}, shuffle_files=True
    )
