"""Logits of every architecture against those of timm and Keras for the same weights, stored.

`seeded` draws the weights. `data/variant_logits.json` has what timm 1.0.31 with torch 2.13, and
Keras 3.15 ("keras"), computed with them for `image`, in float32.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import models
from ops.layers import variants
from tests import drawn

PYTORCH = {"max_pool_padding": ((1, 1), (1, 1))}
MODELS = {  # name in timm, or of Keras: (depth, attributes)
    "resnet18": (18, PYTORCH),
    "resnet34": (34, PYTORCH),
    "resnet50": (50, PYTORCH),
    "resnet101": (101, PYTORCH),
    "resnet152": (152, PYTORCH),
    "resnetv2_50": (50, {**PYTORCH, "version": "2"}),
    "resnet50d": (50, {**PYTORCH, "deep_stem": True}),
    "seresnet50": (50, {**PYTORCH, "squeeze_excite": 1 / 16}),
    "resnet18d": (18, {**PYTORCH, "deep_stem": True}),
    "seresnet18": (18, {**PYTORCH, "squeeze_excite": 1 / 16}),
    "resnetv2_18": (18, {**PYTORCH, "version": "2"}),
    "keras": (50, {**PYTORCH, "version": "1"}),
}
CLASSES = 7
STORED = json.loads(
    (pathlib.Path(__file__).parents[3] / "data" / "variant_logits.json").read_text()
)


def build(name):
    depth, attributes = MODELS[name]
    return models.resnet(depth, num_classes=CLASSES, dtype=jnp.float32, **attributes)


def flat(tree) -> Any:
    """The arrays of a tree by names such as "params/conv_stem/kernel"."""
    return flatten_dict(tree, sep="/")


def shapes_of(model):
    init = functools.partial(model.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)), train=False)
    return {name: leaf.shape for name, leaf in flat(jax.eval_shape(init)).items()}


def variables_of(model):
    return unflatten_dict({k: seeded(k, v) for k, v in shapes_of(model).items()}, sep="/")


def seeded(name, shape):
    """float32: an array that follows from its name, such as "params/conv_stem/kernel"."""
    return drawn.weights(name, name.rpartition("/")[2], shape, np.prod(shape[:-1]))


def image():
    """float32[1, 75, 90, 3], -1 to 1, by whole numbers alone; its strides meet odd sizes."""
    y, x, c = np.indices((75, 90, 3), np.int64)
    noise = (x * 73856093 ^ y * 19349663 ^ c * 83492791) % 97
    return (((x * y // 9 + 5 * y * (c + 1) + noise) % 256 - 128) / 128).astype(np.float32)[None]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_other_libraries(name):
    model, expected = build(name), np.array(STORED[name])
    logits = np.asarray(model.apply(variables_of(model), image(), False))[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "changes", "count"),
    [
        ("resnetv2_50", {}, 25_549_352),
        ("resnet50d", {}, 25_576_264),
        ("seresnet50", {}, 28_088_024),
        ("resnet50d", {"squeeze_excite": 0.25, "max_pool_padding": None}, 35_691_912),
        ("resnetv2_50", {"normalization": "group"}, 25_549_352),  # resnetv2_50x1_bit: BiT's paper
    ],
)
def test_published_parameter_counts(name, changes, count):
    """Of timm's documentation, for 1000 classes; the fourth is resnetrs50."""
    model = build(name).clone(num_classes=1000, **changes)
    shapes = shapes_of(model)
    sizes = [np.prod(shape) for key, shape in shapes.items() if key.startswith("params/")]
    assert sum(sizes) == count


SMALL = {"stage_sizes": (1, 1), "num_classes": 3, "num_filters": 8, "dtype": jnp.float32}


def training(images, **kwargs):
    """A function of `params`: (a loss, the new statistics), and the variables."""
    model = models.ResNet(**{**SMALL, **kwargs})
    variables = variables_of(model)

    def loss(params):
        logits, state = model.apply(
            {**variables, "params": params}, images, True, mutable=["batch_stats"]
        )
        return jnp.sum(jnp.sin(logits)), state

    return loss, variables


@pytest.mark.parametrize(
    "kwargs",
    [
        {"version": "1"},
        {"version": "2"},
        {"version": "2", "bottleneck": False},
        {"deep_stem": True},
        {"squeeze_excite": 0.25, "bottleneck": False},
        {"max_pool_padding": None},
        {"normalization": "group", "num_filters": 32},
    ],
    ids=str,
)
def test_no_variant_has_another_form_for_training(kwargs):
    images = np.zeros((2, 24, 24, 3), np.float32)
    programs = set()
    for batch_norm in models.BATCH_NORMS:
        loss, variables = training(images, **kwargs, batch_norm=batch_norm)
        programs.add(jax.jit(loss).lower(variables["params"]).as_text())
    assert len(programs) == 1


@pytest.mark.parametrize(
    "kwargs",
    [
        {"version": "2", "space_to_depth": True},
        {"version": "1", "deep_stem": True, "squeeze_excite": 0.25, "max_pool_padding": None},
        {"normalization": "group", "num_filters": 32, "bottleneck": False},
    ],
    ids=str,
)
def test_each_array_is_trained(kwargs):
    images = np.random.default_rng(0).normal(size=(4, 24, 24, 3)).astype(np.float32)
    loss, variables = training(images, **kwargs)
    gradients, state = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    for name, gradient in flat(gradients).items():
        assert np.abs(gradient).max() > 1e-6, name
    for name, value in flat(state.get("batch_stats", {})).items():
        before = seeded(f"batch_stats/{name}", value.shape)
        assert np.abs(value - before).max() > 1e-3, name  # the statistics have moved


def test_a_pre_activation_model_begins_with_gammas_of_one():
    model = models.ResNet(**SMALL, version="2")

    @jax.jit
    def gammas():  # without the kernels, which take long to compile
        variables = model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), False)
        return {k: v for k, v in flat(variables["params"]).items() if k.endswith("scale")}

    initial = gammas()
    assert {name.split("/")[-2] for name in initial} == {"bn1", "bn2", "bn3", "bn_final"}
    for gamma in initial.values():
        np.testing.assert_array_equal(gamma, 1)


def test_bfloat16_is_kept_between_the_layers():
    model = models.ResNet(**{**SMALL, "dtype": jnp.bfloat16}, squeeze_excite=0.25, deep_stem=True)
    shapes = jax.eval_shape(
        lambda: model.init_with_output(
            jax.random.key(0), jnp.zeros((1, 32, 32, 3)), True, method="endpoints"
        )
    )
    assert {leaf.dtype for leaf in shapes[0].values()} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes[1])} == {jnp.dtype(jnp.float32)}


def test_features_are_what_the_head_takes():
    model = models.ResNet(**SMALL, version="2")
    variables = variables_of(model)
    features = np.asarray(model.apply(variables, image(), False, method="features"), np.float64)
    head, logits = variables["params"]["head"], np.asarray(model.apply(variables, image(), False))
    np.testing.assert_allclose(logits, features @ head["kernel"] + head["bias"], rtol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"version": "3"}, "version='3': use '1.5', '1' or '2'"),
        ({"version": "2", "deep_stem": True}, "version='2' has neither"),
        ({"version": "2", "squeeze_excite": 0.1}, "version='2' has neither"),
        ({"version": "2", "max_pool_padding": None}, "version='2' has neither .*, and has a max"),
        ({"space_to_depth": True, "deep_stem": True}, "a deep stem has no kernel"),
        ({"normalization": "layer"}, "normalization='layer': use 'batch' or 'group'"),
        ({"normalization": "group", "space_to_depth": True}, "has no standardized kernel"),
    ],
)
def test_what_does_not_exist_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        shapes_of(models.ResNet(**SMALL, **kwargs))


@pytest.mark.parametrize(
    ("channels", "ratio", "units"),
    [
        (64, 1 / 16, 8),
        (16, 0.25, 8),  # 8 at least
        (179, 1 / 16, 8),  # 11.2
        (192, 1 / 16, 16),  # 12, of which the half goes up
        (256, 1 / 16, 16),
        (2048, 0.25, 512),
    ],
)
def test_widths_of_squeeze_and_excitation_are_timms(channels, ratio, units):
    assert variants.squeezed(channels, ratio) == units
