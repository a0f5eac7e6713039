"""The original ResNet: bottlenecks stride in their first convolution, as Keras has it.

Source: He et al. 2015 (arXiv:1512.03385).
"""

from __future__ import annotations

from typing import Any

from models import ModuleDef, ResNet


def compose(model: ResNet) -> ResNet:
    """`model` with the stride of each block in `conv1`; of basic blocks it is there anyway."""

    def block(filters: int, conv: ModuleDef, norm: ModuleDef, stride: int, **others: Any) -> Any:
        strides = {"conv1": stride, "conv2": 1}

        def strided(features: int, size: tuple[int, int], stride: int = 1, **rest: Any) -> Any:
            return conv(features, size, strides.get(rest["name"], stride), **rest)

        return model.block(filters, strided, norm, stride, **others)

    return model.clone(block=block)
