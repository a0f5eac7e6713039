"""Limits of the files that are read, so that no file fills the memory or never ends."""

import os

from common.errors import DataError, UserError

PIXELS = 178_956_970  # of an image; TensorFlow decodes no JPEG of more (2^29 bytes in RGB)
IMAGE_BYTES = 1 << 30  # of an image's file: `PIXELS` without compression, 16 bits per channel
ANNOTATION_BYTES = 8 << 30  # of a JSON file of boxes; COCO's has 0.45 GB, Objects365's about 6
SGM_BYTES = 256 << 20  # WMT's sets for tests have about 1 MB
UNIT_BYTES = 16 << 20  # of XML from one unit to the next; a unit of texts has about 1 KB
# Of a file of class names: ImageNet's 50,000 labels have 0.5 MB. Of a .po or an XLIFF that stays in
# the memory: large ones have 10 MB.
TEXT_BYTES = 64 << 20
LINE_BYTES = 1 << 20  # of a line of text; a sentence has 100 to 1,000


def check_file(path: str, kind: type[UserError] = DataError) -> None:
    """Raises `kind` if a local path is a pipe or a device: reading it might never end."""
    is_local = "://" not in path and os.path.exists(path)
    if is_local and not (os.path.isfile(path) or os.path.isdir(path)):
        raise kind(
            f"{path} is a pipe or a device, not a file: save its content, and give that file"
        )


def check_size(path: str, size: int, most: int, kind: type[UserError] = DataError) -> None:
    """Raises `kind` if a file of `size` bytes has more than `most`."""
    if size > most:
        raise kind(f"{path} has {size:,} bytes: more than {most:,} are not read; is it that file?")
