"""Classifies images with ResNets; this file has what `benchmarks` finds by name.

`classifier.ResNet` joins the data, `models.ResNet`, the loss and the score.
"""

from typing import Any

from benchmarks.resnet.classifier import ResNet
from benchmarks.resnet.settings import MODEL_KEYS, WHOLE_KEYS, Settings, check_settings, restored
from benchmarks.resnet.use import foreign_settings, foreign_weights
from common.keys import read_config

__all__ = ["MODEL_KEYS", "WHOLE_KEYS", "ResNet", "Settings", "foreign_settings", "foreign_weights"]
__all__ += ["make", "restored"]


def make(config: Any, cache_dir: str) -> ResNet:
    """The benchmark of a config; ConfigError names the keys whose values cannot work."""
    settings = read_config(Settings, config)
    check_settings(settings)
    return ResNet(settings, cache_dir)
