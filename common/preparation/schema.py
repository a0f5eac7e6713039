"""What the TFRecord schemas of the TPU tutorials share: one `tf.train.Example` per image.

The `preparation/examples.py` of benchmarks/resnet and benchmarks/detection have the schemas.
"""

from collections.abc import Iterable
from typing import Any

from common.data.shards import GROUP
from common.tensorflow import tensorflow


def image(
    encoded: bytes, size: tuple[int, int], filename: str, form: bytes, group: str = ""
) -> dict[str, Any]:
    """The features of an image in both schemas, and the group that it belongs to, if any."""
    own = {GROUP: strings([group.encode()])} if group else {}
    return own | {
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
