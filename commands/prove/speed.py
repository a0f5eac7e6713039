"""Measures the train step and its memory beside preflight's forecast, and the host's input."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from typing import Any

import jax

from commands import preflight
from commands.prove import training
from commands.prove.checks import Case, Failed, Result, digest, make_images
from common.errors import UserError
from engine.aot import topology
from engine.run import Settings

# Examples per device: those of preflight for the recipe's batch on 8 devices.
_BATCHES = {"resnet50": 128, "ssd": 128, "transformer": 64}
# On CPUs, and with --short, the models are smaller.
_SMALL: dict[str, dict[str, Any]] = {
    "resnet50": {"image_size": 64, "num_filters": 16, "precision": "float32"},
    "ssd": {"num_filters": 8, "precision": "float32", "batch_norm": "plain"},
    "transformer": {
        **{"width": 128, "mlp_width": 256, "num_heads": 4, "num_layers": 2, "row_length": 64},
        **{"vocabulary_size": 4000, "precision": "float32"},
    },
}
_INPUT_SECONDS = {True: 5.0, False: 20.0}  # of the measurement, by --short


def resnet50(case: Case) -> Result:
    """Times ResNet-50's train step."""
    recipe = "fake_imagenet"  # with ImageNet's counts, so that no data are asked for
    return _measure(case, "resnet50", recipe)


def ssd(case: Case) -> Result:
    """Times SSD's train step."""
    return _measure(case, "ssd", "ssd")


def transformer(case: Case) -> Result:
    """Times the Transformer's train step."""
    return _measure(case, "transformer", "transformer")


def host_input(case: Case) -> Result:
    """Measures how many images per second the host reads, decodes, crops and resizes."""
    folder = make_images(case, "large_images", 256, 8, "375x500")
    changes: dict[str, Any] = {"data_dir": folder, "num_label_classes": 4, "input_streams": 8}
    changes |= {"shuffle_buffer_size": 256, "train_batch_size": 64, "eval_batch_size": 64}
    benchmark = training.settings("resnet50", **changes).load_benchmark(f"{case.folder}/index")
    benchmark.num_examples("train")
    batches = benchmark.train_batches(64, 0, 1, 0)
    for _ in itertools.islice(batches, 4):  # until all threads work
        pass
    started, images, seconds = time.monotonic(), 0, 0.0
    while seconds < _INPUT_SECONDS[case.short]:
        images += len(next(batches)["image"])
        seconds = time.monotonic() - started
    rate, cores = images / seconds, len(os.sched_getaffinity(0))
    figures = {
        "images_per_second": rate,
        "cores": cores,
        "images_per_second_per_core": rate / cores,
    }
    text = f"{rate:,.0f} images/s of 375x500 to 224x224 pixels on {cores} cores"
    return Result(text, figures)


def _measure(case: Case, name: str, recipe: str) -> Result:
    devices, backend = jax.device_count(), jax.default_backend()
    is_small = case.short or backend == "cpu"
    per_device = 1 if backend == "cpu" else _BATCHES[name]
    changes: dict[str, Any] = dict(_SMALL[name]) if is_small else {}
    changes |= {"train_batch_size": per_device * devices, "eval_batch_size": devices}
    settings = training.settings(recipe, **changes)
    trained = training.Training(settings)
    count = 3 if is_small else 20
    warm, *seconds = [trained.step() for _ in range(count + 1)]
    if int(trained.state.step) != count + 1:
        raise Failed(f"after {count + 1} steps the state says {int(trained.state.step)}")
    memory = trained.compiled.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    step_seconds, unit = statistics.median(seconds), trained.programs.benchmark.unit
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
    text = f"{1e3 * step_seconds:,.1f} ms, {figures['examples_per_second']:,.0f} {unit}/s"
    text += f", {per_device} per device" + (", small model" if is_small else "")
    if "estimated_step_seconds" in figures:
        text += f"; preflight: {1e3 * figures['estimated_step_seconds']:,.1f} ms"
    if peak and "forecast_bytes_per_device" in figures:
        text += f"; memory {peak / 2**30:.2f} GiB of {_gib(figures)} forecast"
    return Result(text, figures, {f"{name} step": digest(trained.lowered)})


def estimate(settings: Settings, kind: str, devices: int) -> dict[str, Any]:
    """Preflight's forecast for a run on the TPU that jax calls `kind`.

    Returns:
      {"estimated_step_seconds", "forecast_bytes_per_device"}; {"no_estimate": the reason} where
      preflight cannot compile; {} on other devices than TPUs.
    """
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
        "estimated_step_seconds": outcome.train.cycles / one.chip.clock,
        "forecast_bytes_per_device": outcome.train.memory,
    }


def _gib(figures: dict[str, Any]) -> str:
    return f"{figures['forecast_bytes_per_device'] / 2**30:.2f} GiB"
