"""Logits of every architecture against those of timm and Keras for the same weights, stored.

`seeded` draws the weights. `data/variant_logits.json` has what timm 1.0.31 with torch 2.13, and
Keras 3.15 ("keras"), computed with them for `image`, in float32.
"""

import functools
import json
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from benchmarks.resnet.architecture import BATCH_NORMS
from benchmarks.resnet.variants.squeeze_excite import squeezed
from tests import drawn
from tests.benchmarks.resnet.networks import make

MODELS = {  # name in timm, or of Keras: (depth, keys of the recipe)
    **{f"resnet{depth}": (depth, {}) for depth in (18, 34, 50, 101, 152)},
    **{f"resnetv2_{depth}": (depth, {"resnet_version": "2"}) for depth in (18, 50)},
    **{f"resnet{depth}d": (depth, {"deep_stem": True}) for depth in (18, 50)},
    **{f"seresnet{depth}": (depth, {"squeeze_excite": 1 / 16}) for depth in (18, 50)},
    "keras": (50, {"resnet_version": "1"}),
}
CLASSES = 7
STORED = json.loads(
    (pathlib.Path(__file__).parents[3] / "data" / "variant_logits.json").read_text()
)


def build(name, classes=CLASSES, **changes):
    depth, keys = MODELS[name]
    keys = {"max_pool": "torch", "num_filters": 64, **keys, **changes}
    return make(classes=classes, resnet_depth=depth, **keys)


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
        ("resnet50d", {"squeeze_excite": 0.25, "max_pool": "conv"}, 35_691_912),
    ],
)
def test_published_parameter_counts(name, changes, count):
    """Of timm's documentation, for 1000 classes; the fourth is resnetrs50."""
    shapes = shapes_of(build(name, 1000, **changes))
    sizes = [np.prod(shape) for key, shape in shapes.items() if key.startswith("params/")]
    assert sum(sizes) == count


def training(images, **keys):
    """A function of `params`: (a loss, the new statistics), and the variables."""
    model = make(1, 1, **keys)
    variables = variables_of(model)

    def loss(params):
        logits, state = model.apply(
            {**variables, "params": params}, images, True, mutable=["batch_stats"]
        )
        return jnp.sum(jnp.sin(logits)), state

    return loss, variables


VARIANTS: list[dict[str, Any]] = [
    *(
        {"resnet_version": "1"},
        {"resnet_version": "2"},
        {"resnet_version": "2", "resnet_depth": 18},
    ),
    *({"deep_stem": True}, {"squeeze_excite": 0.25, "resnet_depth": 18}, {"max_pool": "conv"}),
    {"blur_pool": True, "num_filters": 16},
]


@pytest.mark.parametrize("keys", VARIANTS, ids=str)
def test_no_variant_has_another_form_for_training(keys):
    images = np.zeros((2, 24, 24, 3), np.float32)
    programs = set()
    for batch_norm in BATCH_NORMS:
        loss, variables = training(images, **keys, batch_norm=batch_norm)
        programs.add(jax.jit(loss).lower(variables["params"]).as_text())
    assert len(programs) == 1


@pytest.mark.parametrize("keys", [{"space_to_depth": True}, *VARIANTS], ids=str)
def test_every_variant_has_the_same_endpoints(keys):
    """Between the layers are bfloat16 values, and all variables are float32."""
    model = make(1, 1, **keys, precision="bfloat16")
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    outputs, variables = jax.eval_shape(
        lambda x: model.init_with_output(jax.random.key(0), x, True, method="endpoints"), images
    )
    width = model.num_filters * (1 if keys.get("resnet_depth") == 18 else 4)
    want = {"C2": (2, 8, 8, width), "C3": (2, 4, 4, 2 * width)}
    assert {name: leaf.shape for name, leaf in outputs.items()} == want
    assert {leaf.dtype for leaf in outputs.values()} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    is_v2 = keys.get("resnet_version") == "2"
    assert [name in variables["params"] for name in ("bn_final", "bn_stem")] == [is_v2, not is_v2]


@pytest.mark.parametrize(
    "keys",
    [
        {"resnet_version": "2", "space_to_depth": True},
        {"resnet_version": "1", "deep_stem": True, "squeeze_excite": 0.25, "max_pool": "conv"},
    ],
    ids=str,
)
def test_each_array_is_trained(keys):
    images = np.random.default_rng(0).normal(size=(4, 24, 24, 3)).astype(np.float32)
    loss, variables = training(images, **{"num_filters": 8, **keys})
    gradients, state = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    for name, gradient in flat(gradients).items():
        assert np.abs(gradient).max() > 1e-6, name
    for name, value in flat(state["batch_stats"]).items():
        before = seeded(f"batch_stats/{name}", value.shape)
        assert np.abs(value - before).max() > 1e-3, name  # the statistics have moved


def test_a_pre_activation_model_begins_with_gammas_of_one():
    model = make(1, 1, resnet_version="2")

    @jax.jit
    def gammas():  # without the kernels, which take long to compile
        variables = model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), False)
        return {k: v for k, v in flat(variables["params"]).items() if k.endswith("scale")}

    initial = gammas()
    assert {name.split("/")[-2] for name in initial} == {"bn1", "bn2", "bn3", "bn_final"}
    for gamma in initial.values():
        np.testing.assert_array_equal(gamma, 1)


@pytest.mark.parametrize(("stride", "side"), [(1, 6), (2, 3)])
def test_a_shortcut_with_means_has_no_stride(stride, side):
    """A block begins as its shortcut: 2x2 means, where it has a stride, and a 1x1 convolution."""
    model = make(resnet_depth=18, deep_stem=True)
    norm = functools.partial(nn.BatchNorm, use_running_average=True, epsilon=0.0)
    block = model.block(5, functools.partial(nn.Conv, use_bias=False), norm, stride)
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
    got, variables = jax.jit(lambda x: block.init_with_output(jax.random.key(0), x))(x)
    means = x if stride == 1 else x.reshape(2, 3, 2, 3, 2, 3).mean((2, 4))
    kernel = variables["params"]["conv_proj"]["kernel"]
    assert kernel.shape == (1, 1, 3, 5) and got.shape == (2, side, side, 5)
    np.testing.assert_allclose(got, np.maximum(means @ kernel[0, 0], 0), rtol=1e-5, atol=1e-6)


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
    assert squeezed(channels, ratio) == units
