"""What fine-tuning on few images needs: class weights, and when BatchNorm's statistics stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.resnet import records
from errors import ConfigError, some
from input_pipeline import Source

FEW_IMAGES = 2_000  # below this number, new statistics are worse than those of the first model
_FEW_SHARED = 10  # images that share statistics: below, these are too noisy
_FEW_PER_CLASS = 5  # validation images


def are_few(images: int, norm_examples: int) -> bool:
    """Whether `config.bn_statistics='auto'` does not change BatchNorm's running statistics.

    `norm_examples` is the number of images of a batch that share statistics.
    """
    return images < FEW_IMAGES or norm_examples < _FEW_SHARED


def class_weights(source: Source, cache: str) -> np.ndarray:
    """The weight of each class, f32[K]: n / (K * count), whose mean over the n images is 1.

    Raises:
      ConfigError: a class has no image.
    """
    counts, names = records.label_counts(source, cache), source.class_names
    if empty := [_name(names, i) for i in np.flatnonzero(counts == 0)]:
        raise ConfigError(
            f"config.class_weights='auto': {_having(empty, len(counts))} no training image and so "
            "no weight; set --config.class_weights='', or prepare the data again without them"
        )
    return (counts.sum() / (len(counts) * counts)).astype(np.float32)


def weights_note(weights: np.ndarray, names: tuple[str, ...]) -> str:
    """The smallest and the largest of the class weights, as a sentence."""
    low, high = weights.argmin(), weights.argmax()
    return (
        f"the loss weighs classes from {weights[low]:.3g} ({_name(names, low)}) "
        f"to {weights[high]:.3g} ({_name(names, high)})"
    )


def few_notes(source: Source, cache: str) -> list[str]:
    """A sentence about the classes that have few validation images, if there are any."""
    counts, names = records.label_counts(source, cache), source.class_names
    if few := [_name(names, i) for i in np.flatnonzero(counts < _FEW_PER_CLASS)]:
        return [
            f"{_having(few, len(counts))} fewer than {_FEW_PER_CLASS} validation images: "
            "their scores are chance, and so is the choice of the best step; prepare the "
            "data with a larger --validation_fraction"
        ]
    return []


def _name(names: tuple[str, ...], i: Any) -> str:
    return (names[i] if i < len(names) else "") or f"class {i}"


def _having(names: Sequence[str], total: int) -> str:
    """Subject and verb of a sentence about some classes."""
    return f"{len(names)} ({some(names)}) of {total} classes {'has' if len(names) == 1 else 'have'}"
