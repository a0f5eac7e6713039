"""A batch to time a train step with: the first one of the data, or a random one without data.

A random batch has the shapes of the recipe, rows full of sentences, and 16 objects in an image.
"""

import sys
from typing import Any

import numpy as np
from etils import epath

from benchmarks.base import HostBatch, Spec
from benchmarks.translation.vocabulary import EOS
from engine.run import Programs

_OBJECTS = 16
_IMAGES = 1000  # and as many classes, for a ResNet of no data


def without_data(config: Any) -> Any:
    """The recipe without its folder of data, if that is not here; an unlocked config."""
    folder = config.data_dir
    if folder and epath.Path(folder).exists():
        return config
    config.data_dir = ""
    if config.benchmark == "resnet" and config.dataset != "fake":
        config.dataset = "fake"
        for key in ("num_train_images", "num_eval_images", "num_label_classes"):
            config[key] = config[key] or _IMAGES
    if folder:
        print(f"NOTE {folder} does not exist: a random batch instead", file=sys.stderr)
    return config


def first(programs: Programs) -> HostBatch:
    """The first global batch of training, on the host."""
    config, benchmark = programs.settings.config, programs.benchmark
    size = programs.settings.train_batch_size
    if not config["data_dir"] and config["benchmark"] != "resnet":
        return random(benchmark, size)
    batch = next(iter(benchmark.train_batches(size, 0, 1, 0)))
    return {name: value for name, value in batch.items() if name != "host_seconds"}


def fitting(lowered: list[Any], batch: HostBatch) -> Any:
    """The program for the shapes of `batch`, out of [(batch, program), ...]."""
    shapes = {name: x.shape for name, x in batch.items()}
    return next(
        program
        for specs, program in lowered
        if all(x.shape == shapes[name] for name, x in specs.items())
    )


def random(benchmark: Any, size: int) -> HostBatch:
    """A random batch of a benchmark other than a ResNet; of several lengths, a middle one."""
    draw, specs = np.random.default_rng(0), benchmark.batch_spec("train", size)
    spec = specs[len(specs) // 2]
    drawn: HostBatch
    if "inputs" in spec:
        drawn = _sentences(draw, spec, benchmark.vocabulary_size)
    elif "boxes" in spec:
        drawn = _objects(draw, spec, benchmark._classes)
    else:
        users, items = benchmark._model.num_users, benchmark._model.num_items
        drawn = {"user": draw.integers(0, users, size), "item": draw.integers(0, items, size)}
        drawn["label"] = draw.random(size) < 0.2
    numbers = np.arange(size)  # the example's number, or the seed of its draws
    return {name: drawn.get(name, numbers).astype(x.dtype) for name, x in spec.items()}


def _sentences(draw: np.random.Generator, spec: Spec, words: int) -> HostBatch:
    """Rows that end in up to an eighth of padding; packed ones have four sentences."""
    batch: HostBatch = {}
    for side in ("inputs", "targets"):
        rows, length = spec[side].shape
        is_packed, position = f"{side}_position" in spec, np.arange(length)
        last = length - 1 - draw.integers(0, length // 8 + 1, (rows, 1))
        longest = max(length // 4, 1) if is_packed else length
        ids, real = draw.integers(EOS + 1, words, (rows, length)), position <= last
        ends = (position % longest == longest - 1) | (position == last)
        batch[side] = np.where(ends, EOS, ids) * real
        batch[f"{side}_position"] = position % longest * real
        batch[f"{side}_segmentation"] = (position // longest + 1) * real
    return batch


def _objects(draw: np.random.Generator, spec: Spec, classes: int) -> HostBatch:
    """Noise with up to 16 objects in an image; their masks fill their boxes."""
    rows, most, _ = spec["boxes"].shape
    shape = rows, min(most, _OBJECTS)
    centres, sides = draw.uniform(0.25, 0.75, (*shape, 2)), draw.uniform(0.1, 0.5, (*shape, 2))
    boxes = np.concatenate([centres - sides / 2, centres + sides / 2], -1)
    image = spec["image"].shape
    batch = {
        "image": draw.integers(0, 256, image, np.uint8),
        "classes": draw.integers(1, classes + 1, shape),
    }
    if "size" in spec:  # pixels, of images in blocks of 2 x 2
        height, width = 2 * image[1], 2 * image[2]
        boxes *= (height, width) * 2
        batch["size"] = np.tile((height, width), (image[0], 1))
        batch["masks"] = np.full(spec["masks"].shape, 255)
    padding = ((0, 0), (0, most - shape[1]))
    return batch | {
        "classes": np.pad(batch["classes"], padding),
        "boxes": np.pad(boxes, (*padding, (0, 0))),
    }
