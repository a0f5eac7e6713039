"""What a run refuses at its start, and that the values which its messages advise are accepted."""

import re
import types
from typing import Any

import pytest

from common.errors import ConfigError, DeviceError
from engine import mlperf, sharding
from engine.checks import check_plan, check_schedule
from engine.plan import make_plan, read_settings
from tests.configs.test_configs import load
from tests.conftest import make_tiny_config


def check(examples, devices=8, **overrides):
    """Checks the plan of the tiny job, which needs no data."""
    settings = read_settings(make_tiny_config("/nowhere", **overrides))
    plan = make_plan(settings, settings.load_benchmark(""), examples)
    programs: Any = types.SimpleNamespace(
        settings=settings,
        mesh=types.SimpleNamespace(size=devices),
        benchmark=settings.load_benchmark(""),
    )
    state: Any = None
    check_plan(programs, plan, state, True)


def advised(error):
    """The keys that a message names with values, but for the last, which gives the wish up."""
    pairs = re.findall(r"--config\.(\w+)='?([^',;]*)'?", str(error))
    return dict(pairs[:-1] if len(pairs) > 1 else pairs)


@pytest.mark.parametrize("patience", [1, 3, 50])
@pytest.mark.parametrize("steps", ["2", "3", "20", "2 epochs"])
@pytest.mark.parametrize(
    "keys",
    [
        {"steps_per_eval": "1 epoch"},
        {"steps_per_eval": ""},
        {"steps_per_eval": "400 epochs"},
        {"steps_per_eval": "1 epoch", "eval_offset": "500 epochs"},
    ],
)
def test_the_advice_for_patience_is_accepted_and_is_not_what_was_given(patience, steps, keys):
    """480 examples are 30 steps."""
    overrides = {"patience": patience, "train_steps": steps, **keys}
    try:
        check(480, **overrides)
    except ConfigError as error:
        advice = advised(error)
        assert any(keys.get(key) != value for key, value in advice.items())
        check(480, **{**overrides, **advice})
    else:
        assert (keys, steps) == ({"steps_per_eval": "1 epoch"}, "2 epochs")


def test_patience_needs_two_steps_and_takes_evaluations_by_the_clock():
    with pytest.raises(ConfigError, match="config.patience=2 .* one step: set it to 0, or"):
        check(480, patience=2, train_steps="1")
    check(480, patience=2, steps_per_eval="60 seconds")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("train_steps", "3 weeks"), ("steps_per_eval", "-1"), ("eval_offset", "1 min")),
        *(("warmup_steps", "soon"), ("warmup_epochs", 91.0), ("decay_steps", "1h")),
        *(("learning_rate_decay_factors", (0.1, 0.2)), ("decoupled_decay", True)),
    ],
)
def test_what_no_number_of_examples_allows_is_refused_before_they_are_counted(key, value):
    others = {"optimizer": "lars"} if key == "decoupled_decay" else {}
    config = make_tiny_config("/nowhere", learning_rate_schedule="step", **{key: value}, **others)
    with pytest.raises(ConfigError, match=key):
        check_schedule(read_settings(config))


def test_what_some_number_of_examples_allows_is_accepted():
    """A warm-up that is longer than a million steps, and epochs longer than that."""
    config = make_tiny_config("/nowhere", train_steps="9 epochs", warmup_steps="2000000")
    check_schedule(read_settings(config))


def test_one_device_cannot_be_compared():
    with pytest.raises(ConfigError, match="check_devices_every=4 compares devices, and this run"):
        check(480, 1, check_devices_every=4)
    check(480, 2, check_devices_every=4)


@pytest.mark.parametrize(
    ("span", "batch", "parts"), [("64/4096", 96, 1), ("64/4096", 4096, 2), ("3/9", 7, 1)]
)
def test_the_span_that_is_advised_is_accepted(span, batch, parts):
    with pytest.raises(DeviceError) as refused:
        sharding.check_image_span(span, batch, parts)
    advice = str(refused.value).rpartition("write ")[2]
    sharding.check_image_span(advice, batch, parts)
    assert int(advice.partition("/")[0]) <= int(span.partition("/")[0])


def test_a_batch_that_cannot_be_cut_is_not_blamed_on_the_span():
    sharding.check_image_span("7/49", 100, 3)  # `check_batch` refuses it
    devices: Any = types.SimpleNamespace(flat=[types.SimpleNamespace(process_index=0)])
    one: Any = types.SimpleNamespace(size=1, devices=devices)
    with pytest.raises(DeviceError, match="train_batch_size=100 .* such as 99 or 102"):
        sharding.check_batch(one, "train_batch_size", 100, 3)


@pytest.mark.parametrize(
    "name", ["mlperf_mask_rcnn:128", "mlperf_ssd:1024", "mlperf_resnet50:1632"]
)
def test_the_targets_that_mlperf_asks_for_are_accepted(name, tmp_path):
    config = load(name)
    own = [key for key in ("target", "mask_target") if key in config]
    changes: dict[str, Any] = dict.fromkeys(own, 0.01)
    for _ in own:
        with pytest.raises(ConfigError, match="give --config") as refused:
            check_mlperf(config, str(tmp_path), **changes)
        changes |= {key: float(value) for key, value in advised(refused.value).items()}
    check_mlperf(config, str(tmp_path), **changes)
    assert min(changes.values()) > 0.01


def test_mlperf_needs_something_to_evaluate(tmp_path):
    keys = {"eval_holdout": "none", "mlperf": {"format": "v0.5"}}
    with pytest.raises(ConfigError, match="config.eval_holdout='none' leaves no evaluation"):
        check_mlperf(load("ncf"), str(tmp_path), **keys)


def check_mlperf(config, workdir, **changes):
    config.update({"mlperf": {"org": "x", "format": "mllog"}, "stop_at_target": True})
    config.update(changes)
    settings = read_settings(config, workdir)
    programs: Any = types.SimpleNamespace(settings=settings, benchmark=settings.load_benchmark(""))
    mlperf.check_run(programs, True)
