"""config.kernels = "pallas": one kernel per boundary of two bottlenecks in the backward pass.

The function is that of batch_norm="gram", and so are the variables. `ops.layers.boundary` has the
kernel and says what it saves.
"""

from __future__ import annotations

from typing import Any

import jax

import models
from errors import ConfigError
from ops.layers import gram_boundary, gram_resnet

_STAGES = 2  # whose blocks end with such a boundary; the arrays of later ones are small
_WITHOUT = ("TPU v2", "TPU v3")  # the kernels' compiler refuses their products


def remedies(keys: Any) -> dict[str, str]:
    """A remedy for config.kernels, if the `Architecture` has no form with them."""
    has_variant = keys.resnet_version != "1.5" or keys.max_pool == "conv" or keys.blur_pool
    has_variant |= bool(keys.deep_stem or keys.squeeze_excite)
    if keys.resnet_depth >= 50 and keys.batch_norm == "gram" and not has_variant:
        return {}
    remedy = "needs bottlenecks (50 layers or more), batch_norm='gram' and no variant; use 'xla'"
    return {"kernels": remedy}


def compose(model: models.ResNet, padding: Any) -> models.ResNet:
    """`gram_resnet.compose` with these blocks; the arguments are as there.

    Where these devices cannot run the kernels, calling the model in training raises a ConfigError.
    """
    names = [
        f"stage{i}_block{j}" for i, n in enumerate(model.stage_sizes, 1) for j in range(1, n + 1)
    ]
    opens = names[: min(sum(model.stage_sizes[:_STAGES]), len(names) - 1)]

    def block(*parts: Any, name: str) -> Any:
        device = jax.sharding.get_abstract_mesh().abstract_device
        if device and device.device_kind in _WITHOUT:
            raise ConfigError(
                f"config.kernels='pallas': {device.device_kind} cannot multiply bfloat16 in a "
                "Pallas kernel; use 'xla'"
            )
        return gram_boundary.BottleneckBlock(*parts, opens=name in opens, name=name)

    return gram_resnet.compose(model, gram_resnet.stem, block, padding)
