"""Classifies images with ResNets; this file has what `benchmarks` finds by name.

`classifier.ImageClassifier` joins the data, `models.ResNet`, the loss and the score.
"""

from typing import Any

from benchmarks.base import Model
from benchmarks.resnet.classifier import ImageClassifier
from benchmarks.resnet.settings import MODEL_KEYS, WHOLE_KEYS, Settings, restored
from benchmarks.resnet.use import foreign_settings, foreign_weights
from common.keys import read_config

__all__ = ["MODEL", "ImageClassifier", "Settings", "make"]

MODEL = Model(
    keys=MODEL_KEYS,
    whole_keys=WHOLE_KEYS,
    restored=restored,
    foreign_settings=foreign_settings,
    foreign_weights=foreign_weights,
)


def make(config: Any, cache_dir: str) -> ImageClassifier:
    """The benchmark of a config; ConfigError names the keys whose values cannot work."""
    return ImageClassifier(read_config(Settings, config), cache_dir)
