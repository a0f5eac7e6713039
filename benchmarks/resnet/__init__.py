"""Classifies images with ResNets; this file has what `benchmarks` finds by name.

`classifier.ResNet` joins the data, `models.ResNet`, the loss and the score. What few recipes name
lies in other files of this folder: several sizes of images, images in memory, regularisation, other
losses, the weights of classes, TFDS, random images.
"""

from __future__ import annotations

from typing import Any

from benchmarks.resnet.classifier import ResNet
from benchmarks.resnet.fake import FakeImages
from benchmarks.resnet.settings import MODEL_KEYS, WHOLE_KEYS, Settings, check_settings, restored
from benchmarks.resnet.use import foreign_settings, foreign_weights
from common.keys import read_config

__all__ = ["MODEL_KEYS", "WHOLE_KEYS", "ResNet", "Settings", "foreign_settings", "foreign_weights"]
__all__ += ["make", "needs_data_dir", "restored"]


def make(config: Any, cache_dir: str) -> ResNet:
    """Makes the benchmark; see `benchmarks.load`.

    Raises:
      ConfigError: a value cannot work.
    """
    settings = read_config(Settings, config)
    check_settings(settings)
    kind = FakeImages if settings.data.dataset == "fake" else ResNet
    return kind(settings, cache_dir)


def needs_data_dir(config: Any) -> bool:
    """Whether the data are a folder of records."""
    return config.dataset == "records"
