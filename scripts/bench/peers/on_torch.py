"""Train steps in PyTorch, for scripts.bench.step --peer=torch.

`torch_networks` has the networks. They run eagerly on a CPU, and on a GPU through torch.compile;
images have channels last, which is faster than PyTorch's usual layout. The optimizer is the
config's, as one fused operation. PyTorch is no dependency of this project.

With config.precision='bfloat16' autocast decides: embeddings, norms and the sums between layers
stay float32, where our step has bfloat16; GNMT's attention and the last layers of Mask R-CNN's
heads are bfloat16, where our step has float32.
"""

import contextlib
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax

from benchmarks.base import HostBatch
from common.errors import ConfigError
from common.trees import Parts
from engine.plan import Programs, Settings

# The values of keys that the peers support; a benchmark may lack a key.
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "optimizer": ("sgd", "adam"),
    "loss": ("softmax",),
    "resnet_version": ("1.5",),
    "max_pool": ("same", "torch"),
    "gradient_accumulation_steps": (1, "auto"),  # 1 fits where the batch of both does
}
_OFF = (  # the keys whose parts they lack
    *("decoupled_decay", "new_classes", "gradient_clip_per_device", "moving_average_decay"),
    *("deep_stem", "squeeze_excite", "blur_pool", "stage1_projection", "space_to_depth", "remat"),
    *("mixup", "cutmix", "random_erasing", "drop_path", "augmentation", "class_weights"),
)
_RATE = 1e-3


def require(*packages: str) -> None:
    """Raises ConfigError if a package that the peers need is not installed."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"the baseline needs {name}, which is not installed: pip install {name}"
            )


def load(config: Mapping[str, Any]) -> ModuleType:
    """The module `torch_networks`, for a recipe that has a peer; before TensorFlow is loaded."""
    off = {key: (type(config[key])(),) for key in _OFF if key in config}
    for key, values in {**off, **_VALUES}.items():
        if key in config and config[key] not in values:
            has = " or ".join(map(repr, values))
            raise ConfigError(
                f"config.{key}={config[key]!r}: the baseline in PyTorch has only {has}; "
                f"--set {key}={values[0]} changes both"
            )
    require("torch", "torchvision")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU's memory is for both
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")  # its import crashes after TensorFlow's
    networks = importlib.import_module("scripts.bench.peers.torch_networks")
    if (name := config["benchmark"]) not in networks.NETWORKS:
        names = ", ".join(networks.NETWORKS)
        raise ConfigError(f"config.benchmark={name!r} has no peer; {names} have")
    return networks


def check_device(torch: Any) -> str:
    """The device of PyTorch that is jax's: "cpu" or "cuda"; ConfigError if there is none."""
    backend, count = jax.default_backend(), jax.device_count()
    if backend == "cpu":
        return "cpu"
    if backend != "gpu" or not torch.cuda.is_available():
        raise ConfigError(
            f"--peer=torch: PyTorch has no {backend} here; JAX_PLATFORMS=cpu compares CPUs"
        )
    if count > 1:
        raise ConfigError(f"--peer=torch takes one of {count} GPUs: set CUDA_VISIBLE_DEVICES=0")
    return "cuda"


def make_step(networks: ModuleType, programs: Programs, batch: HostBatch) -> Callable[[], float]:
    """A train step on one of our batches; it waits for the device and returns the loss."""
    torch, settings = networks.torch, programs.settings
    device = check_device(torch)
    torch.manual_seed(settings.seed)
    network = networks.NETWORKS[settings.benchmark](programs.benchmark)
    module = network.module.to(device, memory_format=torch.channels_last).train()
    loss_of = network.loss
    if settings.freeze:
        freeze(module, settings.freeze)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as in XLA
        torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
        # What the compiler cannot take runs as it is; a warning says so.
        importlib.import_module("torch._dynamo").config.suppress_errors = True
        for part in network.parts:
            part.compile()
        loss_of = loss_of if network.parts else torch.compile(loss_of)
    inputs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(device), network.inputs(batch)
    )
    optimizer = _optimizer(torch, settings, module)
    is_half = settings.config.get("precision") == "bfloat16"

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=is_half):
            loss = loss_of(*inputs)
        optimizer.zero_grad()
        loss.backward()
        if norm := settings.gradient_clip_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), norm)
        optimizer.step()
        return float(loss.detach())

    return step


def freeze(module: Any, parts: str) -> None:
    """Freezes the `parts` of a ResNet that config.freeze names: "stem", "stage1", ..."""
    named = {}
    for name, x in module.named_parameters():
        stage = re.search(r"\blayer(\d)\.", name)
        stem = re.search(r"(^|body\.|trunk\.)(conv1|bn1)\.", name)
        named[f"stage{stage[1]}/{name}" if stage else f"stem/{name}" if stem else name] = x
    frozen = Parts("freeze", parts)
    frozen.check(named)
    for name, x in named.items():
        x.requires_grad_(name not in frozen)


def _optimizer(torch: Any, settings: Settings, module: Any) -> Any:
    """The config's optimizer of all trained parameters; weight decay applies to kernels only."""
    trained = [x for x in module.parameters() if x.requires_grad]
    if settings.optimizer == "adam":
        betas = settings.adam_beta1, settings.adam_beta2
        return torch.optim.Adam(trained, _RATE, betas, settings.adam_epsilon, fused=True)
    kernels = [x for x in trained if x.ndim > 1]
    others = [x for x in trained if x.ndim <= 1]
    groups = [{"params": kernels, "weight_decay": settings.weight_decay}, {"params": others}]
    options = {"momentum": settings.momentum, "nesterov": settings.nesterov, "fused": True}
    return torch.optim.SGD(groups, _RATE, **options)
