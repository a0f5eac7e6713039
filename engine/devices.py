"""The TPUs and GPUs of this machine: how many there are, and why jax cannot open or use them."""

import glob
import importlib.metadata
import os

import jax

from common.errors import DeviceError, one_line
from engine import environment

# PCI ids. Google's network cards have its vendor id, too, on every VM of its cloud.
_GOOGLE = "0x1ae0"
_TPUS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")  # v2/v3, v4, v5p, v5e, v6e, 7x

_NVIDIA_DRIVER = "/proc/driver/nvidia"
_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_INSTALL_CUDA = "bash scripts/setup.sh cuda && . .venv/bin/activate"


def open_platform() -> str:
    """Opens jax's devices and returns the name of their platform; DeviceError if that fails."""
    wanted = _wanted()
    if wanted == "cpu" or not (wanted or tpu_chips() or count_gpus()):
        environment.keep_freed_memory()  # the threads that jax starts now stay in malloc's arena
    try:
        platform = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # the latter without a GPU
        reason = one_line(error) if str(error) else "it finds none"
        reason = reason.split(" (set JAX_PLATFORMS")[0].rstrip(".")
        raise DeviceError(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: jax cannot open these devices "
            f"({reason}): is another process using them, or is jax for them not installed (bash "
            "scripts/setup.sh tpu, or cuda)? JAX_PLATFORMS=cpu runs on the CPU"
        ) from None  # that another host is lost is not the reason
    if platform == "cpu":  # of a machine whose GPU jax cannot use
        environment.keep_freed_memory()
    return platform


def _wanted() -> str:
    """The platform that $JAX_PLATFORMS names first; "" if jax may choose."""
    return os.environ.get("JAX_PLATFORMS", "").split(",")[0]


def check_platform() -> None:
    """Raises DeviceError on the CPU of a machine with TPUs, unless JAX_PLATFORMS=cpu is set."""
    platform = open_platform()
    if _wanted() != "cpu" and platform == "cpu" and (chips := tpu_chips()):
        raise DeviceError(
            f"this machine has {chips} TPU chip(s) but jax runs on the CPU: is another process "
            "using them, or is jax[tpu] not installed (bash scripts/setup.sh tpu)? Set "
            "JAX_PLATFORMS=cpu to run on the CPU all the same"
        )


def tpu_chips() -> int:
    """Counts the TPU chips on this machine's PCI bus, whether or not a process can use them."""
    chips = 0
    for folder in glob.glob("/sys/bus/pci/devices/*"):
        try:
            with open(f"{folder}/vendor") as vendor, open(f"{folder}/device") as device:
                chips += vendor.read().strip() == _GOOGLE and device.read().strip() in _TPUS
        except OSError:  # the device was removed a moment ago
            continue
    return chips


def count_gpus(driver: str = _NVIDIA_DRIVER) -> int:
    """Counts the GPUs that the driver has found, whether or not a process can use them."""
    return len(glob.glob(f"{driver}/gpus/*"))


def gpu_obstacle(driver: str = _NVIDIA_DRIVER) -> tuple[str, str]:
    """Why jax cannot use the GPUs of this machine, and what to do; ("", "") if nothing is known."""
    number = count_gpus(driver)
    is_unwanted = _wanted() == "cpu"
    if not number or is_unwanted or any(map(installed_version, _CUDA_PLUGINS)):
        return "", ""
    gpus = f"{number} NVIDIA GPU{'s' * (number > 1)}"
    return f"this machine has {gpus}, but jax is installed without CUDA", _INSTALL_CUDA


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def explain_full_memory(error: BaseException | None) -> DeviceError | None:
    """The mistake that the user can fix, if `error` or one of its causes is a full memory."""
    while error is not None:
        is_of_device = isinstance(error, jax.errors.JaxRuntimeError)
        if is_of_device and str(error).startswith("RESOURCE_EXHAUSTED"):
            who = "; nvidia-smi shows what else uses the GPU" * (jax.default_backend() == "gpu")
            return DeviceError(
                f"the memory of a device is full ({one_line(error)}): use a smaller "
                "--config.train_batch_size, or --config.gradient_accumulation_steps=auto, or a "
                "larger number than it chose, for the same batch in parts; --mode=preflight "
                f"forecasts the memory of TPUs{who}"
            )
        error = error.__cause__
    return None
