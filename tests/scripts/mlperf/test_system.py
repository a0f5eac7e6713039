"""The description of the system, and what the log says of it."""

import os
import platform
import types

import jax

from engine import mesh as meshes
from engine import mlperf_formats
from scripts.mlperf import system as mlperf_system
from tests.helpers.mlperf_fixture import made_up_mesh, mlperf_config


def test_the_description_is_whole_and_of_this_machine():
    values = {"submission_status": "cloud", "accelerators_per_node": 4, "number_of_nodes": 2}
    values |= {"accelerator_memory_bytes": 16 * 2**30, "accelerator_model_name": "TPU v4"}
    description = mlperf_system.describe("x", values)
    assert len(description) == 33 and all(type(value) is str for value in description.values())
    assert description["host_processor_vcpu_count"] == str(os.cpu_count())
    assert description["status"] == "Available cloud"
    assert description["accelerator_memory_capacity"] == "16 GiB"
    assert (description["number_of_nodes"], description["accelerators_per_node"]) == ("2", "4")


def test_processors_of_two_sockets():
    one = "processor : {}\nmodel name : CPU X\nphysical id : {}\ncpu cores : 2\ncpu MHz : 2000.5\n"
    one += "cache size : 512 KB\n"
    description = mlperf_system._processors("\n".join(one.format(i, i // 2) for i in range(6)))
    assert description == {
        "host_processors_per_node": "3",
        "host_processor_model_name": "CPU X",
        "host_processor_core_count": "6",
        "host_processor_vcpu_count": "6",
        "host_processor_frequency": "2000.5 MHz",
        "host_processor_caches": "512 KB",
        "host_processor_interconnect": "unknown",
    }


def test_a_machine_that_tells_little(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 24)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    unknown = dict.fromkeys(("frequency", "caches", "interconnect"), "unknown")
    rest = {"per_node": "1", "model_name": "aarch64", "core_count": "0", "vcpu_count": "24"}
    expected = {f"host_processor_{key}": value for key, value in (rest | unknown).items()}
    expected["host_processors_per_node"] = expected.pop("host_processor_per_node")
    assert mlperf_system._processors("") == expected
    cores = mlperf_system._processors("processor : 0\n\nprocessor : 1\n")
    assert cores["host_processor_core_count"] == cores["host_processor_vcpu_count"] == "2"
    nothing = mlperf_system.describe("x", {})
    keys = ("number_of_nodes", "accelerators_per_node", "accelerator_memory_capacity")
    assert [nothing[key] for key in keys] == ["1", "0", "unknown"]


def test_memory_and_disk(monkeypatch):
    usage = types.SimpleNamespace(total=25 * 10**17)
    memory = types.SimpleNamespace(total=125 * 2**30)
    monkeypatch.setattr(mlperf_system.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(mlperf_system.psutil, "virtual_memory", lambda: memory)
    host = mlperf_system._host()
    assert host["host_memory_capacity"] == "125 GiB"
    assert host["host_storage_capacity"] == "2500000000 GB"


def test_chips_are_counted_and_not_their_cores(monkeypatch):
    def chips(per_chip: int) -> int:
        mesh = made_up_mesh(mlperf_config(), per_chip)
        return mlperf_formats._machine(meshes.num_chips(mesh))["accelerators_per_node"]

    assert (chips(1), chips(2)) == (8, 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert (chips(1), chips(2)) == (4, 2)
