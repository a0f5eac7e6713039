"""The variants against other libraries, NumPy loops and their own plain forms.

Logits of every architecture against those of timm and Keras for the same weights, stored. `seeded`
draws the weights. `data/variant_logits.json` has what timm 1.0.31 with torch 2.13, and Keras 3.15
("keras"), computed with them for `image`, in float32. BlurPool against NumPy loops, and in whole
models against convolutions of blurred inputs. Stochastic depth: which rows it drops, and what a
model with it computes.
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

from benchmarks.resnet import variants
from tests.benchmarks.resnet.networks import make_network
from tests.common.test_hashing import plain
from tests.helpers import stable_weights
from tests.test_models import apply_and_capture, make_images, random_variables

MODELS = {  # name in timm, or of Keras: (depth, keys of the recipe)
    **{f"resnet{depth}": (depth, {}) for depth in (18, 34, 50, 101, 152)},
    **{f"resnetv2_{depth}": (depth, {"resnet_version": "2"}) for depth in (18, 50)},
    **{f"resnet{depth}d": (depth, {"deep_stem": True}) for depth in (18, 50)},
    **{f"seresnet{depth}": (depth, {"squeeze_excite": 1 / 16}) for depth in (18, 50)},
    "keras": (50, {"resnet_version": "1"}),
}
CLASSES = 7
STORED = json.loads(
    (pathlib.Path(__file__).parents[2] / "data" / "variant_logits.json").read_text()
)


def build(name, classes=CLASSES, **changes):
    depth, keys = MODELS[name]
    keys = {"max_pool": "torch", "num_filters": 64, **keys, **changes}
    return make_network(classes=classes, resnet_depth=depth, **keys)


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
    return stable_weights.weights(name, name.rpartition("/")[2], shape, np.prod(shape[:-1]))


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
    model = make_network(1, 1, **keys)
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
    for batch_norm in ("gram", "plain"):
        loss, variables = training(images, **keys, batch_norm=batch_norm)
        programs.add(jax.jit(loss).lower(variables["params"]).as_text())
    assert len(programs) == 1


@pytest.mark.parametrize("keys", [{"space_to_depth": True}, *VARIANTS], ids=str)
def test_every_variant_has_the_same_endpoints(keys):
    """Between the layers are bfloat16 values, and all variables are float32."""
    model = make_network(1, 1, **keys, precision="bfloat16")
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
    model = make_network(1, 1, resnet_version="2")

    @jax.jit
    def gammas():  # without the kernels, which take long to compile
        variables = model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), False)
        return {k: v for k, v in flat(variables["params"]).items() if k.endswith("scale")}

    initial = gammas()
    assert {name.split("/")[-2] for name in initial} == {"bn1", "bn2", "bn3", "bn_final"}
    for gamma in initial.values():
        np.testing.assert_array_equal(gamma, 1)


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
    assert variants.squeezed_units(channels, ratio) == units


# Blurs.

BLUR = np.outer([1, 2, 1], [1, 2, 1]) / 16


def convolve(x, kernel, stride, padding):
    """float64: [b, h, w, c] with kernel [k, k, c, f], a loop over the pixels of the result."""
    side, _, _, features = kernel.shape
    x = np.pad(x.astype(float), ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    shape = [(n - side) // stride + 1 for n in x.shape[1:3]]
    y = np.zeros((len(x), *shape, features))
    for i in range(shape[0]):
        for j in range(shape[1]):
            rows, columns = (slice(n * stride, n * stride + side) for n in (i, j))
            y[:, i, j] = np.tensordot(x[:, rows, columns], kernel, 3)
    return y


def soften(x):
    """float64: each channel of [b, h, w, c] convolved with `BLUR`, with zeros around."""
    channels = x.shape[-1]
    return convolve(x, BLUR[..., None, None] * np.eye(channels), 1, 1)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 6, 5, 3), (1, 1, 4, 2), (1, 9, 8, 1)])
def test_values_of_a_blur(shape, stride):
    x = make_images(*shape)
    y = jax.jit(variants.blur, static_argnums=1)(x, stride)
    np.testing.assert_allclose(y, soften(x)[:, ::stride, ::stride], rtol=0, atol=1e-6)


def test_the_gradient_of_a_blur_is_the_transposed_filter():
    x, g = jnp.asarray(make_images(2, 5, 6, 3)), make_images(2, 5, 6, 3, seed=1)
    computed = jax.jit(lambda x, g: jax.vjp(variants.blur, x)[1](g)[0])(x, g)
    np.testing.assert_allclose(computed, soften(g), rtol=0, atol=1e-6)


def test_a_blur_in_bfloat16_is_rounded_once():
    x = jnp.asarray(make_images(1, 8, 8, 2), jnp.bfloat16)
    y = variants.blur(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, variants.blur(x.astype(jnp.float32)).astype(jnp.bfloat16))


BLURRED = {
    "1.5": {},
    "basic": {"resnet_depth": 18},
    "D": {"deep_stem": True},
    "1": {"resnet_version": "1"},
}


@pytest.mark.parametrize("kind", BLURRED)
def test_each_convolution_with_a_stride_gets_a_blurred_input(kind):
    """The rule of ffcv-imagenet: a stride, and at least 16 input channels."""
    model = make_network(1, 1, num_filters=16, blur_pool=True, **BLURRED[kind])
    variables = random_variables(model)
    # Odd sizes at the stride, but for the means, whose values at odd edges are another test's.
    images = make_images(2, 32 if kind == "D" else 36, 40, 3)
    _, _, outputs = apply_and_capture(model, variables, images, True)
    kernels = variables["params"]["stage2_block1"]

    def check(conv, x, stride, has_blur):
        kernel = kernels[conv]["kernel"]
        x = soften(np.asarray(x)) if has_blur else np.asarray(x)
        wanted = convolve(x, kernel, stride, kernel.shape[0] // 2)
        np.testing.assert_allclose(outputs[f"stage2_block1/{conv}"], wanted, rtol=0, atol=2e-5)

    x = np.asarray(outputs["stage1_block1"])
    branch = {"basic": "1", "1": "1"}.get(kind, "2")
    inner = {"1": x, "2": np.maximum(outputs["stage2_block1/bn1"], 0)}[branch]
    check(f"conv{branch}", inner, 2, True)
    following = np.maximum(outputs[f"stage2_block1/bn{branch}"], 0)
    check(f"conv{int(branch) + 1}", following, 1, False)
    if kind == "D":  # its shortcut takes means, without a stride
        b, h, w, c = x.shape
        means = x.reshape(b, h // 2, 2, w // 2, 2, c).mean((2, 4))
        check("conv_proj", means, 1, False)
    else:
        check("conv_proj", x, 2, True)
    stem = {"kernel": variables["params"]["conv_stem"]["kernel"]}
    wanted = convolve(images, stem["kernel"], 2, stem["kernel"].shape[0] // 2)
    np.testing.assert_allclose(outputs["conv_stem"], wanted, rtol=0, atol=2e-5)


def test_narrow_convolutions_get_no_blur():
    plain, soft = (make_network(1, 1, num_filters=2, blur_pool=on) for on in (False, True))
    variables = random_variables(plain)
    images = make_images(1, 24, 24, 3)
    programs = [
        jax.jit(m.apply, static_argnums=2).lower(variables, images, False) for m in (plain, soft)
    ]
    assert programs[0].as_text() == programs[1].as_text()


@pytest.mark.parity
def test_a_blur_has_pytorchs_values_and_gradients():
    torch = pytest.importorskip("torch")
    x = make_images(2, 7, 8, 16)
    kernel: Any = make_images(3, 3, 16, 4, seed=1)
    images = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    filters = torch.tensor(BLUR, dtype=torch.float32).repeat(16, 1, 1, 1)
    soft = torch.nn.functional.conv2d(images, filters, padding=1, groups=16)
    weight = torch.tensor(kernel.transpose(3, 2, 0, 1))
    y = torch.nn.functional.conv2d(soft, weight, stride=2, padding=1)
    torch.sin(y).sum().backward()

    def ours(x):
        window = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "precision": "highest"}
        y = jax.lax.conv_general_dilated(
            variants.blur(x), kernel, (2, 2), ((1, 1), (1, 1)), **window
        )
        return jnp.sum(jnp.sin(y)), y

    gradient, result = jax.grad(ours, has_aux=True)(jnp.asarray(x))
    np.testing.assert_allclose(result, y.detach().numpy().transpose(0, 2, 3, 1), atol=2e-5)
    grad = images.grad.numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(gradient, grad, rtol=0, atol=2e-5)


# Stochastic depth.


def drops(seed, rate, block):
    return plain(int(seed), 0x70617468, block) < round(rate * 2**32)


def test_dropped_rows_are_those_of_pythons_integers():
    seeds: Any = np.random.default_rng(0).integers(-(2**31), 2**31, 20_000, dtype=np.int32)
    previous = np.zeros(len(seeds))
    for block, rate in ((1, 0.05), (2, 0.3)):
        factors = jax.jit(variants.branch_factors, static_argnums=(0, 2))(rate, seeds, block)
        assert factors is not None and factors.dtype == jnp.float32
        for seed, factor in zip(seeds[:200], np.asarray(factors[:200]), strict=True):
            assert factor == (0 if drops(seed, rate, block) else np.float32(1 / (1 - rate)))
        dropped = np.asarray(factors) == 0
        assert abs(dropped.mean() - rate) < 5 * (rate * (1 - rate) / len(seeds)) ** 0.5
        if block == 2:
            assert abs(np.corrcoef(dropped, previous)[0, 1]) < 0.04
        previous = dropped


def test_a_branch_in_bfloat16_is_scaled_in_float32():
    y = jnp.asarray(make_images(2, 3, 3, 2), jnp.bfloat16)
    scaled = variants.scale_branch(y, jnp.array([1 / 0.95, 0.0]))
    assert scaled.dtype == jnp.bfloat16
    wanted = jnp.asarray(np.asarray(y, np.float32) * np.float32(1 / 0.95)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(scaled[0], wanted[0])
    assert not scaled[1].any()


DROPPED = {
    "1.5": {},
    "basic": {"resnet_depth": 18},
    "basic 2": {"resnet_version": "2", "resnet_depth": 18},
}
SEEDS: Any = np.arange(6, dtype=np.int32) * 17


@pytest.mark.parametrize("kind", DROPPED)
def test_a_block_is_its_shortcut_for_the_rows_that_are_dropped(kind):
    plain_model = make_network(2, 1, **DROPPED[kind])
    model = variants.compose_stochastic_depth(plain_model, 0.6, SEEDS)
    variables, images = random_variables(model), make_images(6, 24, 24, 3)
    logits, _, outputs = apply_and_capture(model, variables, images, True)
    x = np.asarray(outputs["stage1_block1"])
    dropped = np.array([drops(seed, 0.3, 1) for seed in SEEDS])
    assert 0 < dropped.sum() < len(SEEDS)
    # Block 2 has no projection. Its branch without drop path, from the same input:
    y = np.asarray(outputs["stage1_block2"])
    shortcut = x if "2" in kind else np.maximum(x, 0)
    np.testing.assert_array_equal(y[dropped], shortcut[dropped])
    assert np.isfinite(np.asarray(logits)).all()
    _, _, reference = apply_and_capture(plain_model, variables, images, True)
    if "2" in kind:
        branch = np.asarray(reference["stage1_block2"]) - x  # the input of the block is the same
        wanted = x + branch / 0.7
        np.testing.assert_allclose(y[~dropped], wanted[~dropped], rtol=0, atol=1e-5)
    else:
        last = "bn2" if kind == "basic" else "bn3"
        wanted = np.maximum(x + np.asarray(reference[f"stage1_block2/{last}"]) / 0.7, 0)
        np.testing.assert_allclose(y[~dropped], wanted[~dropped], rtol=0, atol=1e-5)


@pytest.mark.parametrize("blocks", [(2, 3, 1), (1,)])
def test_rates_of_drop_path_grow_in_equal_steps(blocks, monkeypatch):
    """The first block is never dropped, the last one with the given rate."""
    drawn = []
    monkeypatch.setattr(
        variants, "branch_factors", lambda rate, seeds, number: drawn.append((number, rate))
    )
    model = variants.compose_stochastic_depth(make_network(*blocks), 0.15, SEEDS)
    images = jax.ShapeDtypeStruct((6, 16, 16, 3), np.float32)
    monkeypatch.setattr(variants, "scale_branch", lambda y, factors: y)
    jax.eval_shape(lambda x: model.init(jax.random.key(0), x, True), images)
    rates = np.linspace(0, 0.15, sum(blocks)).tolist()
    assert drawn == [(i, pytest.approx(rate)) for i, rate in enumerate(rates) if rate]
