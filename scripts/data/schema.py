"""The ImageNet TFRecord schema of the TPU tutorials: one `tf.train.Example` per image.

Labels count from 1, because 0 is reserved for a background class; readers subtract 1.
"""

from ops.shards import tensorflow


def example(
    encoded: bytes,
    label: int,
    synset: str,
    filename: str,
    height: int,
    width: int,
    text: str = "",
) -> bytes:
    """Serializes one image as a tf.train.Example; the same arguments give the same bytes.

    Args:
        encoded: an RGB image as JPEG.
        label: 1 for the first class.
        synset: the class's WordNet id, 'n01440764', or another short name of the class.
        filename: of the original image, without folders.
        height: in pixels.
        width: in pixels.
        text: the class in words; with '' the example has no image/class/text.

    Raises:
        ValueError: the label is below 1, or the image is no JPEG.
    """
    if label < 1:
        raise ValueError(f"labels start at 1, got {label} ({filename})")
    if not encoded.startswith(b"\xff\xd8"):
        raise ValueError(f"not a JPEG: {filename}")
    train = tensorflow().train

    def ints(value: int):
        return train.Feature(int64_list=train.Int64List(value=[value]))

    def string(value: bytes):
        return train.Feature(bytes_list=train.BytesList(value=[value]))

    feature = {
        "image/height": ints(height),
        "image/width": ints(width),
        "image/colorspace": string(b"RGB"),
        "image/channels": ints(3),
        "image/class/label": ints(label),
        "image/class/synset": string(synset.encode()),
        "image/format": string(b"JPEG"),
        "image/filename": string(filename.encode()),
        "image/encoded": string(encoded),
    }
    if text:
        feature["image/class/text"] = string(text.encode())
    message = train.Example(features=train.Features(feature=feature))
    return message.SerializeToString(deterministic=True)  # else the order of the keys varies
