"""The NVIDIA GPUs of this machine, and why jax does not use them."""

from __future__ import annotations

import glob
import importlib.metadata
import os
import re

_DRIVER = "/proc/driver/nvidia"
# The oldest driver for each of jax's packages for CUDA.
_LEAST = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
_INSTALL = "bash scripts/setup.sh cuda && . .venv/bin/activate"


def count(driver: str = _DRIVER) -> int:
    """Counts the GPUs that the driver has found, whether or not a process can use them."""
    return len(glob.glob(f"{driver}/gpus/*"))


def version(driver: str = _DRIVER) -> str:
    """The version of the driver, "535.104.05"; "" if it is not known."""
    try:
        with open(f"{driver}/version") as file:
            match = re.search(r"Kernel Module.*?\s(\d+\.\d+[.\d]*)", file.read())
    except OSError:
        return ""
    return match[1] if match else ""


def obstacle(driver: str = _DRIVER, devices: str = "/dev") -> tuple[str, str]:
    """Why jax cannot use the GPUs of this machine, and the remedy; ("", "") if nothing is known.

    Nobody misses them where JAX_PLATFORMS=cpu asks for the CPU.
    """
    number, found = count(driver), version(driver)
    if not number or os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return "", ""
    what = f"this machine has {number} NVIDIA GPU{'s' * (number > 1)}"
    jax = _installed("jax")
    plugins = {name: _installed(name) for name in _LEAST if _installed(name)}
    if not plugins:
        return f"{what}, but jax is installed without CUDA", _INSTALL
    if jax not in plugins.values():
        (name, other), *_ = plugins.items()
        return f"{what}, but {name} {other} does not belong to jax {jax}", _INSTALL
    name = next(name for name, own in plugins.items() if own == jax)
    if found and int(found.partition(".")[0]) < _LEAST[name]:
        text = f"{what}, but the driver {found} is older than {_LEAST[name]}, which {name} needs"
        return text, "install a newer driver, see nvidia-smi"
    if not glob.glob(f"{devices}/nvidia[0-9]*"):
        text = f"{what}, but {devices}/nvidia0 is not there"
        return text, "in a container: start it with --gpus all, and NVIDIA's container toolkit"
    return "", ""


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
