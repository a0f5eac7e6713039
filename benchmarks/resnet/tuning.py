"""What fine-tuning on few images needs: weights of classes, statistics that stay, warnings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from errors import ConfigError

FEW_IMAGES = 2_000  # below this number, new statistics are worse than those of the first model
_FEW_SHARED = 10  # images that share statistics: below, these are too noisy
_FEW_PER_CLASS = 5  # validation images


def keeps_statistics(chosen: str, images: int, norm_examples: int) -> bool:
    """Whether BatchNorm keeps its running statistics in training.

    Args:
      chosen: `config.bn_statistics`.
      images: the number of training images.
      norm_examples: how many images of a batch share statistics.
    """
    if chosen == "auto":
        return images < FEW_IMAGES or norm_examples < _FEW_SHARED
    return chosen == "frozen"


def class_weights(counts: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The weight of each class, f32[K]: n / (K * count), whose mean over the n images is 1.

    Args:
      counts: int[K], the training images of each class.
      names: of the classes, or ().

    Raises:
      ConfigError: a class has no image.
    """
    if empty := [_name(names, i) for i in np.flatnonzero(counts == 0)]:
        raise ConfigError(
            f"config.class_weights='auto': {_some(empty)} of {len(counts)} classes "
            f"{'has' if len(empty) == 1 else 'have'} no training image and so no weight; set "
            "--config.class_weights='', or prepare the data again without them"
        )
    return (counts.sum() / (len(counts) * counts)).astype(np.float32)


def describe(weights: np.ndarray, names: Sequence[str]) -> str:
    """The range of the weights of classes, in words."""
    low, high = int(weights.argmin()), int(weights.argmax())
    return (
        f"the loss weighs classes from {weights[low]:.3g} ({_name(names, low)}) "
        f"to {weights[high]:.3g} ({_name(names, high)})"
    )


def warn_of_few(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """A sentence if classes have too few of the validation images `counts` int[K] to be judged."""
    few = [_name(names, i) for i in np.flatnonzero(counts < _FEW_PER_CLASS)]
    if not few:
        return []
    return [
        f"{_some(few)} of {len(counts)} classes {'has' if len(few) == 1 else 'have'} fewer than "
        f"{_FEW_PER_CLASS} validation images: their scores are chance, and so is the choice of "
        "the best step; prepare the data with a larger --validation_fraction"
    ]


def _name(names: Sequence[str], i: int) -> str:
    return (names[i] if i < len(names) else "") or f"class {i}"


def _some(names: Sequence[str]) -> str:
    """Their number and the first of them."""
    return f"{len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
