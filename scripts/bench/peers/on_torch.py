"""The train step of the same ResNet in PyTorch on a CPU, for scripts.bench.step --peer=torch.

Its arrays have channels last, which is faster than PyTorch's usual layout. With
config.precision='bfloat16' it runs under autocast. PyTorch is no dependency of this project.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax

import models
from common.errors import ConfigError

_MOMENTUM, _RATE = 0.9, 0.1


def check(config: Any) -> None:
    """Raises ConfigError where there is no PyTorch, no CPU or no ResNet v1.5."""
    if config.benchmark != "resnet":
        raise ConfigError(f"--peer=torch: {config.benchmark} has no peer in PyTorch; resnet has")
    if jax.default_backend() != "cpu":
        raise ConfigError("--peer=torch compares CPUs: set JAX_PLATFORMS=cpu")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("--peer=torch needs PyTorch, which is not installed: pip install torch")
    plain = {"resnet_version": "1.5", "deep_stem": False, "squeeze_excite": 0, "blur_pool": False}
    plain |= {"stage1_projection": False, "space_to_depth": False}
    for key, value in plain.items():
        if config.get(key, value) != value:
            raise ConfigError(f"--peer=torch is a ResNet v1.5: config.{key} must be {value!r}")


def least(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The least ms of two steps, which alternate because other work disturbs both alike."""
    best = [float("inf"), float("inf")]
    for turn in range(rounds + 2):  # the first two warm up
        for i, step in enumerate((ours, theirs)):
            started = time.perf_counter()
            step()
            if turn >= 2:
                best[i] = min(best[i], time.perf_counter() - started)
    return best[0] * 1e3, best[1] * 1e3


def make_step(config: Any) -> Callable[[], float]:
    """A train step on one random batch, as `config` describes it; it returns the loss."""
    classes = config.num_label_classes
    torch: Any = importlib.import_module("torch")
    network = make_network(torch, config, classes).to(memory_format=torch.channels_last)
    batch, side = config.train_batch_size, config.image_size
    images = torch.rand(batch, 3, side, side).to(memory_format=torch.channels_last)
    labels = torch.randint(classes, (batch,))
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=_RATE,
        momentum=_MOMENTUM,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
    )
    is_half = config.precision == "bfloat16"

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            logits = network(images)
        loss = torch.nn.functional.cross_entropy(
            logits.float(), labels, label_smoothing=config.label_smoothing
        )
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def make_network(torch: Any, config: Any, classes: int) -> Any:
    """The ResNet v1.5 of a config's depth and width, a `torch.nn.Module`."""
    nn = torch.nn

    def unit(channels: int, features: int, side: int, stride: int = 1) -> list[Any]:
        conv = nn.Conv2d(channels, features, side, stride, side // 2, bias=False)
        return [conv, nn.BatchNorm2d(features, eps=models.EPSILON)]

    class Block(nn.Module):
        def __init__(self, channels: int, filters: int, stride: int, is_wide: bool):
            super().__init__()
            features = 4 * filters if is_wide else filters
            first = unit(channels, filters, 1) if is_wide else []
            middle = unit(filters if is_wide else channels, filters, 3, stride)
            last = unit(filters, features, 1 if is_wide else 3)
            relu = [nn.ReLU(inplace=True)]
            self.branch = nn.Sequential(*first, *relu[: len(first)], *middle, *relu, *last)
            is_same = stride == 1 and channels == features
            self.shortcut = nn.Sequential(*(() if is_same else unit(channels, features, 1, stride)))

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.branch(x) + self.shortcut(x))

    sizes, block = models.DEPTHS[config.resnet_depth]
    channels, is_wide = config.num_filters, block is models.BottleneckBlock
    layers = [*unit(3, channels, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    for stage, size in enumerate(sizes):
        filters = config.num_filters * 2**stage
        for number in range(size):
            layers.append(Block(channels, filters, 2 if stage and not number else 1, is_wide))
            channels = 4 * filters if is_wide else filters
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)
