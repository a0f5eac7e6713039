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


def plugin(cuda, jax_version="0.12.0"):
    return {f"jax-cuda{cuda}-plugin": jax_version}


def test_nothing_stands_in_the_way(machine, monkeypatch):
    assert machine({}, number=0) == ("", "") and gpus.version("/nowhere") == ""
    assert machine(plugin(12)) == machine(plugin(13), version="580.65.06", form=OPEN) == ("", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # whoever asks for the CPU is left alone
    assert machine({}) == ("", "")


@pytest.mark.parametrize(
    ("packages", "options", "words", "remedy"),
    [
        (
            plugin(12),
            {"version": "470.256.02"},
            "1 NVIDIA GPU, but the driver 470.256.02 is ",
            "newer",
        ),
        (plugin(12), {"version": "524.9"}, "524.9 is older than 525, which jax-cuda12-plugin ", ""),
        (plugin(13), {"version": "575.1", "form": OPEN}, "older than 580, which jax-cuda13", ""),
        ({}, {"number": 2}, "2 NVIDIA GPUs, but jax is installed without CUDA", "setup.sh cuda"),
        (plugin(12, "0.10.2"), {}, "jax-cuda12-plugin 0.10.2 does not belong to jax 0.12.0", ""),
        (plugin(12), {"devices": False}, "/nvidia0 is not there", "--gpus all"),
    ],
)
def test_what_stands_in_the_way(packages, options, words, remedy, machine):
    text, advice = machine(packages, **options)
    assert words in text and remedy in advice


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
        assert isinstance(told, DeviceError) and "17179869184 bytes.): use a smaller" in str(told)
        assert "nvidia-smi" not in str(told)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "nvidia-smi shows what else uses the GPU" in str(full_memory.explain(error))


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("INTERNAL: x"), ValueError("RESOURCE_EXHAUSTED"), None]
)
def test_other_errors_stay(error):
    assert full_memory.explain(error) is None
