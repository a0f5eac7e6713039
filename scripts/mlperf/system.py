"""Describes this machine for MLPerf: the fields of systems/NAME.json."""

import platform
import re
import shutil
from typing import Any

import psutil
from etils import epath

from engine.mesh import installed_version

# The values of submission_status in the log, and of "status" in a description from 4.0 on.
_STATUS = {
    "cloud": "Available cloud",
    "onprem": "Available on-premise",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}
_LIBRARIES = ("jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "tensorflow-cpu")
# No program can tell these: a user completes them.
_UNKNOWN = (
    "host_processor_interconnect",
    "host_storage_type",
    "host_networking",
    "host_networking_topology",
    "host_memory_configuration",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_interconnect",
    "accelerator_memory_configuration",
    "accelerator_interconnect_topology",
    "cooling",
)


def describe(name: str, values: dict[str, Any]) -> dict[str, str]:
    """Returns the 33 fields that MLPerf's checkers require, all of them text.

    `name` is the system's name, and its folder in results/; `values` has the first value of each
    key in a log.
    """
    file, memory = epath.Path("/proc/cpuinfo"), values.get("accelerator_memory_bytes")
    info = file.read_text() if file.exists() else ""
    processor = dict(re.findall(r"^([^\t\n]+)\t*: (.*)$", info, re.MULTILINE))
    clock = processor.get("cpu MHz")
    versions = [f"{library} {installed_version(library) or 'absent'}" for library in _LIBRARIES]
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # a container without /etc/os-release
        system = platform.system()
    return dict.fromkeys(_UNKNOWN, "unknown") | {
        "submitter": str(values.get("submission_org", "unknown")),
        "division": str(values.get("submission_division", "unknown")),
        "status": _STATUS.get(str(values.get("submission_status")), "unknown"),
        "system_name": name,
        "number_of_nodes": str(values.get("number_of_nodes", 1)),
        "host_processors_per_node": str(len(set(re.findall(r"physical id\t: (\d+)", info))) or 1),
        "host_processor_model_name": processor.get("model name", platform.machine()),
        "host_processor_core_count": str(psutil.cpu_count(logical=False) or psutil.cpu_count()),
        "host_processor_vcpu_count": str(psutil.cpu_count()),
        "host_processor_frequency": f"{clock} MHz" if clock else "unknown",
        "host_processor_caches": processor.get("cache size", "unknown"),
        "host_memory_capacity": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "host_storage_capacity": f"{shutil.disk_usage('/').total / 1e9:.0f} GB",
        "accelerators_per_node": str(values.get("accelerators_per_node", 0)),
        "accelerator_model_name": str(values.get("accelerator_model_name", "unknown")),
        "accelerator_memory_capacity": f"{memory / 2**30:.0f} GiB" if memory else "unknown",
        "hw_notes": "",
        "framework": f"JAX {installed_version('jax')}",
        "other_software_stack": ", ".join([f"Python {platform.python_version()}", *versions]),
        "operating_system": system,
        "sw_notes": f"Linux {platform.release()}; not a submission to MLCommons",
    }
