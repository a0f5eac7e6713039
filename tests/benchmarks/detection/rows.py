"""Records of images with boxes, for tests: written by hand, key by key; and their batches."""

import io
import itertools

import numpy as np
from PIL import Image

from common.tensorflow import tensorflow

SIDES = ("ymin", "xmin", "ymax", "xmax")


def encode(height=12, width=15, file_format="PNG", seed=0):
    """An image file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return encode_pixels(pixels, file_format)


def encode_pixels(pixels, file_format="JPEG"):
    """An image file of uint8[h, w, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format)
    return file.getvalue()


def example(encoded, size, boxes=(), labels=(), source_id="1", **changed):
    """A serialized tf.train.Example; `changed` replaces keys of image/object, None removes one.

    It may add `crowds`, numbers, and `masks`, of which each is the bytes of a PNG.
    """
    train = tensorflow().train
    boxes = np.reshape(boxes, (-1, 4))

    def strings(value):
        return train.Feature(bytes_list=train.BytesList(value=[value]))

    def integers(values):
        return train.Feature(int64_list=train.Int64List(value=values))

    feature = {"encoded": strings(encoded), "source_id": strings(source_id.encode())}
    feature |= {"height": integers([size[0]]), "width": integers([size[1]])}
    feature |= {"object/class/label": integers(labels)}
    for side, values in zip(SIDES, boxes.T, strict=True):
        numbers = train.FloatList(value=changed.pop(side, values))
        feature[f"object/bbox/{side}"] = train.Feature(float_list=numbers)
    if "crowds" in changed:
        feature["object/is_crowd"] = integers(changed.pop("crowds"))
    if "masks" in changed:
        masks = train.BytesList(value=changed.pop("masks"))
        feature["object/mask"] = train.Feature(bytes_list=masks)
    for key in [key for key, value in changed.items() if value is None]:
        del feature[key]
    named = {f"image/{key}": value for key, value in feature.items()}
    return train.Example(features=train.Features(feature=named)).SerializeToString()


def png(mask):
    """The PNG of a mask bool[h, w], of 0 and 1 as the preparation writes it."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(mask).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def write(path, examples):
    """Writes a file of records."""
    with tensorflow().io.TFRecordWriter(str(path)) as writer:
        for serialized in examples:
            writer.write(serialized)


def first_batches(stream, steps, *specs):
    """The first batches of a stream; each has one of the `specs`, {leaf: (shape, dtype)}."""
    batches = list(itertools.islice(stream, steps))
    for batch in batches:
        assert (batch.pop("host_seconds") > 0).all()
        assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} in specs
    return batches


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for key in batch:
            np.testing.assert_array_equal(batch[key], other[key], strict=True)
