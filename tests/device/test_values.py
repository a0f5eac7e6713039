"""Small models compute what is stored, and all found what one does."""

import importlib
import json
import math

import jax
import pytest

from benchmarks.base import BATCH_AXES
from engine import devices, sharding
from tests.device import models

DETECTORS = ("ssd", "mask_rcnn")  # they take long to compile


@pytest.mark.device
def test_the_devices_of_this_machine_are_used(answer):
    devices.check_platform()
    found = jax.devices()
    kind, chips = found[0].device_kind, sharding.num_chips(sharding.make(BATCH_AXES, 1))
    memory = (found[0].memory_stats() or {}).get("bytes_limit")
    figures = {"kind": kind, "platform": found[0].platform, "count": len(found)}
    figures |= {"chips": chips} if found[0].platform == "tpu" else {}
    figures |= {"memory_bytes": memory} if memory else {}
    answer(f"{len(found)} x {kind}", figures)


@pytest.mark.device
@pytest.mark.long
def test_values(case, answer):
    """Loss, statistics, gradients, the optimizer's changes: on one device, as they are stored.

    The short form leaves out the detectors in bfloat16.
    """
    figures, programs = {}, {}
    for name, stored in models.reference().items():
        for precision, tolerance in models.TOLERANCES.items():
            if case.short and precision == "bfloat16" and name in DETECTORS:
                continue
            key = f"{name} {precision}"
            model = models.load(name, precision)
            values, programs[key] = models.compute(model, models.one_device(), precision)
            if precision == "float32":
                values["changes"] = models.changes(model)
            figures[key] = models.compare(key, values, stored, tolerance)[1]
    worst = {
        precision: max(error for key, error in figures.items() if key.endswith(precision))
        for precision in models.TOLERANCES
    }
    text = ", ".join(f"{error:.1e} in {precision}" for precision, error in worst.items())
    answer(f"largest relative error {text}", figures, programs)


@pytest.mark.device
@pytest.mark.long
def test_all_devices_are_as_one(answer):
    """The batch of every model on all found and on one of them, in float32."""
    count = math.gcd(models.ROWS, 1 << (jax.device_count().bit_length() - 1))
    if count == 1:
        pytest.skip("there is one device")
    errors, programs = {}, {}
    for name in models.table():
        model = models.load(name)
        one, _ = models.compute(model, models.one_device())
        mesh = sharding.make(BATCH_AXES, 0, jax.devices()[:count])
        many, programs[name] = models.compute(model, mesh)
        errors[name] = models.compare(f"{name} on {count} devices", many, one, models.ORDER)[0]
    text = f"{count} of {jax.device_count()} devices" if count < jax.device_count() else "all"
    text += f" = 1; largest relative error {max(errors.values()):.1e}"
    answer(text, {"devices": count, **errors}, programs)


def negative(values):
    values["arrays"] = {name: [-x for x in array] for name, array in values["arrays"].items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda new: new["sums"].update(loss=[math.nan, 1.0]), "the loss is nan instead"),
        (lambda new: new["sums"].update(loss=[0.9, 1.0]), "the loss is 0.9 instead of"),
        (lambda new: new["arrays"].popitem(), "has other arrays"),
        (lambda new: new.update(changes=[1.01 * x for x in new["changes"]]), "the optimizer's"),
        (negative, "all gradients together"),
    ],
)
def test_other_values_are_noticed(change, message):
    """By the tolerance of bfloat16, too."""
    stored = models.reference()["ncf"]
    new = json.loads(json.dumps(stored))
    assert models.compare("ncf", new, stored, models.TOLERANCES["bfloat16"]) == (0, 0)
    change(new)
    with pytest.raises(AssertionError, match=f"^ncf.*{message}"):
        models.compare("ncf", new, stored, models.TOLERANCES["bfloat16"])


def test_the_models_have_all_optimizers_and_dropout():
    """Else a fault there would go unnoticed."""
    names = set()
    for row in models.table().values():
        config = importlib.import_module(f"configs.{row['recipe']}").get_config()
        names.add(row["changes"].get("optimizer", config.optimizer))
    assert names == {"sgd", "lars", "lamb", "adam"}
    for name in ("transformer", "gnmt"):
        assert models.table()[name]["changes"]["dropout"] > 0
