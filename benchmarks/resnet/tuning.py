"""Weights of classes, and when training keeps BatchNorm's statistics.

Only runs whose recipe has `class_weights` or `bn_statistics="auto"` import this file.
"""

from __future__ import annotations

import numpy as np

from benchmarks.resnet import class_counts
from errors import ConfigError
from input_pipeline import Source

_FEW_IMAGES = 2_000  # below this number, new statistics are worse than those of the first model
_FEW_SHARED = 10  # images that share statistics: below, these are too noisy


def are_few(images: int, norm_examples: int) -> bool:
    """Whether `config.bn_statistics='auto'` does not change BatchNorm's running statistics.

    `norm_examples` is the number of images of a batch that share statistics.
    """
    return images < _FEW_IMAGES or norm_examples < _FEW_SHARED


def class_weights(source: Source, cache: str) -> np.ndarray:
    """The weight of each class, f32[K]: n / (K * count), whose mean over the n images is 1.

    Raises:
      ConfigError: a class has no image.
    """
    counts, names = class_counts.label_counts(source, cache), source.class_names
    if empty := [class_counts.class_name(names, i) for i in np.flatnonzero(counts == 0)]:
        lack = f"{class_counts.subject(empty, len(counts))} no training image and so no weight"
        raise ConfigError(
            f"config.class_weights='auto': {lack}; set --config.class_weights='', or "
            "prepare the data again without them"
        )
    return (counts.sum() / (len(counts) * counts)).astype(np.float32)


def weights_note(weights: np.ndarray, names: tuple[str, ...]) -> str:
    """The smallest and the largest of the class weights, as a sentence."""
    low, high = weights.argmin(), weights.argmax()
    return (
        f"the loss weighs classes from {weights[low]:.3g} ({class_counts.class_name(names, low)}) "
        f"to {weights[high]:.3g} ({class_counts.class_name(names, high)})"
    )
