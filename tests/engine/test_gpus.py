"""What is said on a machine with NVIDIA GPUs, and that the steps can be compiled for them.

No test has a GPU: the driver's files are made up, in the form of NVIDIA's.
"""

import re

import jax
import pytest

from engine import full_memory, gpus, step
from errors import DeviceError
from modes.prove import models, numbers

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Sep 23 15:42:01 UTC 2023\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs)\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes the files of a driver with GPUs; returns what `gpus.obstacle` says of them."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    def obstacle(packages, number=1, version="535.104.05", form=CLOSED, devices=True):
        driver, dev = tmp_path / "nvidia", tmp_path / "dev"
        dev.mkdir(exist_ok=True)
        for index in range(number):
            (driver / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True, exist_ok=True)
            if devices:
                (dev / f"nvidia{index}").touch()
        if number:
            (driver / "version").write_text(form.format(version))
        packages = {"jax": "0.12.0", **packages}
        monkeypatch.setattr(gpus, "_installed", lambda name: packages.get(name, ""))
        return gpus.obstacle(str(driver), str(dev))

    return obstacle


def test_a_machine_without_gpus(machine):
    assert machine({}, number=0) == ("", "")
    assert gpus.version("/nowhere") == ""


def test_gpus_that_jax_can_use(machine):
    assert machine({"jax-cuda12-plugin": "0.12.0"}) == ("", "")
    assert machine({"jax-cuda13-plugin": "0.12.0"}, version="580.65.06", form=OPEN) == ("", "")


@pytest.mark.parametrize("form", [CLOSED, OPEN])
def test_an_old_driver(machine, form):
    text, remedy = machine({"jax-cuda12-plugin": "0.12.0"}, version="470.256.02", form=form)
    assert text == (
        "this machine has 1 NVIDIA GPU, but the driver 470.256.02 is older than 525, which "
        "jax-cuda12-plugin needs"
    )
    assert "newer driver" in remedy
    text, _ = machine({"jax-cuda13-plugin": "0.12.0"}, version="575.1", form=form)
    assert "older than 580, which jax-cuda13-plugin needs" in text


def test_jax_without_cuda(machine):
    text, remedy = machine({}, number=2)
    assert text == "this machine has 2 NVIDIA GPUs, but jax is installed without CUDA"
    assert remedy == "pip install --require-hashes -r requirements-cuda.txt"


def test_cuda_of_another_jax(machine):
    text, _ = machine({"jax-cuda12-plugin": "0.10.2"})
    assert text.endswith("but jax-cuda12-plugin 0.10.2 does not belong to jax 0.12.0")


def test_a_container_without_the_devices(machine):
    text, remedy = machine({"jax-cuda12-plugin": "0.12.0"}, devices=False)
    assert text.endswith("/nvidia0 is not there") and "--gpus all" in remedy


def test_who_asks_for_the_cpu_is_left_alone(machine, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert machine({}) == ("", "")


@pytest.mark.parametrize("name", sorted(models.table()))
def test_the_gradient_can_be_lowered_for_a_gpu(name):
    model = models.load(name, "bfloat16")

    def loss(params, state, batch, rng):
        return model.benchmark.loss(params, state, batch, rng)

    traced = jax.jit(step.make_gradients(loss, numbers._one(), 1)).trace(
        model.params, model.model_state, model.batch, jax.random.key(0)
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert not re.findall(r"tpu_custom_call|@Sharding\b", text) and "func.func public @main" in text


def test_a_full_memory_is_one_line(monkeypatch):
    error = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nBuffers"
    )
    outer = RuntimeError("in a thread")
    outer.__cause__ = error
    for one in (error, outer):
        told = full_memory.explain(one)
        assert isinstance(told, DeviceError)
        assert str(told).startswith(
            "the memory of a device is full (RESOURCE_EXHAUSTED: Out of memory while trying to "
            "allocate 17179869184 bytes.): use a smaller --config.train_batch_size, or "
        )
        assert "nvidia-smi" not in str(told)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "nvidia-smi shows what else uses the GPU" in str(full_memory.explain(error))


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("INTERNAL: x"), ValueError("RESOURCE_EXHAUSTED"), None]
)
def test_other_errors_stay(error):
    assert full_memory.explain(error) is None
