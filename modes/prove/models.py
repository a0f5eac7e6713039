"""Six small fixed models with one fixed batch each: one for every benchmark.

models.json has the changes to a recipe of configs/ that make the model small, and the batch without
its images. Weights and images are drawn from NumPy's `RandomState`, whose streams never change, so
that they are the same bits with every version of jax and on every device.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import os
import zlib
from typing import Any

import jax
import numpy as np

import run as runs
from benchmarks.base import Benchmark
from engine.step import Recipe
from ops.trees import by_name

_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "models.json")
ROWS = 8  # of the batch


@dataclasses.dataclass(frozen=True)
class Model:
    """A small benchmark with weights and a batch, all on the host."""

    benchmark: Benchmark
    recipe: Recipe
    params: Any
    model_state: Any
    batch: dict[str, np.ndarray]


@functools.cache
def table() -> dict[str, Any]:
    """{name: {"recipe": module of configs/, "changes": {key: value}, "batch": {leaf: values}}}."""
    with open(_FILE) as file:
        return json.load(file)


def load(name: str, precision: str = "float32") -> Model:
    """Makes a model; its BatchNorm, if it has one, spans all devices.

    Args:
      name: a key of `table()`.
      precision: of the activations, "float32" or "bfloat16", where the benchmark has a choice.
    """
    row = table()[name]
    config: Any = importlib.import_module(f"configs.{row['recipe']}").get_config()
    config.update({key: _tuples(value) for key, value in row["changes"].items()})
    config.update({k: v for k, v in {"precision": precision, "bn_span": 0}.items() if k in config})
    settings = runs.read(config.lock())
    benchmark = settings.load_benchmark("")
    examples = benchmark.declared_examples("train") or benchmark.nominal_examples("train")
    recipe = runs.plan(settings, benchmark, examples).recipe
    params, model_state = jax.tree_util.tree_map_with_path(
        _draw, jax.eval_shape(benchmark.init, jax.random.key(0))
    )
    spec = benchmark.batch_spec("train", ROWS)[0]
    batch = {leaf: _leaf(name, leaf, x, row["batch"]) for leaf, x in spec.items()}
    return Model(benchmark, recipe, params, model_state, batch)


def small_gradients(params: Any) -> Any:
    """Random gradients, so small that weight decay counts as much as they do."""

    def draw(path: Any, x: np.ndarray) -> np.ndarray:
        return (1e-4 * _stream(f"gradient {_name(path)}").uniform(-1, 1, x.shape)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)


def signs(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random -1 and 1 for an array, float64[shape]."""
    return _stream(f"signs {name}").randint(0, 2, shape) * 2.0 - 1.0


def named(tree: Any) -> dict[str, np.ndarray]:
    """{"params/conv/kernel": float64 array on the host, ...}."""
    return {name: np.asarray(x).astype(np.float64) for name, x in by_name(tree).items()}


def _draw(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
    """A leaf of the weights, with values that hide no mistake: no scale is 0, no variance is 1."""
    name = _name(path)
    stream, last = _stream(name), name.rpartition("/")[2]
    if not np.issubdtype(x.dtype, np.floating):
        return np.zeros(x.shape, x.dtype)
    values = stream.uniform(-1, 1, x.shape)
    if last in ("scale", "var"):
        values = 1 + 0.2 * values
    elif len(x.shape) > 1:
        values *= math.sqrt(3 / math.prod(x.shape[:-1]))
    else:
        values *= 0.1
    return values.astype(x.dtype)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _leaf(name: str, leaf: str, spec: Any, stored: dict[str, Any]) -> np.ndarray:
    if leaf in stored:
        return np.asarray(stored[leaf]).astype(spec.dtype).reshape(spec.shape)
    return _stream(f"{name} {leaf}").randint(0, 256, spec.shape).astype(spec.dtype)


def _stream(text: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(text.encode()))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
