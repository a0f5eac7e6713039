"""The TFRecord schemas of the TPU tutorials: one `tf.train.Example` per image.

In the ImageNet schema labels count from 1, because 0 is reserved for a background class; readers
subtract 1. benchmarks/detection/preparation/examples.py has the COCO schema, the one of
`create_coco_tf_record.py`.
"""

from collections.abc import Iterable
from typing import Any

from common.tensorflow import tensorflow


def example(
    encoded: bytes,
    label: int,
    synset: str,
    filename: str,
    size: tuple[int, int],
    text: str = "",
) -> bytes:
    """Serializes one image, an RGB JPEG, as a tf.train.Example; always to the same bytes.

    The first class has the `label` 1. `synset` is the WordNet id of the class, 'n01440764', or
    another short name; `text` is the class in words, if there are any. `filename` has no folders,
    and `size` is height and width in pixels.
    """
    feature = {
        **image(encoded, size, filename, b"JPEG"),
        "image/colorspace": strings([b"RGB"]),
        "image/channels": ints([3]),
        "image/class/label": ints([label]),
        "image/class/synset": strings([synset.encode()]),
    }
    if text:
        feature["image/class/text"] = strings([text.encode()])
    return serialize(feature)


def image(encoded: bytes, size: tuple[int, int], filename: str, form: bytes) -> dict[str, Any]:
    """The features of an image in both schemas."""
    return {
        "image/height": ints([size[0]]),
        "image/width": ints([size[1]]),
        "image/filename": strings([filename.encode()]),
        "image/format": strings([form]),
        "image/encoded": strings([encoded]),
    }


def ints(values: Iterable[int]) -> Any:
    """A feature of whole numbers."""
    train = tensorflow().train
    return train.Feature(int64_list=train.Int64List(value=values))


def floats(values: Iterable[float]) -> Any:
    """A feature of real numbers."""
    train = tensorflow().train
    return train.Feature(float_list=train.FloatList(value=values))


def strings(values: Iterable[bytes]) -> Any:
    """A feature of bytes."""
    train = tensorflow().train
    return train.Feature(bytes_list=train.BytesList(value=values))


def serialize(feature: dict[str, Any]) -> bytes:
    """A tf.train.Example of features by their keys; the same features give the same bytes."""
    train = tensorflow().train
    message = train.Example(features=train.Features(feature=feature))
    return message.SerializeToString(deterministic=True)  # else the order of the keys varies
