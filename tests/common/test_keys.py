"""Kinds and ranges of keys, and how they are read into dataclasses."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import ml_collections
import pytest

from common import keys
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, [0, -5, 10**9], [1.0, True, "1", None, (1,)]),
        (float, [0, -1.5, 1e30, 10**400], [1e-300, math.nan, math.inf, -math.inf, True, "1", None]),
        (bool, [True, False], [0, 1, "yes"]),
        (str, ["", "a", "für", "a\nb"], [1, None, ("a",), "\0", "\udcff"]),
        (int | str, [1, "1 epoch"], [1.5, None, True, math.nan]),
        (Annotated[int, "[1, 9]"], [1, 9], [0, 10, 5.0]),
        (Annotated[float, "(0, 1)"], [0.5], [0, 1, math.nan, -1]),
        (Annotated[float, "[0, inf)"], [0, 1e300], [-1e-9, math.inf, math.nan]),
        (Literal["a", "b"], ["a"], ["c", "", None, 1]),
        (
            Sequence[keys.NotNegative],
            [(), (1, 2.5), [3]],
            [1, "12", (math.nan,), (-1,), (1,) * 1001],
        ),
        (
            Annotated[Sequence[int], "[1, 3] rising"],
            [(1,), (1, 2, 3)],
            [(), (1, 2, 3, 4), (2, 1), (1, 1)],
        ),
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
    assert keys.read_config(Outer, nested) == keys.read_config(Outer, flat) == Outer("a", Inner(2))
    nested.inner = ml_collections.ConfigDict({"depth": 2.5})
    with pytest.raises(ConfigError, match=r"config\.inner\.depth=2\.5: must be a whole number"):
        keys.read_config(Outer, nested)
    with pytest.raises(ConfigError, match=r"no config\.name; configs/_loop\.py"):
        keys.read_config(Outer, ml_collections.ConfigDict({"inner": {"depth": 1}}))
