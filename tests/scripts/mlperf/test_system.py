"""The description of the system, and what the log says of it."""

import os
import platform

import jax

from engine import mesh as meshes
from engine import mlperf
from scripts.mlperf import system as mlperf_system
from tests.helpers.mlperf_fixture import made_up_mesh, mlperf_config


def test_the_description_is_complete_and_of_this_machine():
    values = {"submission_status": "cloud", "accelerators_per_node": 4, "number_of_nodes": 2}
    values |= {"accelerator_memory_bytes": 16 * 2**30, "accelerator_model_name": "TPU v4"}
    description = mlperf_system.describe("x", values)
    assert len(description) == 33 and all(type(value) is str for value in description.values())
    assert description["host_processor_vcpu_count"] == str(os.cpu_count())
    assert description["status"] == "Available cloud"
    assert description["accelerator_memory_capacity"] == "16 GiB"
    assert (description["number_of_nodes"], description["accelerators_per_node"]) == ("2", "4")


def test_a_log_and_a_system_that_tell_little(monkeypatch):
    monkeypatch.setattr(platform, "_os_release_candidates", ())
    monkeypatch.setattr(platform, "_os_release_cache", None)
    nothing = mlperf_system.describe("x", {})
    keys = ("number_of_nodes", "accelerators_per_node", "accelerator_memory_capacity", "status")
    assert [nothing[key] for key in keys] == ["1", "0", "unknown", "unknown"]
    assert int(nothing["host_processors_per_node"]) >= 1
    assert nothing["operating_system"] == platform.system()


def test_chips_are_counted_and_not_their_cores(monkeypatch):
    def chips(per_chip: int) -> int:
        mesh = made_up_mesh(mlperf_config(), per_chip)
        return mlperf._machine(meshes.num_chips(mesh))["accelerators_per_node"]

    assert (chips(1), chips(2)) == (8, 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert (chips(1), chips(2)) == (4, 2)
