"""Measures the train step and its memory beside preflight's forecast, and the host's input."""

import itertools
import statistics
import time

import jax
import pytest

from commands import preflight
from common import pools
from common.errors import UserError
from engine.forecast import topology
from tests.device import models, training

pytestmark = [pytest.mark.device, pytest.mark.slow]
# Examples per device: those of preflight for the recipe's batch on 8 devices.
BATCHES = {"resnet50": 128, "ssd": 128, "transformer": 64}
# On CPUs, and with --short, the models are smaller.
SMALL = {
    "resnet50": {"image_size": 64, "num_filters": 16, "precision": "float32"},
    "ssd": {"num_filters": 8, "precision": "float32", "batch_norm": "plain"},
    "transformer": {
        **{"width": 128, "mlp_width": 256, "num_heads": 4, "num_layers": 2, "row_length": 64},
        **{"vocabulary_size": 4000, "precision": "float32"},
    },
}


@pytest.mark.parametrize("name", BATCHES)
def test_train_step(name, case, answer):
    """Its time and memory, without input."""
    devices, backend = jax.device_count(), jax.default_backend()
    is_small = case.short or backend == "cpu"
    per_device = 1 if backend == "cpu" else BATCHES[name]
    changes = dict(SMALL[name]) if is_small else {}
    changes |= {"train_batch_size": per_device * devices, "eval_batch_size": devices}
    # With ImageNet's counts, so that no data are asked for.
    recipe = "fake_imagenet" if name == "resnet50" else name
    settings = training.settings(recipe, **changes)
    trained = training.Training(settings)
    count = 3 if is_small else 20
    warm, *seconds = [trained.step() for _ in range(count + 1)]
    assert int(trained.state.step) == count + 1, f"the state says {int(trained.state.step)} steps"
    memory = trained.compiled.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    step_seconds = statistics.median(seconds)
    figures = {
        "batch_per_device": per_device,
        "small": is_small,
        "step_seconds": step_seconds,
        "examples_per_second": per_device * devices / step_seconds,
        "first_step_seconds": warm,
        "compile_seconds": trained.compile_seconds,
        "compiled_bytes_per_device": arguments + outputs + temporaries,
    }
    if peak := (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
        figures["peak_bytes_per_device"] = peak
    figures |= estimate(settings, jax.devices()[0].device_kind, devices)
    rate = f"{figures['examples_per_second']:,.0f} {trained.programs.benchmark.unit}/s"
    text = f"{1e3 * step_seconds:,.1f} ms, {rate}, {per_device} per device"
    text += ", small model" if is_small else ""
    if "estimated_step_seconds" in figures:
        text += f"; preflight: {1e3 * figures['estimated_step_seconds']:,.1f} ms"
    if peak and (forecast := figures.get("forecast_bytes_per_device")):
        text += f"; memory {peak / 2**30:.2f} GiB of {forecast / 2**30:.2f} GiB forecast"
    answer(text, figures, {f"{name} step": models.digest(trained.lowered)})


def test_input_of_the_host(case, answer):
    """How many images per second the host reads, decodes, crops and resizes."""
    folder = training.make_images(case, "large_images", 256, 8, (375, 500))
    changes = {"data_dir": folder, "num_label_classes": 4, "input_streams": 8}
    changes |= {"shuffle_buffer_size": 256, "train_batch_size": 64, "eval_batch_size": 64}
    benchmark = training.settings("resnet50", **changes).load_benchmark(f"{case.folder}/index")
    benchmark.open("train")
    batches = benchmark.train_batches(64, 0, 1, 0)
    for _ in itertools.islice(batches, 4):  # until all threads work
        pass
    started, images, seconds = time.monotonic(), 0, 0.0
    while seconds < (5.0 if case.short else 20.0):
        images += len(next(batches)["image"])
        seconds = time.monotonic() - started
    rate, cores = images / seconds, pools.cores()
    figures = {"images_per_second": rate, "cores": cores}
    figures |= {"images_per_second_per_core": rate / cores}
    answer(f"{rate:,.0f} images/s of 375x500 to 224x224 pixels on {cores} cores", figures)


def estimate(settings, kind, devices):
    """Preflight's forecast for a run on the TPU that jax calls `kind`; {} on other devices."""
    if (chip := topology.of_kind(kind)) is None:
        return {"no_estimate": f"preflight knows no {kind}"} if kind.startswith("TPU") else {}
    size = devices // chip.devices * (2 if chip.counts_cores else 1)
    try:
        (one,) = topology.parse_slices(f"{chip.name}-{size}")
        outcome = preflight.inspect(settings, one, ("train",))
    except UserError as error:
        return {"no_estimate": str(error)}
    if outcome.train is None:
        return {"no_estimate": outcome.error}
    return {
        "estimated_step_seconds": outcome.train.seconds,
        "forecast_bytes_per_device": outcome.train.memory,
    }
