"""Every key of every recipe: a nonsensical value ends in one line that names the key."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import ml_collections
import pytest

import keys
import locations
import run as runs
from engine import image_spans
from engine import mesh as meshes
from errors import ConfigError, UserError
from tests.fixtures.recipes import languages
from tests.test_configs import load

RECIPES = (
    *("digits", "fake_imagenet", "languages", "mask_rcnn", "mask_rcnn_digits"),
    *("mlperf_mask_rcnn:128", "mlperf_resnet50:4096", "mlperf_ssd:4096", "ncf", "ncf_synthetic"),
    *("resnet50", "resnet50_v2", "ssd", "ssd_digits"),
)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, [0, -5, 10**9], [1.0, True, "1", None, (1,)]),
        (float, [0, -1.5, 1e30], [math.nan, math.inf, -math.inf, True, "1", None]),
        (bool, [True, False], [0, 1, "yes"]),
        (str, ["", "a"], [1, None, ("a",)]),
        (int | str, [1, "1 epoch"], [1.5, None, True, math.nan]),
        (Annotated[int, "[1, 9]"], [1, 9], [0, 10, 5.0]),
        (Annotated[float, "(0, 1)"], [0.5], [0, 1, math.nan, -1]),
        (Annotated[float, "[0, inf)"], [0, 1e300], [-1e-9, math.inf, math.nan]),
        (Literal["a", "b"], ["a"], ["c", "", None, 1]),
        (Sequence[keys.NotNegative], [(), (1, 2.5), [3]], [1, "12", (math.nan,), (-1,), ("a",)]),
        (tuple[Annotated[int, "[1, 9]"], ...], [(1,)], [(0,), (1, 1.5)]),
    ],
)
def test_what_a_kind_accepts(kind, good, bad):
    for value in good:
        accepted = keys.check("config.x", value, kind)
        assert accepted == (tuple(value) if isinstance(value, list) else value)
    for value in bad:
        with pytest.raises(ConfigError, match=r"^config\.x=.*: must be "):
            keys.check("config.x", value, kind)


def test_messages_say_which_end_of_the_range_was_missed():
    for value, message in (
        (-1, "config.x=-1: must be at least 0"),
        (1.0, "config.x=1.0: must be less than 1"),
        (math.nan, "config.x=nan: must be a finite number"),
    ):
        with pytest.raises(ConfigError) as caught:
            keys.check("config.x", value, keys.Decay)
        assert str(caught.value) == message


def test_a_long_value_is_cut():
    with pytest.raises(ConfigError) as caught:
        keys.check("config.x", "a" * 200, int)
    assert str(caught.value) == f"config.x='{'a' * 99}: must be a whole number"


@dataclasses.dataclass(frozen=True)
class Inner:
    depth: int


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner


def test_nested_dataclasses_are_read_from_nested_or_from_the_same_keys():
    nested = ml_collections.ConfigDict({"name": "a", "inner": {"depth": 2}})
    flat = ml_collections.ConfigDict({"name": "a", "depth": 2})
    assert keys.read(Outer, nested) == keys.read(Outer, flat) == Outer("a", Inner(2))
    nested.inner = ml_collections.ConfigDict({"depth": 2.5})
    with pytest.raises(ConfigError, match=r"config\.inner\.depth=2\.5: must be a whole number"):
        keys.read(Outer, nested)
    with pytest.raises(ConfigError, match=r"no config\.name; configs/_loop\.py"):
        keys.read(Outer, ml_collections.ConfigDict({"inner": {"depth": 1}}))


def read_and_plan(config: Any) -> None:
    """All that is checked before devices, data or files are touched."""
    settings = runs.read(config, "/nowhere")
    keys.read(locations.Keys, config)
    keys.check("config.data_fallback", config.get("data_fallback") or "", str)
    benchmark = settings.load_benchmark("")
    if "/" in str(benchmark.bn_span):
        image_spans.check(str(benchmark.bn_span), settings.train_batch_size, 1)
    meshes.group_size(benchmark.bn_span, 64)
    runs.plan(settings, benchmark, 10_000)


def leaves(config: Any, prefix: str = "") -> list[str]:
    names = []
    for key, value in config.items():
        nested = hasattr(value, "items")
        names += leaves(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return names


def changed(make: Any, key: str, value: Any) -> Any:
    config = make()
    *parents, last = key.split(".")
    inside = config
    for parent in parents:
        inside = inside[parent]
    with inside.ignore_type():
        inside[last] = value
    return config


# What a person may mean by 0 or by a very large number is accepted; see the ranges in the code.
WRONG = {
    bool: [2, "yes", None, math.nan],
    int: [math.nan, math.inf, 1.5, "many", None, True, 10**30, -(10**30)],
    float: [math.nan, math.inf, -math.inf, "fast", None],  # ml_collections turns True into 1.0
    str: [3.5, None, True],
    tuple: [3, "30", (math.nan,), (math.inf,), ("a",), (-1,)],
}
NEGATIVE = -1
MEANINGFUL = {("schedule_epochs", 1.5), ("data_fallback", None)}
DURATIONS = ["1e18 epochs", "-1", "nan", "inf steps", "1 fortnight", "1e99"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_refuses_nonsense(recipe):
    make = languages.get_config if recipe == "languages" else functools.partial(load, recipe)
    read_and_plan(make())
    accepted = []
    for key in leaves(make()):
        last = key.rpartition(".")[2]
        value: Any = operator.attrgetter(key)(make())
        wrong = list(WRONG[type(value)])
        if isinstance(value, int | float) and not isinstance(value, bool):
            wrong.append(NEGATIVE)
        if "steps" in key and type(value) is str and key != "profile_steps":
            wrong += DURATIONS
        for bad in wrong:
            if (key, bad) in MEANINGFUL:
                continue
            try:
                read_and_plan(changed(make, key, bad))
            except UserError as error:
                assert last in str(error) and "\n" not in str(error), (key, bad, error)
            else:
                accepted.append((key, bad))
    assert accepted == []
