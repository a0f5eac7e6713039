"""Train steps in PyTorch, for scripts.bench.step --peer=torch and scripts.bench.score.

`torch_networks` and `torch_detectors` have the networks. They run eagerly on a CPU, and on a GPU
through torch.compile; images have channels last, which is faster than PyTorch's usual layout. The
optimizer is config's, as one fused operation. PyTorch is no dependency of this project.

With config.precision='bfloat16' autocast decides: embeddings, norms and the sums between layers
stay float32, where ours are bfloat16; GNMT's attention and the last layers of Mask R-CNN's heads
are bfloat16, where ours are float32.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.base import HostBatch
from common.errors import ConfigError
from common.trees import Parts
from engine.run import Programs, Settings
from scripts.bench.peers import torch_detectors, torch_networks

# By config.benchmark: from the module torch and the benchmark to its network.
NETWORKS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(torch_detectors, name) for name in ("ssd", "mask_rcnn")},
    **{n: getattr(torch_networks, n) for n in ("resnet", "transformer", "gnmt", "ncf")},
}

# The values that the peers support, by key. A benchmark may lack a key.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "optimizer": ("sgd", "adam"),
    **dict.fromkeys(("decoupled_decay", "new_classes", "gradient_clip_per_device"), (False,)),
    "gradient_accumulation_steps": (1,),
    "loss": ("softmax",),
    "resnet_version": ("1.5",),
    **dict.fromkeys(("deep_stem", "squeeze_excite", "blur_pool", "stage1_projection"), (False,)),
    **dict.fromkeys(("mixup", "cutmix", "random_erasing", "drop_path"), (0,)),
    **dict.fromkeys(("augmentation", "class_weights"), ("",)),
    **dict.fromkeys(("space_to_depth", "remat"), (False,)),
    "max_pool": ("same", "torch"),
}
_RATE = 1e-3


def require(*packages: str) -> None:
    """Raises ConfigError if one of these is not installed."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the peer needs {name}, which is not installed: pip install {name}")


def load(config: Mapping[str, Any]) -> Any:
    """The module torch, for a recipe that has a peer; call it before anything loads TensorFlow.

    Raises:
      ConfigError: the recipe has none, or PyTorch is not installed.
    """
    if (name := config["benchmark"]) not in NETWORKS:
        raise ConfigError(f"config.benchmark={name!r} has no peer; {', '.join(NETWORKS)} have")
    for key, values in _PLAIN.items():
        if key in config and config[key] not in values:
            has = " or ".join(map(repr, values))
            raise ConfigError(f"config.{key}={config[key]!r}: the peer in PyTorch has only {has}")
    require("torch", *(["torchvision"] if name in ("ssd", "mask_rcnn") else []))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU's memory is for both
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")  # its import crashes after TensorFlow's
    return importlib.import_module("torch")


def check_device(torch: Any) -> str:
    """The device of PyTorch that is jax's: "cpu" or "cuda"; ConfigError if there is none."""
    kind, count = jax.default_backend(), jax.device_count()
    if kind == "cpu":
        return "cpu"
    if kind != "gpu" or not torch.cuda.is_available():
        raise ConfigError(
            f"--peer=torch: PyTorch has no {kind} here; JAX_PLATFORMS=cpu compares CPUs"
        )
    if count > 1:
        raise ConfigError(f"--peer=torch takes one of {count} GPUs: set CUDA_VISIBLE_DEVICES=0")
    return "cuda"


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


def open_network(torch: Any, settings: Settings, benchmark: Any, device: str) -> Any:
    """The peer's network on a device, with first weights of the recipe's seed."""
    torch.manual_seed(settings.seed)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as in XLA
    network = NETWORKS[settings.benchmark](torch, benchmark)
    return network.to(device, memory_format=torch.channels_last).train()


def make_step(torch: Any, programs: Programs, batch: HostBatch) -> Callable[[], float]:
    """A train step on one batch of ours; it waits for the device and returns the loss.

    Raises:
      ConfigError: ours takes a moving average of the weights.
    """
    settings, device = programs.settings, check_device(torch)
    if decay := settings.moving_average_decay:
        raise ConfigError(
            f"config.moving_average_decay={decay}: the peer takes no average of its weights; "
            "--set moving_average_decay=0 compares steps without one"
        )
    network = open_network(torch, settings, programs.benchmark, device)
    if settings.freeze:
        named = {name.replace(".", "/"): x for name, x in network.named_parameters()}
        frozen = Parts("freeze", settings.freeze)
        frozen.check(named)
        for name, x in named.items():
            x.requires_grad_(name not in frozen)
    if device == "cuda":
        torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
        # What the compiler cannot take runs as it is; a warning says so.
        importlib.import_module("torch._dynamo").config.suppress_errors = True
        for module in getattr(network, "compiled", [network]):
            module.compile()
    optimizer = make_optimizer(torch, settings, network, _RATE)
    inputs = tensors(torch, network, batch, device)
    return lambda: float(take_step(torch, settings, network, optimizer, inputs))


def tensors(torch: Any, network: Any, batch: HostBatch, device: str) -> Any:
    """What the network takes of a batch, on the device."""
    if hasattr(network, "inputs"):
        return network.inputs(batch, device)
    return {name: torch.tensor(x).to(device) for name, x in batch.items()}


def make_optimizer(torch: Any, settings: Settings, network: Any, rate: float) -> Any:
    """The config's optimizer of all trained parameters; weight decay is of kernels."""
    rule = settings.optimizer
    trained = [x for x in network.parameters() if x.requires_grad]
    if rule.optimizer == "adam":
        betas = rule.adam_beta1, rule.adam_beta2
        return torch.optim.Adam(trained, rate, betas, rule.adam_epsilon, fused=True)
    kernels, others = ([x for x in trained if (x.ndim > 1) is both] for both in (True, False))
    groups = [{"params": kernels, "weight_decay": rule.weight_decay}, {"params": others}]
    how = {"momentum": rule.momentum, "nesterov": rule.nesterov, "fused": True}
    return torch.optim.SGD(groups, rate, **how)


def take_step(torch: Any, settings: Settings, network: Any, optimizer: Any, inputs: Any) -> Any:
    """Takes a step; returns the loss on the device."""
    is_half = settings.config.get("precision") == "bfloat16"
    device = next(network.parameters()).device.type
    with torch.autocast(device, torch.bfloat16, enabled=is_half):
        loss = network(inputs)
    optimizer.zero_grad()
    loss.backward()
    if norm := settings.optimizer.gradient_clip_norm:
        torch.nn.utils.clip_grad_norm_(network.parameters(), norm)
    optimizer.step()
    return loss.detach()
