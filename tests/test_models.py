"""Compares the ResNet family with published parameter counts and NumPy in float64."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import models
from ops.layers import space_to_depth


def small(**kwargs: Any) -> models.ResNet:
    defaults = {"stage_sizes": (2, 1, 2, 1), "num_classes": 5, "num_filters": 4}
    return models.ResNet(**{**defaults, "dtype": jnp.float32, **kwargs})


def make_images(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_variables(model: models.ResNet, seed: int = 1) -> dict[str, Any]:
    """Draws every leaf; running variances and gammas stay away from 0."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), False))

    def draw(path, leaf):
        name = path[-1].key
        if name in ("var", "scale"):
            value = rng.uniform(0.5, 1.5, leaf.shape)
        elif name == "kernel":
            value = rng.normal(size=leaf.shape) / np.sqrt(np.prod(leaf.shape[:-1]))
        else:
            value = rng.normal(scale=0.3, size=leaf.shape)
        return value.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def apply(model: models.ResNet, variables: Any, images: Any, train: bool, **kwargs: Any) -> Any:
    return jax.jit(lambda v, x: model.apply(v, x, train, **kwargs))(variables, images)


def apply_and_capture(model: models.ResNet, variables: Any, images: Any, train: bool) -> Any:
    """Returns logits, batch_stats and every module's output as {"stage1_block1/bn1": output}."""
    logits, state = apply(model, variables, images, train, mutable=True, capture_intermediates=True)
    outputs: Any = flatten_dict(state["intermediates"], sep="/")
    outputs = {name.removesuffix("/__call__"): calls[0] for name, calls in outputs.items()}
    return logits, state["batch_stats"], outputs


# The sizes in torchvision's documentation. It has no ResNet-200, which is 152 with 16 more blocks
# in stage 2, of 512 -> 128 -> 128 -> 512 channels.
STAGE2_BLOCK = 512 * 128 + 9 * 128 * 128 + 128 * 512 + 2 * (128 + 128 + 512)
PUBLISHED = {
    **{18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808},
    200: 60_192_808 + 16 * STAGE2_BLOCK,
}


@pytest.mark.parametrize("depth", PUBLISHED)
def test_parameter_count_is_the_published_one(depth):
    model = models.resnet(depth)
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, True), images)["params"]
    leaves = jax.tree.leaves(params)
    assert sum(leaf.size for leaf in leaves) == PUBLISHED[depth]
    if depth == 50:
        assert len(leaves) == 161


def test_unknown_depth_names_the_known_ones():
    with pytest.raises(ValueError, match=r"^no ResNet of depth 51; .* 18, 34, 50, 101, 152, 200$"):
        models.resnet(51)


def test_names_are_stable():
    variables = random_variables(small(stage_sizes=(1, 2)))
    names = set(flatten_dict(variables["params"], sep="/"))
    suffixes = {
        "": ("_stem",),
        "stage1_block1/": ("1", "2", "3", "_proj"),
        "stage2_block1/": ("1", "2", "3", "_proj"),
        "stage2_block2/": ("1", "2", "3"),
    }
    layers = [(block, suffix) for block in suffixes for suffix in suffixes[block]]
    want = {
        f"{block}{leaf}"
        for block, suffix in layers
        for leaf in (f"conv{suffix}/kernel", f"bn{suffix}/scale", f"bn{suffix}/bias")
    }
    assert names == want | {"head/kernel", "head/bias"}


# --- The forward pass against NumPy.

PYTORCH_PADDING = ((1, 1), (1, 1))


def numpy_conv(x, kernel, stride):
    """Cross-correlation, zero-padded by (k - 1) / 2 on each side."""
    k = kernel.shape[0]
    p = (k - 1) // 2
    x = np.pad(x, ((0, 0), (p, p), (p, p), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(1, 2))
    return np.einsum("bhwcij,ijcf->bhwf", windows[:, ::stride, ::stride], kernel)


def same_padding(n):
    """TensorFlow's SAME for 3x3, stride 2: ceil(n / 2) windows, the odd cell goes to the end."""
    total = max((-(-n // 2) - 1) * 2 + 3 - n, 0)
    return total // 2, total - total // 2


def numpy_max_pool(x, padding):
    """3x3, stride 2; the padding never is the maximum."""
    sizes = x.shape[1:3]
    pads = [same_padding(n) for n in sizes] if padding == "SAME" else padding
    x = np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))
    return windows[:, ::2, ::2].max(axis=(-1, -2))


def numpy_resnet(variables, images, model):
    """Eval-mode logits in float64, from the paper's description."""
    stage_sizes, bottleneck = model.stage_sizes, model.bottleneck
    f64 = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables)
    params, stats = f64["params"], f64["batch_stats"]

    def norm(x, p, s):
        return (x - s["mean"]) / np.sqrt(s["var"] + 1e-5) * p["scale"] + p["bias"]

    x = numpy_conv(images.astype(np.float64), params["conv_stem"]["kernel"], 2)
    x = np.maximum(norm(x, params["bn_stem"], stats["bn_stem"]), 0)
    x = numpy_max_pool(x, model.max_pool_padding)
    for stage, blocks in enumerate(stage_sizes, 1):
        for block in range(1, blocks + 1):
            stride = model.strides[stage - 1] if block == 1 else 1
            p = params[f"stage{stage}_block{block}"]
            s = stats[f"stage{stage}_block{block}"]
            strides = (1, stride, 1) if bottleneck else (stride, 1)
            y = x
            for i, conv_stride in enumerate(strides, 1):
                y = numpy_conv(y, p[f"conv{i}"]["kernel"], conv_stride)
                y = norm(y, p[f"bn{i}"], s[f"bn{i}"])
                y = np.maximum(y, 0) if i < len(strides) else y
            if "conv_proj" in p:
                x = numpy_conv(x, p["conv_proj"]["kernel"], stride)
                x = norm(x, p["bn_proj"], s["bn_proj"])
            x = np.maximum(x + y, 0)
    return x.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize(
    ("height", "width", "kwargs"),
    [
        (32, 32, {}),
        (33, 46, {}),
        (32, 32, {"bottleneck": False}),
        (32, 46, {"strides": (2, 1, 1, 2), "max_pool_padding": PYTORCH_PADDING}),
        (32, 32, {"strides": (2, 2, 1, 1), "bottleneck": False}),
    ],
)
def test_logits_match_numpy(height, width, kwargs):
    model = small(**kwargs)
    variables = random_variables(model)
    images = make_images(3, height, width, 3)
    got = apply(model, variables, images, False)
    want = numpy_resnet(variables, images, model)
    assert np.std(want, axis=0).min() > 1e-2  # else the images would not matter
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def pytorch_max_pool(x):
    """`torch.nn.MaxPool2d(3, stride=2, padding=1)` as documented, for x [b, h, w, c]."""
    b, h, w, c = x.shape
    y = np.empty((b, (h + 2 - 3) // 2 + 1, (w + 2 - 3) // 2 + 1, c))
    for i, j in np.ndindex(y.shape[1:3]):
        rows, columns = (slice(max(2 * k - 1, 0), 2 * k + 2) for k in (i, j))
        y[:, i, j] = x[:, rows, columns].max((1, 2))
    return y


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("batch_norm", models.BATCH_NORMS)
def test_max_pool_of_pytorch_in_training(batch_norm, folded):
    """A stage whose only block adds nothing returns the stem's output."""
    kwargs = {"stage_sizes": (1,), "bottleneck": False}
    variables = random_variables(small(**kwargs))
    params, images = variables["params"], make_images(2, 22, 32, 3)
    params["stage1_block1"]["bn2"] = {"scale": np.zeros(4), "bias": np.zeros(4)}
    kernel, norm = params["conv_stem"]["kernel"], params["bn_stem"]
    x = numpy_conv(images, kernel, 2)
    x = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5) * norm["scale"] + norm["bias"]
    want = pytorch_max_pool(np.maximum(x, 0))

    if folded:
        params["conv_stem"] = {"kernel": space_to_depth.convert_kernel(kernel)}
    kwargs |= {"batch_norm": batch_norm, "space_to_depth": folded}
    model = small(max_pool_padding=PYTORCH_PADDING, **kwargs)
    settings: Any = {"method": "endpoints", "mutable": ["batch_stats"]}
    endpoints, _ = apply(model, variables, images, True, **settings)
    np.testing.assert_allclose(endpoints["C2"], want, rtol=1e-4, atol=1e-4)
    assert np.abs(want - numpy_max_pool(np.maximum(x, 0), "SAME")).max() > 0.1


# --- Variants: which attributes go together, and which layers they choose.


def shapes_of(model: models.ResNet, channels: int = 3, train: bool = False) -> Any:
    """(outputs, variables) of the endpoints, as shapes."""
    side = 32 if channels == 3 else 16
    images = jax.ShapeDtypeStruct((2, side, side, channels), jnp.float32)
    return jax.eval_shape(
        lambda x: model.init_with_output(jax.random.key(0), x, train, method="endpoints"), images
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_norm": "bn"}, "batch_norm='bn': use 'gram' or 'plain'"),
        ({"version": "3"}, "version='3': use '1.5', '1' or '2'"),
        ({"normalization": "layer"}, "normalization='layer': use 'batch' or 'group'"),
        *(
            (
                {"version": "2", **part},
                "version='2' has neither a deep stem nor squeeze and excitation, and has a "
                "max-pool",
            )
            for part in ({"deep_stem": True}, {"squeeze_excite": 0.5}, {"max_pool_padding": None})
        ),
        (
            {"normalization": "group", "space_to_depth": True},
            "normalization='group' has no standardized kernel for space_to_depth",
        ),
        (
            {"deep_stem": True, "space_to_depth": True},
            "a deep stem has no kernel for space_to_depth",
        ),
        *(
            (
                {"batch_norm": "gram", **part},
                "batch_norm='gram' has no form with blur_pool or drop_path: use 'plain'",
            )
            for part in ({"blur_pool": True}, {"drop_path": 0.1})
        ),
    ],
)
def test_attributes_that_do_not_go_together(kwargs, message):
    with pytest.raises(ValueError) as caught:
        shapes_of(small(stage_sizes=(1, 1), **kwargs))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "kwargs",
    [
        *({"version": "2"}, {"deep_stem": True}, {"squeeze_excite": 0.5}, {"blur_pool": True}),
        *({"max_pool_padding": None}, {"drop_path": 0.1}, {"space_to_depth": True}),
        *({"batch_norm": "gram"}, {"batch_norm": "gram", "version": "2"}),
        {"normalization": "group", "num_filters": 64, "deep_stem": True},
    ],
    ids=str,
)
def test_every_variant_has_the_same_endpoints(kwargs):
    model = small(stage_sizes=(1, 1), **kwargs)
    outputs, variables = shapes_of(model, train=True)
    width, params = 4 * model.num_filters, variables["params"]
    want = {"C2": (2, 8, 8, width), "C3": (2, 4, 4, 2 * width)}
    assert {name: leaf.shape for name, leaf in outputs.items()} == want
    has = {name: name in params for name in ("bn_final", "bn_stem", "gn_stem")}
    is_v2, is_group = model.version == "2", model.normalization == "group"
    assert has["bn_final"] == is_v2
    assert has["gn_stem"] == is_group or model.deep_stem
    assert ("batch_stats" in variables) == (not is_group)


PLAIN, GRAM = (
    {bottleneck: models.LAYERS[name, bottleneck] for bottleneck in (False, True)}
    for name in ("plain", "gram")
)


@pytest.mark.parametrize("bottleneck", [False, True])
def test_gram_is_for_training_without_variants(bottleneck):
    def layers(train=True, **kwargs):
        return small(bottleneck=bottleneck, **{"batch_norm": "gram", **kwargs})._layers(train)

    assert layers() == GRAM[bottleneck]
    assert layers(train=False) == layers(batch_norm="plain") == PLAIN[bottleneck]
    assert layers(version="2") == models.LAYERS["v2", bottleneck]
    stem, block = PLAIN[bottleneck]
    parts = {"stride_in": False, "mean_shortcut": False, "squeeze_excite": 0.0}
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"version": "1"}, {"stride_in": True}),
        ({"squeeze_excite": 0.5}, {"squeeze_excite": 0.5}),
        ({"normalization": "group"}, {}),
        ({"max_pool_padding": None}, {}),
    ]
    for kwargs, changes in variants:
        chosen: Any = layers(**kwargs)
        assert (chosen[0], chosen[1].func) == (stem, block)
        assert chosen[1].keywords == {**parts, **changes}
    chosen = layers(deep_stem=True)
    assert (chosen[0].func, chosen[0].keywords) == (models.variants.deep_stem, {"features": 4})
    assert chosen[1].keywords == {**parts, "mean_shortcut": True}


@pytest.mark.parametrize(
    ("kwargs", "train", "takes"),
    [
        *(({}, True, True), ({}, False, True), ({"batch_norm": "gram"}, False, True)),
        ({"batch_norm": "gram"}, True, False),
        *(({"deep_stem": True}, train, False) for train in (True, False)),
        *(({"normalization": "group", "num_filters": 32}, train, False) for train in (True, False)),
    ],
    ids=str,
)
def test_images_in_blocks_need_a_plain_stem(kwargs, train, takes):
    model = small(stage_sizes=(1,), **kwargs)
    if takes:
        outputs, variables = shapes_of(model, 12, train)
        assert outputs["C2"].shape == (2, 8, 8, 16)
        assert variables["params"]["conv_stem"]["kernel"].shape == (7, 7, 3, 4)
    else:
        with pytest.raises(ValueError, match="^images in blocks need a plain stem, or space_to_"):
            shapes_of(model, 12, train)


@pytest.mark.parametrize("channels", [3, 12])
def test_a_stem_for_blocks_takes_both_forms(channels):
    model = small(stage_sizes=(1,), space_to_depth=True)
    outputs, variables = shapes_of(model, channels)
    assert outputs["C2"].shape == (2, 8, 8, 16)
    assert variables["params"]["conv_stem"]["kernel"].shape == (4, 4, 12, 4)


@pytest.mark.parametrize(("stride", "side"), [(1, 6), (2, 3)])
def test_a_shortcut_with_means_has_no_stride(stride, side):
    """A block begins as its shortcut: 2x2 means, where it has a stride, and a 1x1 convolution."""
    block = models.BasicBlock(
        5,
        functools.partial(nn.Conv, use_bias=False),
        functools.partial(nn.BatchNorm, use_running_average=True, epsilon=0.0),
        stride=stride,
        mean_shortcut=True,
    )
    x = make_images(2, 6, 6, 3)
    got, variables = jax.jit(lambda x: block.init_with_output(jax.random.key(0), x))(x)
    means = x if stride == 1 else x.reshape(2, 3, 2, 3, 2, 3).mean((2, 4))
    kernel = variables["params"]["conv_proj"]["kernel"]
    assert kernel.shape == (1, 1, 3, 5) and got.shape == (2, side, side, 5)
    np.testing.assert_allclose(got, np.maximum(means @ kernel[0, 0], 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("version", "first", "second"), [("1", 2, 1), ("1.5", 1, 2)])
def test_version_1_strides_in_the_first_convolution(version, first, second):
    strides = {}

    def conv(features, kernel_size, stride=1, *, padding="SAME", name):
        strides[name] = (kernel_size, stride)
        return nn.Conv(features, kernel_size, stride, padding, use_bias=False, name=name)

    norm = functools.partial(nn.BatchNorm, use_running_average=True)
    block = models.BottleneckBlock(4, conv, norm, stride=2, stride_in=version == "1")
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
    jax.eval_shape(lambda x: block.init(jax.random.key(0), x), images)
    assert strides == {
        "conv1": ((1, 1), first),
        "conv2": ((3, 3), second),
        "conv3": ((1, 1), 1),
        "conv_proj": ((1, 1), 2),
    }


# --- BatchNorm.


@pytest.mark.parametrize(
    ("bn_axes", "devices_per_span"), [((), 1), (("group",), 2), (("groups", "group"), 8)]
)
def test_batch_norm_span(bn_axes, devices_per_span):
    mesh = jax.make_mesh((4, 2), ("groups", "group"), axis_types=(AxisType.Auto,) * 2)
    model = small(stage_sizes=(1,), bn_axes=bn_axes)
    variables = random_variables(model)
    # Another offset and scale for each device, so that spans differ.
    device = np.repeat(np.arange(8, dtype=np.float32), 2)[:, None, None, None]
    images = make_images(16, 16, 16, 3) * (device + 1) + device

    def forward(variables, images):
        _, stats, outputs = apply_and_capture(model, variables, images, True)
        return jax.tree.map(lambda leaf: leaf[None], stats), outputs

    spec = P(("groups", "group"))
    sharded = jax.shard_map(
        forward, mesh=mesh, in_specs=(P(), spec), out_specs=(spec, spec), check_vma=False
    )
    stats, outputs = jax.jit(sharded)(variables, images)

    names = [name for name in outputs if name.split("/")[-1].startswith("bn")]
    assert len(names) == 5
    for name in names:
        x = np.asarray(outputs[name.replace("bn", "conv")], np.float64)
        spans = x.reshape(8 // devices_per_span, -1, x.shape[-1])
        mean, var = spans.mean(1), spans.var(1)
        old, new, p = variables["batch_stats"], stats, variables["params"]
        for key in name.split("/"):
            old, new, p = old[key], new[key], p[key]

        y = (spans - mean[:, None]) / np.sqrt(var[:, None] + 1e-5) * p["scale"] + p["bias"]
        np.testing.assert_allclose(outputs[name], y.reshape(x.shape), rtol=1e-4, atol=1e-4)
        for stat, value in (("mean", mean), ("var", var)):
            want = 0.9 * old[stat] + 0.1 * np.repeat(value, devices_per_span, axis=0)
            np.testing.assert_allclose(new[stat], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_variance_of_nearly_constant_input_is_not_negative(dtype):
    # The stem's output is a constant per channel, far from 0, plus a little noise.
    model = small(stage_sizes=(1,), num_filters=64, bn_momentum=0.0, dtype=dtype)
    variables = random_variables(model)
    kernel = np.zeros((7, 7, 3, 64), np.float32)
    kernel[3, 3, 0] = np.random.default_rng(2).uniform(300, 3000, 64)
    variables["params"]["conv_stem"]["kernel"] = kernel
    images = 1 + 1e-5 * make_images(5, 22, 22, 3)  # no power of two: the sums must round

    logits, stats, outputs = apply_and_capture(model, variables, images, True)
    x = np.asarray(outputs["conv_stem"], np.float32).reshape(-1, 64)
    unclipped = jnp.mean(x * x, 0) - jnp.mean(x, 0) ** 2
    assert unclipped.min() < -1e-5  # else this input would test nothing
    for path, leaf in jax.tree_util.tree_leaves_with_path(stats):
        assert leaf.dtype == jnp.float32
        assert np.isfinite(leaf).all()
        if path[-1].key == "var":
            assert leaf.min() >= 0
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(stats["bn_stem"]["mean"], x.mean(0, dtype=np.float64), rtol=1e-5)


# --- Endpoints, initialisation, dtypes.


@pytest.mark.parametrize(("depth", "expansion"), [(34, 1), (50, 4)])
def test_endpoints(depth, expansion):
    model = models.resnet(depth)
    images = jax.ShapeDtypeStruct((2, 300, 224, 3), jnp.float32)
    got, variables = jax.eval_shape(
        lambda x: model.init_with_output(jax.random.key(0), x, False, method="endpoints"), images
    )
    want = {
        "C2": (2, 75, 56, 64 * expansion),
        "C3": (2, 38, 28, 128 * expansion),
        "C4": (2, 19, 14, 256 * expansion),
        "C5": (2, 10, 7, 512 * expansion),
    }
    assert {name: leaf.shape for name, leaf in got.items()} == want
    assert {leaf.dtype for leaf in got.values()} == {jnp.dtype(jnp.bfloat16)}
    assert "head" not in variables["params"]


@pytest.mark.parametrize("batch_norm", models.BATCH_NORMS)
@pytest.mark.parametrize(("depth", "expansion"), [(34, 1), (50, 4)])
def test_endpoints_with_other_strides(depth, expansion, batch_norm):
    """SSD's backbone: three stages, the last one with stride 1."""
    kwargs = {"stage_sizes": (3, 4, 6), "strides": (1, 2, 1), "batch_norm": batch_norm}
    model = models.resnet(depth, **kwargs)
    images = jax.ShapeDtypeStruct((2, 300, 222, 3), jnp.float32)
    got, variables = jax.eval_shape(
        lambda x: model.init_with_output(jax.random.key(0), x, True, method="endpoints"), images
    )
    want = {
        "C2": (2, 75, 56, 64 * expansion),
        "C3": (2, 38, 28, 128 * expansion),
        "C4": (2, 38, 28, 256 * expansion),
    }
    assert {name: leaf.shape for name, leaf in got.items()} == want
    kernel = variables["params"]["stage3_block1"]["conv_proj"]["kernel"]
    assert kernel.shape == (1, 1, 128 * expansion, 256 * expansion)


def test_too_few_strides_are_refused():
    model = small(strides=(1, 2, 2))
    with pytest.raises(ValueError, match=r"^strides=\(1, 2, 2\): 4 stages need as many"):
        model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), False)


@pytest.mark.parametrize(("bottleneck", "last"), [(True, "bn3"), (False, "bn2")])
def test_blocks_begin_as_their_shortcut(bottleneck, last):
    model = small(stage_sizes=(2, 2), bottleneck=bottleneck)
    images = make_images(4, 16, 16, 3)

    # Drawing initial kernels takes XLA long to compile, and any kernels will do.
    @jax.jit
    def init():
        variables = flatten_dict(model.init(jax.random.key(0), images, False), sep="/")
        return {name: leaf for name, leaf in variables.items() if not name.endswith("kernel")}

    initial = init()
    gammas = {name: leaf for name, leaf in initial.items() if name.endswith("scale")}
    assert sum(f"/{last}/" in name for name in gammas) == 4
    for name, gamma in gammas.items():
        np.testing.assert_array_equal(gamma, 0.0 if f"/{last}/" in name else 1.0)
    drawn = flatten_dict(random_variables(model), sep="/")
    variables = unflatten_dict({**drawn, **initial}, sep="/")

    for train in (False, True):
        _, _, out = apply_and_capture(model, variables, images, train)
        # The first block of basic ones has no projection; max-pool and ReLU commute.
        pooled = nn.max_pool(out["bn_stem"], (3, 3), strides=(2, 2), padding="SAME")
        for stage in ("stage1", "stage2"):
            shortcut = out.get(f"{stage}_block1/bn_proj", pooled)
            assert np.std(shortcut) > 0.1
            np.testing.assert_array_equal(out[f"{stage}_block1"], np.maximum(shortcut, 0))
            np.testing.assert_array_equal(out[f"{stage}_block2"], out[f"{stage}_block1"])
        assert ("stage1_block1/bn_proj" in out) == bottleneck


def test_initial_statistics():
    model = small(stage_sizes=(1, 1), num_filters=64, num_classes=100)
    init = jax.jit(lambda key: model.init(key, jnp.zeros((1, 16, 16, 3)), False))
    params = init(jax.random.key(0))["params"]
    convs = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        values = np.asarray(leaf, np.float64)
        if path[-1].key == "kernel" and path[0].key != "head":
            convs += 1
            std = np.sqrt(1 / np.prod(values.shape[:3]))
            assert np.std(values) == pytest.approx(std, rel=0.05)
            assert abs(np.mean(values)) < 0.1 * std
            # Cut at two standard deviations of the untruncated normal, which are 2.274 of these.
            assert 2.1 * std < np.abs(values).max() < 2.28 * std
        elif path[-1].key == "bias":
            np.testing.assert_array_equal(values, 0)
    assert convs == 9
    head = np.asarray(params["head"]["kernel"], np.float64)
    assert head.shape == (512, 100)
    assert np.std(head) == pytest.approx(0.01, rel=0.02)
    assert np.abs(head).max() > 0.035  # not truncated


def test_bfloat16_compute_keeps_float32_at_both_ends():
    model = small(stage_sizes=(1, 1), dtype=jnp.bfloat16)
    assert models.resnet(50).dtype == jnp.bfloat16
    variables = random_variables(model)
    images = make_images(2, 24, 24, 3)
    features = apply(model, variables, images, False, method="endpoints")["C3"]
    logits, state = apply(model, variables, images, True, mutable=["batch_stats"])
    assert features.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images, True))
    leaves = jax.tree.leaves((shapes, state))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}

    # Nothing after the bfloat16 features is rounded to bfloat16.
    pooled = np.asarray(features, np.float64).mean((1, 2))
    head = variables["params"]["head"]
    want = pooled @ head["kernel"].astype(np.float64) + head["bias"]
    got = apply(model, variables, images, False)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    # CPUs multiply float32 exactly anyway, accelerators only when the program asks for it.
    lowered = jax.jit(lambda v, x: model.apply(v, x, False)).lower(variables, images).as_text()
    assert [line.count("HIGHEST") for line in lowered.splitlines() if "dot_general" in line] == [2]
