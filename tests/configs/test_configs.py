"""Every recipe in configs/ works as it stands, has no dead keys, and refuses what cannot work."""

import ast
import dataclasses
import importlib
import pathlib
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from common.errors import ConfigError, UserError
from common.keys import flat
from configs import _loop, finetune, small
from engine import optim, schedules
from engine.cadence import Every
from engine.plan import LoopKeys
from tests import config_page
from tests.conftest import open_run, plan_of

ROOT = pathlib.Path(__file__).parents[2]
PARAMETRISED = {
    "finetune": ["finetune", *(f"finetune:{name}" for name in finetune.RECIPES)],
    "mlperf_gnmt": ["mlperf_gnmt:v0.5", "mlperf_gnmt:v0.7-2048"],
    "mlperf_mask_rcnn": ["mlperf_mask_rcnn:128"],
    "mlperf_resnet50": ["mlperf_resnet50:1632", "mlperf_resnet50:v0.5"],
    "mlperf_ssd": ["mlperf_ssd:1024"],
    "mlperf_transformer": ["mlperf_transformer:v0.7-512"],
    "recipes": [
        "recipes:mild",
        "recipes:ffcv32",
        "recipes:a1",
        "recipes:torchvision2",
        "recipes:rs50",
    ],
    "small": [f"small:{name}" for name in small.RECIPES],
}
FILES = sorted(path.stem for path in (ROOT / "configs").glob("[!_]*.py"))
NAMES = [name for file in FILES for name in PARAMETRISED.get(file, [file])]
EXAMPLES = 1_281_167  # ImageNet's


def load(name: str, **overrides: Any) -> Any:
    file, *argument = name.split(":")
    config = importlib.import_module(f"configs.{file}").get_config(*argument)
    config.update(overrides)
    return config.lock()


@pytest.mark.parametrize("name", NAMES)
def test_config_is_one_that_can_run(name, tmp_path):
    config = load(name)
    open_run(config, str(tmp_path))
    plan = plan_of(config, EXAMPLES)
    computed = rates(plan, range(plan.total_steps))
    assert computed.min() >= 0 and computed.max() > 0
    for key in ("steps_per_eval", "steps_per_checkpoint", "log_step_count_steps"):
        size = config.train_batch_size
        Every.parse(config[key], batch_size=size, num_examples=EXAMPLES, name=key)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_plain(name):
    """So that they survive JSON, which is how a checkpoint keeps them."""

    def check(key: str, value: Any) -> None:
        if isinstance(value, tuple):
            for item in value:
                check(key, item)
        else:
            assert type(value) in (bool, int, float, str), key
            assert value == value, key

    for key, value in flat(load(name)).items():
        check(key, value)


def test_recipes_of_one_benchmark_have_the_same_keys():
    keys: dict[str, set[frozenset[str]]] = {}
    for name in NAMES:
        config = load(name)
        keys.setdefault(config.benchmark, set()).add(frozenset(flat(config)))
    assert set(keys) == set(benchmarks.names()) - {"languages"}  # which lives in tests/fixtures
    assert all(len(sets) == 1 for sets in keys.values())


def test_keys_of_the_loop_are_in_one_file():
    """A recipe changes their values; the keys, and the comments on them, are in _loop.py."""
    shared = set(flat(_loop.get_config()))
    assert {"train_batch_size", *fields(optim.Optimizer), *fields(schedules.Schedule)} < shared
    assert "target" not in shared
    for name in NAMES:
        assert shared < set(flat(load(name)))


def test_the_page_of_keys_is_what_the_comments_say():
    """It has every key, each with some words, and is short: docs/config.md."""
    page = (ROOT / "docs/config.md").read_text()
    assert page == config_page.page(), config_page.__doc__
    rows = {key: text for own in config_page.rows().values() for key, (_, text) in own.items()}
    assert set(rows) == set().union(*(flat(load(name)) for name in NAMES))
    assert all(rows.values()) and len(page.split()) <= 1500


def test_a_comment_belongs_to_the_key_below_it():
    lines = ["", "# Data.", 'config.a = "x; #"  # one; two', "# Of c. Four.", "config.b = 1  # no"]
    assert config_page.notes("\n".join(lines)) == {"a": "one", "b": "of c"}


# --- No dead keys.


PACKAGES = ("benchmarks", "commands", "engine")
MAIN = {"data_dir", "data_env", "data_fallback", "init_env"}  # main.py resolves them


def fields(kind: Any, prefix: str = "") -> set[str]:
    """The config keys that `benchmarks.base.read` takes for a dataclass."""
    keys = set()
    for field in dataclasses.fields(kind):
        nested = get_type_hints(kind)[field.name]
        if dataclasses.is_dataclass(nested):
            keys |= fields(nested, "mlperf." if field.name == "mlperf" else "")
        else:
            keys.add(prefix + field.name)
    return keys


def settings_of(config: Any) -> Any:
    """The dataclass of the keys that a recipe's benchmark reads."""
    return importlib.import_module(benchmarks.modules()[config.benchmark]).Settings


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_recipe_is_read(name):
    config = load(name)
    assert set(flat(config)) <= fields(LoopKeys) | fields(settings_of(config)) | MAIN


def test_every_key_that_is_read_is_used():
    """Its name occurs as an attribute, or as a string for getattr, outside of the dataclass."""
    used: set[str] = set()
    for path in [*ROOT.glob("*.py"), *(p for f in PACKAGES for p in ROOT.glob(f"{f}/**/*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
    settings = [settings_of(load(name)) for name in ("resnet50", "ncf")]
    keys = {key.split(".")[-1] for kind in (LoopKeys, *settings) for key in fields(kind)}
    assert keys - used == set()


# --- The recipe.


def rates(plan: Any, steps: list[int] | range) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(plan.learning_rate))(jnp.asarray(steps)))


def test_resnet50_is_ninety_epochs_with_the_published_rates():
    """Goyal et al. 2017 at 0.1 per 256; 90 epochs of 1,281,167 at 1024 are 112,602.6 steps."""
    plan = plan_of(load("resnet50"), EXAMPLES)
    assert plan.total_steps == 112_603
    expected = {0: 0.0, 3128: 0.2, 6255: 0.4 * 6255 / 6256, 6256: 0.4}  # 5 epochs
    expected |= {37_533: 0.4, 37_534: 0.04}  # 30 epochs are 37,534.3 steps
    expected |= {75_068: 0.04, 75_069: 0.004}  # 60 are 75,068.7
    expected |= {100_091: 0.004, 100_092: 0.0004, 112_602: 0.0004}  # 80 are 100,091.6
    np.testing.assert_allclose(rates(plan, list(expected)), list(expected.values()), rtol=1e-5)
    np.testing.assert_allclose(rates(plan, range(112_603)).max(), 0.4, rtol=1e-6)
    assert plan.step_settings.ema_decay == 0.0


def test_resnet_rs_has_the_steps_and_rates_of_its_source():
    """tensorflow/tpu's resnetrs50_i160.yaml has 109,475 steps, and 0.1 per 256 images."""
    plan = plan_of(load("recipes:rs50"), EXAMPLES)
    assert plan.total_steps == 109_475
    computed = rates(plan, [0, 782, 1_564, (1_564 + 109_475) // 2])
    np.testing.assert_allclose(computed, [0, 0.8, 1.6, 0.8], atol=1e-4)


# --- What cannot work is refused in one line.

BAD: list[tuple[dict[str, Any], str]] = [  # with the key that the message names
    ({"kernels": "pallas", "resnet_depth": 34}, "kernels"),
    ({"kernels": "pallas", "squeeze_excite": 0.1}, "kernels"),
    ({"dataset": "imagenet"}, "dataset"),
    ({"resnet_version": "2", "deep_stem": True}, "resnet_version"),
    ({"resnet_version": "2", "squeeze_excite": 0.1}, "resnet_version"),
    ({"deep_stem": True, "space_to_depth": True}, "deep_stem"),
    ({"deep_stem": True, "num_filters": 1}, "num_filters"),
    ({"max_pool": "conv", "resnet_version": "2"}, "max_pool"),
    ({"input_spec": "imagenet"}, "input_spec"),
    ({"image_size": 33, "space_to_depth": True}, "image_size"),
    ({"image_sizes": ((0.1, 8),)}, "image_sizes"),
    ({"image_sizes": ((0, 8), (0.5, 9), (0.5, 8))}, "image_sizes"),
    ({"image_sizes": ((0, 8, 9),)}, "image_sizes"),
    ({"image_sizes": ((0, 33),), "space_to_depth": True}, "image_sizes"),
    ({"eval_image_size": 33, "space_to_depth": True}, "eval_image_size"),
    ({"dataset": "fake", "class_weights": "auto"}, "class_weights"),
    ({"bn_span": 3}, "bn_span"),
    ({"train_batch_size": 1000, "gradient_accumulation_steps": 2}, "train_batch_size"),
    (
        {"moving_average_decay": 0.9, "moving_average_every": 32, "train_steps": "20"},
        "moving_average_every",
    ),
]


@pytest.mark.parametrize(("overrides", "key"), BAD, ids=[",".join(o) for o, _ in BAD])
def test_what_cannot_work_is_refused_in_one_line(overrides, key, tmp_path):
    """What one key may be is walked by tests/configs/test_nonsense.py."""
    config = load("resnet50", **overrides)
    with pytest.raises(UserError, match=rf"^config\.{key}=.*\Z") as caught:
        open_run(config, str(tmp_path))
        plan_of(config, EXAMPLES)
    assert len(str(caught.value).splitlines()) == 1


def test_an_average_that_would_never_begin_is_refused():
    config = load("digits", moving_average_decay=0.9, moving_average_every=5)
    with pytest.raises(ConfigError, match=r"^config\.moving_average_every=5: the run has only 1 "):
        plan_of(config, 1)
    assert plan_of(config, 1437).total_steps > 5
