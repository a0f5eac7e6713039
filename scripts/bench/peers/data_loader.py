"""torch's DataLoader on a folder of class folders, for scripts.bench.input --peer=torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from etils import epath

from common.images.input_spec import IMAGENET


def write(folder: str, photos: list[bytes]) -> None:
    """Writes photos as files of ten classes, which `batches` reads."""
    for i, photo in enumerate(photos):
        path = epath.Path(folder) / str(i % 10) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo)


def batches(folder: str, size: int, batch: int, workers: int) -> Iterator[Any]:
    """Endless [images float32[b, 3, size, size], labels int64[b]], as torch's ImageNet example."""
    data: Any = importlib.import_module("torch.utils.data")
    vision: Any = importlib.import_module("torchvision")
    mean, std = ([value / 255 for value in values] for values in IMAGENET)
    steps = [vision.transforms.RandomResizedCrop(size), vision.transforms.RandomHorizontalFlip()]
    steps += [vision.transforms.ToTensor(), vision.transforms.Normalize(mean, std)]
    photos = vision.datasets.ImageFolder(folder, vision.transforms.Compose(steps))
    # Without an end: workers do not wait for each other between two epochs.
    sampler = data.RandomSampler(photos, replacement=True, num_samples=1 << 30)
    return iter(data.DataLoader(photos, batch, sampler=sampler, num_workers=workers))
