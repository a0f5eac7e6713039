"""Compares small models with stored values: loss, statistics, gradients, the optimizer's changes.

`python -m modes.prove.numbers` computes reference.json again, in float32 on one CPU device with
the products of matrices in full float32.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks.base import BATCH_AXES
from engine import compiler, step
from modes.prove import models
from modes.prove.case import Case, Failed, Result, digest
from modes.prove.models import Model

_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reference.json")


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
_CHANGES = 2e-4  # the relative error of the optimizer's changes, which no layer makes larger
_DETECTORS = ("ssd", "mask_rcnn")
LEAST = 0.02  # an array's error counts in units of its norm, or of this share of the largest norm

Values = dict[str, Any]


def check(case: Case) -> Result:
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
            model = models.load(name, precision)
            values, programs[key] = computed(model, _one(), precision)
            if precision == "float32":
                values["changes"] = changes(model)
            figures[key] = compare(key, values, stored, TOLERANCES[precision])
    worst = {p: max(x for key, x in figures.items() if key.endswith(p)) for p in TOLERANCES}
    text = ", ".join(f"{error:.1e} in {precision}" for precision, error in worst.items())
    return Result(f"largest relative error {text}", figures, programs)


def reference() -> dict[str, Values]:
    """The stored values of each model; see `values`."""
    with open(_FILE) as file:
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
    gradient, recipe = models.small_gradients(model.params), model.recipe

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

    arrays = sorted(models.named(jax.device_get(run())).items())
    return _sketch("changes", np.concatenate([x.ravel() for _, x in arrays]))


def values(gradient: Any, sums: Any, model_state: Any) -> Values:
    """What is stored: {"sums": {name: [sum, weight]}, "arrays": {name: [norm, product, product]}}.

    The products are the inner products of the array with fixed random signs, so that a mistake in
    any element shows.
    """
    arrays = {f"gradient/{k}": x for k, x in models.named(gradient).items()}
    arrays |= {f"state/{k}": x for k, x in models.named(model_state).items()}
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
    products = [np.vdot(models.signs(f"{name} {i}", x.shape), x) for i in range(2)]
    return [float(f"{value:.7g}") for value in (np.linalg.norm(x.ravel()), *products)]


def _one() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), BATCH_AXES)


def _write() -> None:
    rows: dict[str, Values] = {}
    for name in models.table():
        model = models.load(name)
        rows[name] = {**computed(model, _one())[0], "changes": changes(model)}
    how = "python -m modes.prove.numbers, on one CPU device in float32"
    content = {"how": how, "jax": jax.__version__, "values": rows}
    with open(_FILE, "w") as file:
        file.write(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    _write()
