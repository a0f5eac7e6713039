"""Describes this machine for MLPerf: the fields of systems/NAME.json.

A field that the machine cannot tell is "unknown"; a user completes it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from typing import Any

import psutil

_UNKNOWN = "unknown"
# The values of submission_status in the log, and of "status" in a description from 4.0 on.
_STATUS = {
    "cloud": "Available cloud",
    "onprem": "Available on-premise",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}
_LIBRARIES = ("jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "tensorflow-cpu")


def describe(name: str, values: dict[str, Any]) -> dict[str, str]:
    """Returns the 33 fields that MLPerf's checkers require, all of them text.

    Args:
      name: the system's name, which is also its folder in results/.
      values: the first value of each key in a log.
    """
    return {
        "submitter": str(values.get("submission_org", _UNKNOWN)),
        "division": str(values.get("submission_division", _UNKNOWN)),
        "status": _STATUS.get(str(values.get("submission_status")), _UNKNOWN),
        "system_name": name,
        "number_of_nodes": str(values.get("number_of_nodes", 1)),
        **_processors(_read("/proc/cpuinfo")),
        **_host(),
        **_accelerators(values),
        "cooling": _UNKNOWN,
        "hw_notes": "",
        "framework": f"JAX {_version('jax')}",
        "other_software_stack": ", ".join(
            [f"Python {platform.python_version()}", *(f"{n} {_version(n)}" for n in _LIBRARIES)]
        ),
        "operating_system": _system(),
        "sw_notes": f"Linux {platform.release()}; not a submission to MLCommons",
    }


def _processors(info: str) -> dict[str, str]:
    """From the text of /proc/cpuinfo."""
    processors = [block for block in info.split("\n\n") if block.strip()]

    def entries(key: str) -> list[str]:
        return [m[1].strip() for b in processors if (m := re.search(rf"{key}\s*:(.*)", b))]

    sockets = len(set(entries("physical id"))) or 1
    cores = int((entries("cpu cores") or ["0"])[0]) * sockets
    frequency = (entries("cpu MHz") or [_UNKNOWN])[0]
    return {
        "host_processors_per_node": str(sockets),
        "host_processor_model_name": (entries("model name") or [platform.machine()])[0],
        "host_processor_core_count": str(cores or len(processors)),
        "host_processor_vcpu_count": str(len(processors) or os.cpu_count()),
        "host_processor_frequency": frequency if frequency == _UNKNOWN else f"{frequency} MHz",
        "host_processor_caches": (entries("cache size") or [_UNKNOWN])[0],
        "host_processor_interconnect": _UNKNOWN,
    }


def _host() -> dict[str, str]:
    """The memory and the disk of this machine."""
    unknown = ("storage_type", "networking", "networking_topology", "memory_configuration")
    return {
        "host_memory_capacity": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "host_storage_capacity": f"{shutil.disk_usage('/').total / 1e9:.0f} GB",
        **{f"host_{key}": _UNKNOWN for key in unknown},
    }


def _accelerators(values: dict[str, Any]) -> dict[str, str]:
    memory = values.get("accelerator_memory_bytes")
    unknown = ("host_interconnect", "frequency", "on-chip_memories", "memory_configuration")
    unknown += ("interconnect", "interconnect_topology")
    return {
        "accelerators_per_node": str(values.get("accelerators_per_node", 0)),
        "accelerator_model_name": str(values.get("accelerator_model_name", _UNKNOWN)),
        "accelerator_memory_capacity": f"{memory / 2**30:.0f} GiB" if memory else _UNKNOWN,
        **{f"accelerator_{key}": _UNKNOWN for key in unknown},
    }


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _read(path: str) -> str:
    """The text of a file of the kernel; "" if the file does not exist."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
