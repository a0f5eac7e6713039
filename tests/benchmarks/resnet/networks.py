"""Networks of a recipe's keys, small ones by default."""

from typing import Any

import models
from benchmarks.resnet import architecture
from benchmarks.resnet.settings import Architecture

_SMALL: dict[str, Any] = {
    **{"resnet_depth": 50, "num_filters": 4, "precision": "float32", "batch_norm": "plain"},
    **{"space_to_depth": False, "bn_span": 1, "bn_momentum": 0.9},
}


def keys(**values: Any) -> Architecture:
    return Architecture(**{**_SMALL, **values})


def make_network(*stage_sizes: int, classes: int = 3, **values: Any) -> models.ResNet:
    """The network with so many blocks in its stages, by default those of its depth."""
    model = architecture.network(keys(**values), classes)
    return model.clone(stage_sizes=stage_sizes) if stage_sizes else model
