"""Records of random images that are as large as photographs, in the schema of ImageNet."""

import io

import numpy as np
from PIL import Image

from benchmarks.resnet.preparation.examples import tf_example
from tests.helpers.preparation import write_shards

CLASSES = 4


def write(folder, counts, height, width):
    """Writes `counts` images by split, each in eight or fewer files."""
    draw = np.random.default_rng(0)
    for split, count in counts.items():
        rows = []
        for i in range(count):
            label, size = 1 + i % CLASSES, (height, width)
            jpeg = encoded(draw, *size)
            rows.append(tf_example(jpeg, label, f"n{label}", f"{i}.JPEG", size))
        write_shards(folder, split, rows, min(count, 8))


def encoded(draw, height, width):
    """Soft colours under fine noise, whose JPEG is as large as a photograph's."""
    soft = Image.fromarray(draw.integers(0, 256, (6, 8, 3), np.uint8))
    soft = soft.resize((width, height), Image.Resampling.BICUBIC)
    noise = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
    file = io.BytesIO()
    Image.blend(soft, noise, 0.25).save(file, "JPEG", quality=90)
    return file.getvalue()
