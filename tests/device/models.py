"""Six small models with fixed weights and one fixed batch each, one for every benchmark.

models.json has the changes to a recipe of configs/ that make a model small, and the batch without
its images. Weights and images are drawn from NumPy's `RandomState`, whose streams never change, so
that they are the same bits with every version of jax and on every device.

reference.json has what they compute: loss, statistics, gradients, the optimizer's changes.
`python -m tests.device.models` computes it again, in float32 on one CPU device with the products of
matrices in full float32.
"""

import functools
import hashlib
import importlib
import json
import math
import pathlib
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks.base import BATCH_AXES, Benchmark
from common.trees import by_name
from engine import compiler, step
from engine.plan import Plan, make_plan, read_settings

HERE = pathlib.Path(__file__).parent
ROWS = 8  # of a batch
LEAST = 0.02  # an array's error counts in units of its norm, or of this share of the largest norm
CHANGES = 2e-4  # the relative error of the optimizer's changes, which no layer makes larger


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
ORDER = Tolerance(loss=1e-3, array=1e-3, together=1e-3)  # of float32 in another order of additions


class Model(NamedTuple):
    """A small benchmark with weights and a batch, all on the host."""

    benchmark: Benchmark
    plan: Plan
    params: Any
    model_state: Any
    batch: dict[str, np.ndarray]


@functools.cache
def table() -> dict[str, Any]:
    """{name: {"recipe": module of configs/, "changes": {key: value}, "batch": {leaf: values}}}."""
    return json.loads((HERE / "models.json").read_text())


@functools.cache
def reference() -> dict[str, Any]:
    """{name: the stored `values` of the model, with its `changes`}."""
    return json.loads((HERE / "reference.json").read_text())["values"]


def load(name: str, precision: str = "float32") -> Model:
    """Makes a model of `table()`; its BatchNorm, if it has one, spans all devices."""
    row = table()[name]
    config: Any = importlib.import_module(f"configs.{row['recipe']}").get_config()
    config.update({key: _tuples(value) for key, value in row["changes"].items()})
    config.update({k: v for k, v in {"precision": precision, "bn_span": 0}.items() if k in config})
    settings = read_settings(config.lock())
    benchmark = settings.load_benchmark("")
    examples = benchmark.declared_examples("train") or benchmark.nominal_examples("train")
    plan = make_plan(settings, benchmark, examples)
    params, model_state = jax.tree_util.tree_map_with_path(
        _weights, jax.eval_shape(benchmark.init, jax.random.key(0))
    )
    batch = {}
    for leaf, x in benchmark.batch_spec("train", ROWS)[0].items():
        images = _stream(f"{name} {leaf}").randint(0, 256, x.shape)
        batch[leaf] = np.asarray(row["batch"].get(leaf, images)).astype(x.dtype).reshape(x.shape)
    return Model(benchmark, plan, params, model_state, batch)


def compute(model: Model, mesh: Mesh, precision: str = "float32") -> tuple[dict[str, Any], str]:
    """Computes loss and gradients of a model's batch on a mesh, and the SHA-256 of the program.

    The values are "sums" {name: [sum, weight]} and "arrays" {name: `_sketch` of the array}.
    """

    def loss(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        del rng  # one key for all devices, whose random numbers depend on the example alone
        return model.benchmark.loss(params, state, batch, jax.random.key(1))

    arguments = model.params, model.model_state, model.batch, jax.random.key(0)
    with jax.default_matmul_precision("highest" if precision == "float32" else "default"):
        gradients = step.make_gradients(loss, mesh, 1)
        lowered = jax.jit(gradients, compiler_options=compiler.options(mesh)).lower(*arguments)
        gradient, sums, model_state = jax.device_get(lowered.compile()(*arguments))
    arrays = by_name({"gradient": gradient, "state": model_state})
    return {
        "sums": {name: [float(x) for x in pair] for name, pair in sorted(sums.items())},
        "arrays": {name: _sketch(name, x) for name, x in sorted(arrays.items())},
    }, digest(lowered)


def changes(model: Model) -> list[float]:
    """What the optimizer adds to the weights in a whole run of small gradients that grow.

    They are so small that weight decay counts as much as they do: rates, momenta, weight decay and
    the parameters without it all show. Returns the `_sketch` of all changes together.
    """

    def draw(path: Any, x: np.ndarray) -> np.ndarray:
        values = _stream(f"gradient {_name(path)}").uniform(-1, 1, x.shape)
        return (1e-4 * values).astype(x.dtype)

    gradient, plan = jax.tree_util.tree_map_with_path(draw, model.params), model.plan

    def advance(carry: Any, number: jax.Array) -> tuple[Any, None]:
        total, state = carry
        weights = optax.apply_updates(model.params, total)
        now = jax.tree.map(lambda x: (1.0 + number) * x, gradient)
        change, state = plan.step_settings.optimizer.update(now, state, weights)
        return (optax.apply_updates(total, change), state), None

    @jax.jit
    def run() -> Any:
        first = (
            jax.tree.map(jnp.zeros_like, model.params),
            plan.step_settings.optimizer.init(model.params),
        )
        return jax.lax.scan(advance, first, jnp.arange(plan.total_steps))[0][0]

    arrays = sorted(by_name(jax.device_get(run())).items())
    return _sketch("changes", np.concatenate([x.astype(float).ravel() for _, x in arrays]))


def compare(name: str, new: dict[str, Any], old: dict[str, Any], tolerance: Tolerance) -> Any:
    """Compares what `compute` returns, and `changes` where `new` has them, with `old`.

    Returns the largest relative error of an array, and that of all gradients together. A message
    names the model, and the term or the array.
    """
    arrays = old["arrays"]
    is_same = new["arrays"].keys() == arrays.keys() and new["sums"].keys() == old["sums"].keys()
    assert is_same, f"{name} has other arrays than reference.json: compute that file again"
    # Which class has the best score is no matter of tolerances in bfloat16.
    for term in old["sums"] if tolerance.array < math.inf else ["loss"]:
        values, stored = new["sums"][term], old["sums"][term]
        problem = f"{name}: the {term} is {values[0]:.6g} instead of {stored[0]:.6g}"
        assert np.allclose(values, stored, rtol=tolerance.loss, atol=0), problem
    gradients = [array for array in arrays if array.startswith("gradient/")]
    least = LEAST * max(arrays[array][0] for array in gradients)
    differences = {x: np.abs(np.subtract(new["arrays"][x], arrays[x])) for x in arrays}
    errors = {x: differences[x].max() / (max(arrays[x][0], least) or 1.0) for x in arrays}
    for array, error in errors.items():
        problem = f"{name}: {array} has a relative error of {error:.2g}"
        assert error <= tolerance.array, problem
    if "changes" in new:
        error = np.abs(np.subtract(new["changes"], old["changes"])).max() / old["changes"][0]
        assert error <= CHANGES, (
            f"{name}: the gradients are right, but the optimizer's changes of the weights have a "
            f"relative error of {error:.2g}: engine/optim.py, engine/schedules.py"
        )
    square = sum(np.mean(differences[x][1:] ** 2) for x in gradients)
    together = float(np.sqrt(square / sum(arrays[x][0] ** 2 for x in gradients)))
    problem = f"{name}: all gradients together have a relative error of {together:.2g}"
    assert together <= tolerance.together, problem
    return float(max(errors.values())), together


def digest(lowered: Any) -> str:
    """The SHA-256, 64 hexadecimal digits, of a lowered program's StableHLO text."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def one_device() -> Mesh:
    """A mesh of one device."""
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), BATCH_AXES)


def _weights(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
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


def _sketch(name: str, x: np.ndarray) -> list[float]:
    """[norm, product, product] of an array: inner products with fixed random signs.

    A mistake in any element shows in the products.
    """
    values = [float(np.linalg.norm(np.asarray(x, float).ravel()))]
    for i in range(2):
        signs = _stream(f"signs {name} {i}").randint(0, 2, x.shape) * 2.0 - 1.0
        values.append(float(np.vdot(signs, np.asarray(x, float))))
    return [float(f"{value:.7g}") for value in values]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _stream(text: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(text.encode()))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _write_reference() -> None:
    rows: dict[str, Any] = {}
    for name in table():
        model = load(name)
        rows[name] = {**compute(model, one_device())[0], "changes": changes(model)}
    how = "python -m tests.device.models, on one CPU device in float32"
    content = {"how": how, "jax": jax.__version__, "values": rows}
    (HERE / "reference.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    _write_reference()
