"""Compares small models with stored values, and all devices with one of them on the same batch.

There are six fixed models with one fixed batch each, one for every benchmark. models.json has the
changes to a recipe of configs/ that make a model small, and the batch without its images. Weights
and images are drawn from NumPy's `RandomState`, whose streams never change, so that they are the
same bits with every version of jax and on every device.

reference.json has the values: loss, statistics, gradients, the optimizer's changes.
`python -m commands.prove.numbers` computes it again, in float32 on one CPU device with the products
of matrices in full float32.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import os
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks.base import BATCH_AXES, Benchmark
from commands.prove.checks import Case, Failed, Result, digest
from common.trees import by_name
from engine import compiler, step
from engine import mesh as meshes
from engine.run import make_plan, read_settings
from engine.step import Recipe

_MODELS_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "models.json")
_REFERENCE_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reference.json")
ROWS = 8  # of a batch
LEAST = 0.02  # an array's error counts in units of its norm, or of this share of the largest norm
_CHANGES = 2e-4  # the relative error of the optimizer's changes, which no layer makes larger
_ORDER_TOLERANCE = 1e-3  # of float32 in another order of additions, see `TOLERANCES`
_DETECTORS = ("ssd", "mask_rcnn")
Values = dict[str, Any]


class Tolerance(NamedTuple):
    """The relative errors that are allowed: of the loss, of one array, of all arrays together."""

    loss: float
    array: float
    together: float


# float32: other devices add in another order. Two compilers on a CPU differ by 1.5e-5 in one array,
# and BatchNorm over 8 images multiplies rounding by about 100. bfloat16 rounds by 0.2 % in each of
# 10 to 50 layers: on a CPU that moves one array of the ResNet by 60 %, and all together by 25 %. A
# wrong sign or a missing term is 100 % and more.
TOLERANCES = {
    "float32": Tolerance(loss=1e-3, array=2e-3, together=1e-3),
    "bfloat16": Tolerance(loss=0.05, array=math.inf, together=0.6),
}


# The models.


@dataclasses.dataclass(frozen=True)
class Model:
    """A small benchmark with weights and a batch, all on the host."""

    benchmark: Benchmark
    recipe: Recipe
    params: Any
    model_state: Any
    batch: dict[str, np.ndarray]


@functools.cache
def model_table() -> dict[str, Any]:
    """{name: {"recipe": module of configs/, "changes": {key: value}, "batch": {leaf: values}}}."""
    with open(_MODELS_FILE) as file:
        return json.load(file)


def load_model(name: str, precision: str = "float32") -> Model:
    """Makes a model; its BatchNorm, if it has one, spans all devices.

    Args:
      name: a key of `model_table()`.
      precision: of the activations, "float32" or "bfloat16", where the benchmark has a choice.
    """
    row = model_table()[name]
    config: Any = importlib.import_module(f"configs.{row['recipe']}").get_config()
    config.update({key: _tuples(value) for key, value in row["changes"].items()})
    config.update({k: v for k, v in {"precision": precision, "bn_span": 0}.items() if k in config})
    settings = read_settings(config.lock())
    benchmark = settings.load_benchmark("")
    examples = benchmark.declared_examples("train") or benchmark.nominal_examples("train")
    recipe = make_plan(settings, benchmark, examples).recipe
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


# The devices.


def describe_devices(case: Case) -> Result:
    """The kind and the number of the devices, and the memory of one in bytes.

    Raises:
      DeviceError: this machine has a TPU that jax does not use.
    """
    del case
    meshes.check_platform()
    devices = jax.devices()
    kind, chips = devices[0].device_kind, meshes.num_chips(meshes.make(BATCH_AXES, 1))
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    figures = {"kind": kind, "platform": devices[0].platform, "count": len(devices)}
    figures |= {"chips": chips} if devices[0].platform == "tpu" else {}
    figures |= {"memory_bytes": memory} if memory else {}
    return Result(f"{len(devices)} x {kind}", figures)


def all_as_one(case: Case) -> Result:
    """Computes the batch of every model on all devices and on one of them, in float32."""
    del case
    count = math.gcd(ROWS, 1 << (jax.device_count().bit_length() - 1))
    if count == 1:
        return Result("there is one device", status="skipped")
    figures: dict[str, Any] = {"devices": count}
    programs: dict[str, str] = {}
    for name in model_table():
        model = load_model(name)
        (one, sums, state), _ = gradients(model, _mesh(1))
        (many, all_sums, all_state), programs[name] = gradients(model, _mesh(count))
        figures[name] = max(
            differ(f"{name}: the sums", sums, all_sums),
            differ(f"{name}: the gradients", one, many),
            differ(f"{name}: the statistics", state, all_state),
        )
    worst = max(figures[name] for name in programs)
    text = f"{count} of {jax.device_count()} devices" if count < jax.device_count() else "all"
    return Result(f"{text} = 1; largest relative error {worst:.1e}", figures, programs)


def differ(what: str, one: Any, many: Any) -> float:
    """Returns the largest relative difference of an array in two trees.

    The unit is the array's norm in the first tree, or a share of the largest norm there.

    Raises:
      Failed: it is larger than the tolerance, or not finite; the message names the array.
    """
    first, second = named(one), named(many)
    norms = {name: float(np.linalg.norm(x)) for name, x in first.items()}
    least, worst = LEAST * max(norms.values(), default=0.0), 0.0
    for name, x in first.items():
        error = float(np.linalg.norm(second[name] - x)) / (max(norms[name], least) or 1.0)
        if not error <= _ORDER_TOLERANCE:
            raise Failed(f"{what} of all devices differ from those of one by {error:.2g} in {name}")
        worst = max(worst, error)
    return worst


def _mesh(count: int) -> Any:
    return meshes.make(BATCH_AXES, 0, jax.devices()[:count])


# The values.


def check_values(case: Case) -> Result:
    """Computes every model on one device, in float32 and bfloat16.

    With --short the detectors, which take long to compile, are left out in bfloat16.
    """
    figures: dict[str, Any] = {}
    programs: dict[str, str] = {}
    for name, stored in reference().items():
        for precision in TOLERANCES:
            if case.short and precision == "bfloat16" and name in _DETECTORS:
                continue
            key = f"{name} {precision}"
            model = load_model(name, precision)
            values, programs[key] = computed(model, _one(), precision)
            if precision == "float32":
                values["changes"] = changes(model)
            figures[key] = compare(key, values, stored, TOLERANCES[precision])
    worst = {p: max(x for key, x in figures.items() if key.endswith(p)) for p in TOLERANCES}
    text = ", ".join(f"{error:.1e} in {precision}" for precision, error in worst.items())
    return Result(f"largest relative error {text}", figures, programs)


def reference() -> dict[str, Values]:
    """The stored values of each model; see `values`."""
    with open(_REFERENCE_FILE) as file:
        return json.load(file)["values"]


def gradients(model: Model, mesh: Mesh, precision: str = "float32") -> tuple[Any, str]:
    """Computes a model's batch on a mesh.

    Returns:
      ((gradients, sums, model_state) of `engine.step.make_gradients` on the host, the digest of the
      program).
    """

    def loss(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        del rng  # one key for all devices, whose random numbers depend on the example alone
        return model.benchmark.loss(params, state, batch, jax.random.key(1))

    arguments = model.params, model.model_state, model.batch, jax.random.key(0)
    with jax.default_matmul_precision("highest" if precision == "float32" else "default"):
        compute = step.make_gradients(loss, mesh, 1)
        lowered = jax.jit(compute, compiler_options=compiler.options(mesh)).lower(*arguments)
        return jax.device_get(lowered.compile()(*arguments)), digest(lowered)


def computed(model: Model, mesh: Mesh, precision: str = "float32") -> tuple[Values, str]:
    """The `values` of a model, and the digest of the program."""
    outputs, program = gradients(model, mesh, precision)
    return values(*outputs), program


def changes(model: Model) -> list[float]:
    """What the optimizer adds to the weights in a whole run of small gradients that grow.

    Rates, momenta, weight decay and the parameters without it all show. The models in models.json
    have all optimizers between them.

    Returns:
      [norm, product, product] of all changes together; see `values`.
    """
    gradient, recipe = small_gradients(model.params), model.recipe

    def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
        total, state = carry
        weights = optax.apply_updates(model.params, total)
        now = jax.tree.map(lambda x: (1.0 + number) * x, gradient)
        change, state = recipe.optimizer.update(now, state, weights)
        return (optax.apply_updates(total, change), state), None

    @jax.jit
    def run() -> Any:
        first = jax.tree.map(jnp.zeros_like, model.params), recipe.optimizer.init(model.params)
        return jax.lax.scan(step, first, jnp.arange(recipe.total_steps))[0][0]

    arrays = sorted(named(jax.device_get(run())).items())
    return _sketch("changes", np.concatenate([x.ravel() for _, x in arrays]))


def values(gradient: Any, sums: Any, model_state: Any) -> Values:
    """What is stored: {"sums": {name: [sum, weight]}, "arrays": {name: [norm, product, product]}}.

    The products are the inner products of the array with fixed random signs, so that a mistake in
    any element shows.
    """
    arrays = {f"gradient/{k}": x for k, x in named(gradient).items()}
    arrays |= {f"state/{k}": x for k, x in named(model_state).items()}
    return {
        "sums": {name: [float(x) for x in pair] for name, pair in sorted(sums.items())},
        "arrays": {name: _sketch(name, x) for name, x in sorted(arrays.items())},
    }


def compare(name: str, new: Values, old: Values, tolerance: Tolerance) -> float:
    """Returns the relative error of all arrays together.

    Args:
      name: of the model, for the message.
      new: `values` that this device computed.
      old: the stored ones.
      tolerance: what is allowed.

    Raises:
      Failed: an error is too large, or not finite; the message names the term or the array.
    """
    if new["arrays"].keys() != old["arrays"].keys() or new["sums"].keys() != old["sums"].keys():
        raise Failed(f"{name} has other arrays than reference.json: compute that file again")
    loss, stored_loss = new["sums"]["loss"][0], old["sums"]["loss"][0]
    if not abs(loss / stored_loss - 1) <= tolerance.loss:
        raise Failed(f"{name}: the loss is {loss:.6g} instead of {stored_loss:.6g}")
    for array, error in _errors(new["arrays"], old["arrays"]).items():
        if not error <= tolerance.array:
            raise Failed(f"{name}: {array} has a relative error of {error:.2g}")
    if "changes" in new:
        change = np.abs(_change(new, old, "changes")).max() / old["changes"][0]
        if not change <= _CHANGES:
            raise Failed(
                f"{name}: the gradients are right, but the optimizer's changes of the weights have "
                f"a relative error of {change:.2g}: engine/optim.py, engine/schedules.py"
            )
    together = _together(new["arrays"], old["arrays"])
    if not together <= tolerance.together:
        raise Failed(f"{name}: all gradients together have a relative error of {together:.2g}")
    return together


def _errors(new: Values, old: Values) -> dict[str, float]:
    """The relative error of each array; very small gradients count in units of `LEAST`."""
    largest = max(x[0] for name, x in old.items() if name.startswith("gradient/"))
    units = {name: max(x[0], LEAST * largest) or 1.0 for name, x in old.items()}
    return {name: float(np.abs(_change(new, old, name)).max()) / units[name] for name in old}


def _together(new: Values, old: Values) -> float:
    names = [name for name in old if name.startswith("gradient/")]
    change = sum(np.mean(_change(new, old, name)[1:] ** 2) for name in names)
    return float(np.sqrt(change / sum(old[name][0] ** 2 for name in names)))


def _change(new: Values, old: Values, name: str) -> np.ndarray:
    return np.subtract(new[name], old[name])


def _sketch(name: str, x: np.ndarray) -> list[float]:
    products = [np.vdot(signs(f"{name} {i}", x.shape), x) for i in range(2)]
    return [float(f"{value:.7g}") for value in (np.linalg.norm(x.ravel()), *products)]


def _one() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), BATCH_AXES)


def _write_reference() -> None:
    rows: dict[str, Values] = {}
    for name in model_table():
        model = load_model(name)
        rows[name] = {**computed(model, _one())[0], "changes": changes(model)}
    how = "python -m commands.prove.numbers, on one CPU device in float32"
    content = {"how": how, "jax": jax.__version__, "values": rows}
    with open(_REFERENCE_FILE, "w") as file:
        file.write(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    _write_reference()
