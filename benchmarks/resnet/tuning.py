"""What fine-tuning on few images needs: the head's own rate, class weights, kept statistics."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.base import Benchmark, Group
from benchmarks.sharded import Sharded
from errors import ConfigError, some
from ops.images import labelled

FEW_IMAGES = 2_000  # below this number, new statistics are worse than those of the first model
_FEW_SHARED = 10  # images that share statistics: below, these are too noisy
_FEW_PER_CLASS = 5  # validation images


class Tunable(Sharded):
    """A classifier with the layer `head`, whose settings have the keys of configs/finetune.py."""

    def __init__(self, settings: Any, cache_dir: str):
        self.settings, self.cache_dir, rate = settings, cache_dir, settings.head_learning_rate
        heads = Group(decayed=True, rate=rate), Group(rate=rate)
        self.groups = {**Benchmark.groups, "head decayed": heads[0], "head not decayed": heads[1]}

    def source(self, split: str) -> labelled.Source:
        raise NotImplementedError

    def num_examples(self, split: str) -> int:
        if split == "train" and self.settings.class_weights:
            _ = self.class_weights  # an empty class is refused before anything is compiled
        return super().num_examples(split)

    @functools.cached_property
    def class_weights(self) -> np.ndarray:
        """The weight of each class in the loss, f32[K]."""
        return class_weights(self._label_counts("train"), self.source("train").class_names)

    def keeps_statistics(self, norm_examples: int) -> bool:
        """Whether training uses BatchNorm's running statistics, and never changes them.

        `norm_examples` is the number of images of a batch that share statistics.
        """
        chosen, images = self.settings.bn_statistics, self.nominal_examples("train")
        if self.settings.normalization == "group":
            return False
        if chosen != "auto":
            return chosen == "frozen"
        if self.cache_dir:  # --mode=preflight has none, and reads no data
            images = self.declared_examples("train") or self.num_examples("train")
        return images < FEW_IMAGES or norm_examples < _FEW_SHARED

    def notes(self, norm_examples: int, evaluating: bool) -> list[str]:
        sentences, names = [], self.source("train").class_names
        if self.keeps_statistics(norm_examples):
            sentences.append("BatchNorm keeps the statistics of config.init_from")
        if self.settings.class_weights:
            weights = self.class_weights
            low, high = weights.argmin(), weights.argmax()
            sentences.append(
                f"the loss weighs classes from {weights[low]:.3g} ({_name(names, low)}) "
                f"to {weights[high]:.3g} ({_name(names, high)})"
            )
        if evaluating and self.num_examples("eval") < FEW_IMAGES:
            counts = self._label_counts("eval")
            if few := [_name(names, i) for i in np.flatnonzero(counts < _FEW_PER_CLASS)]:
                sentences.append(
                    f"{_having(few, len(counts))} fewer than {_FEW_PER_CLASS} validation images: "
                    "their scores are chance, and so is the choice of the best step; prepare the "
                    "data with a larger --validation_fraction"
                )
        return sentences

    def check_random_start(self, norm_examples: int) -> None:
        if self.keeps_statistics(norm_examples):
            raise ConfigError(
                f"config.bn_statistics={self.settings.bn_statistics!r} keeps the statistics of "
                "config.init_from, which names no model: give --config.init_from=WORKDIR, or "
                "--config.bn_statistics=batch to train from random weights"
            )

    def label(self, path: str) -> str:
        return f"head {super().label(path)}" if path.startswith("head/") else super().label(path)

    def _label_counts(self, split: str) -> np.ndarray:
        cache = f"{self.cache_dir}/{split}_labels.json"
        return labelled.label_counts(self.source(split), cache)


def class_weights(counts: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """The weight of each class, f32[K]: n / (K * count), whose mean over the n images is 1.

    Args:
      counts: int[K], the training images of each class.
      names: of the classes, or ().

    Raises:
      ConfigError: a class has no image.
    """
    if empty := [_name(names, i) for i in np.flatnonzero(counts == 0)]:
        raise ConfigError(
            f"config.class_weights='auto': {_having(empty, len(counts))} no training image and so "
            "no weight; set --config.class_weights='', or prepare the data again without them"
        )
    return (counts.sum() / (len(counts) * counts)).astype(np.float32)


def _name(names: tuple[str, ...], i: Any) -> str:
    return (names[i] if i < len(names) else "") or f"class {i}"


def _having(names: Sequence[str], total: int) -> str:
    """Subject and verb of a sentence about some classes."""
    return f"{len(names)} ({some(names)}) of {total} classes {'has' if len(names) == 1 else 'have'}"
