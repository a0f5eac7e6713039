"""The TPU tutorial's ResNet-18 and 34: a projection in the first block too, where shapes agree.

Source: tensorflow/tpu, models/official/resnet/resnet_model.py.
"""

from __future__ import annotations

from typing import Any

from models import ResNet


def compose(model: ResNet) -> ResNet:
    """`model` with a projection in the first block; bottlenecks have one there anyway."""

    def block(*parts: Any, name: str, **others: Any) -> Any:
        return model.block(*parts, name=name, projects=name == "stage1_block1", **others)

    return model.clone(block=block)
