"""The TFRecord schemas of the TPU tutorials: one `tf.train.Example` per image.

In ImageNet's, labels count from 1, because 0 is reserved for a background class; readers subtract
1. In COCO's (`create_coco_tf_record.py`), labels are the category ids of the annotations.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from common.data.shards import tensorflow


@dataclasses.dataclass(frozen=True)
class Objects:
    """The n objects of an image.

    Attributes:
        boxes: float32[n, 4]: y0, x0, y1, x1 as shares of the image.
        labels: the category ids.
        texts: the categories' names.
        crowd: whether an object is a crowd.
        areas: of the outlines, in square pixels.
        masks: of each object a PNG of the image's size, 1 inside; None leaves them out.
    """

    boxes: np.ndarray
    labels: list[int]
    texts: list[str]
    crowd: list[bool]
    areas: list[float]
    masks: list[bytes] | None


def example(
    encoded: bytes,
    label: int,
    synset: str,
    filename: str,
    size: tuple[int, int],
    text: str = "",
) -> bytes:
    """Serializes one image as a tf.train.Example; the same arguments give the same bytes.

    Args:
        encoded: an RGB image as JPEG.
        label: 1 for the first class.
        synset: the class's WordNet id, 'n01440764', or another short name of the class.
        filename: of the original image, without folders.
        size: height and width in pixels.
        text: the class in words; with '' the example has no image/class/text.

    Raises:
        ValueError: the label is below 1, or the image is no JPEG.
    """
    if label < 1:
        raise ValueError(f"labels start at 1, got {label} ({filename})")
    feature = {
        **_image(encoded, size, filename, b"JPEG"),
        "image/colorspace": strings([b"RGB"]),
        "image/channels": ints([3]),
        "image/class/label": ints([label]),
        "image/class/synset": strings([synset.encode()]),
    }
    if text:
        feature["image/class/text"] = strings([text.encode()])
    return serialize(feature)


def detection_example(
    encoded: bytes, size: tuple[int, int], image_id: int, filename: str, objects: Objects
) -> bytes:
    """Serializes one image with its objects; the same arguments give the same bytes.

    Args:
        encoded: an RGB image as JPEG.
        size: height and width in pixels.
        image_id: of the annotations.
        filename: of the annotations.
        objects: none is no fault.

    Raises:
        ValueError: the image is no JPEG.
    """
    feature = {
        **_image(encoded, size, filename, b"jpeg"),
        "image/source_id": strings([str(image_id).encode()]),
        "image/key/sha256": strings([hashlib.sha256(encoded).hexdigest().encode()]),
        "image/object/class/label": ints(objects.labels),
        "image/object/class/text": strings([text.encode() for text in objects.texts]),
        "image/object/is_crowd": ints(map(int, objects.crowd)),
        "image/object/area": _floats(objects.areas),
    }
    for i, name in enumerate(("ymin", "xmin", "ymax", "xmax")):
        feature[f"image/object/bbox/{name}"] = _floats(objects.boxes[:, i].tolist())
    if objects.masks is not None:
        feature["image/object/mask"] = strings(objects.masks)
    return serialize(feature)


def _image(encoded: bytes, size: tuple[int, int], filename: str, form: bytes) -> dict[str, Any]:
    """What both schemas say of an image; ValueError if it is no JPEG."""
    if not encoded.startswith(b"\xff\xd8"):
        raise ValueError(f"not a JPEG: {filename}")
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


def _floats(values: Iterable[float]) -> Any:
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
