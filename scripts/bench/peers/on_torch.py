"""Train steps in PyTorch, for scripts.bench.step --peer=torch.

`torch_networks` and `torch_detectors` have the networks. They run eagerly on a CPU, and on a GPU
through torch.compile; images have channels last, which is faster than PyTorch's usual layout. The
optimizer is the config's, as one fused operation. PyTorch is no dependency of this project.

With config.precision='bfloat16' autocast decides: embeddings, norms and the sums between layers
stay float32, where our step has bfloat16; GNMT's attention and the last layers of Mask R-CNN's
heads are bfloat16, where our step has float32.
"""

import contextlib
import importlib
import importlib.util
import os
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
    "ssd": torch_detectors.ssd,
    "mask_rcnn": torch_detectors.mask_rcnn,
    "resnet": torch_networks.resnet,
    "transformer": torch_networks.transformer,
    "gnmt": torch_networks.gnmt,
    "ncf": torch_networks.ncf,
}

# The values that the peers support, by key. A benchmark may lack a key.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "optimizer": ("sgd", "adam"),
    "decoupled_decay": (False,),
    "new_classes": (False,),
    "gradient_clip_per_device": (False,),
    "gradient_accumulation_steps": (1,),
    "moving_average_decay": (0,),
    "loss": ("softmax",),
    "resnet_version": ("1.5",),
    "deep_stem": (False,),
    "squeeze_excite": (False,),
    "blur_pool": (False,),
    "stage1_projection": (False,),
    "mixup": (0,),
    "cutmix": (0,),
    "random_erasing": (0,),
    "drop_path": (0,),
    "augmentation": ("",),
    "class_weights": ("",),
    "space_to_depth": (False,),
    "remat": (False,),
    "max_pool": ("same", "torch"),
}
_RATE = 1e-3


def require(*packages: str) -> None:
    """Raises ConfigError if a package that the peers need is not installed."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the peer needs {name}, which is not installed: pip install {name}")


def load(config: Mapping[str, Any]) -> Any:
    """The module torch, for a recipe that has a peer; call it before anything loads TensorFlow."""
    if (name := config["benchmark"]) not in NETWORKS:
        raise ConfigError(f"config.benchmark={name!r} has no peer; {', '.join(NETWORKS)} have")
    for key, values in _PLAIN.items():
        if key in config and config[key] not in values:
            has = " or ".join(map(repr, values))
            raise ConfigError(
                f"config.{key}={config[key]!r}: the peer in PyTorch has only {has}; "
                f"--set {key}={values[0]} changes both"
            )
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


def make_step(torch: Any, programs: Programs, batch: HostBatch) -> Callable[[], float]:
    """A train step on one of our batches; it waits for the device and returns the loss."""
    settings, device = programs.settings, check_device(torch)
    torch.manual_seed(settings.seed)
    network = NETWORKS[settings.benchmark](torch, programs.benchmark)
    network = network.to(device, memory_format=torch.channels_last).train()
    if settings.freeze:
        named = {name.replace(".", "/"): x for name, x in network.named_parameters()}
        frozen = Parts("freeze", settings.freeze)
        frozen.check(named)
        for name, x in named.items():
            x.requires_grad_(name not in frozen)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as in XLA
        torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
        # What the compiler cannot take runs as it is; a warning says so.
        importlib.import_module("torch._dynamo").config.suppress_errors = True
        for module in getattr(network, "compiled", [network]):
            module.compile()
    if hasattr(network, "inputs"):
        inputs = network.inputs(batch, device)
    else:
        inputs = {name: torch.tensor(x).to(device) for name, x in batch.items()}
    optimizer = _optimizer(torch, settings, network)
    is_half = settings.config.get("precision") == "bfloat16"

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=is_half):
            loss = network(inputs)
        optimizer.zero_grad()
        loss.backward()
        if norm := settings.optimizer.gradient_clip_norm:
            torch.nn.utils.clip_grad_norm_(network.parameters(), norm)
        optimizer.step()
        return float(loss.detach())

    return step


def _optimizer(torch: Any, settings: Settings, network: Any) -> Any:
    """The config's optimizer of all trained parameters; weight decay applies to kernels only."""
    rule = settings.optimizer
    trained = [x for x in network.parameters() if x.requires_grad]
    if rule.optimizer == "adam":
        betas = rule.adam_beta1, rule.adam_beta2
        return torch.optim.Adam(trained, _RATE, betas, rule.adam_epsilon, fused=True)
    kernels = [x for x in trained if x.ndim > 1]
    others = [x for x in trained if x.ndim <= 1]
    groups = [{"params": kernels, "weight_decay": rule.weight_decay}, {"params": others}]
    how = {"momentum": rule.momentum, "nesterov": rule.nesterov, "fused": True}
    return torch.optim.SGD(groups, _RATE, **how)
