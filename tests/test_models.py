"""Compares ResNet v1.5 with published parameter counts and NumPy in float64."""

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
from benchmarks.resnet import architecture
from common.layers import space_to_depth


def small(**kwargs: Any) -> models.ResNet:
    defaults = {"stage_sizes": (2, 1, 2, 1), "block": models.BottleneckBlock, "num_classes": 5}
    return models.ResNet(**{**defaults, "num_filters": 4, "dtype": jnp.float32, **kwargs})


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


def numpy_resnet(variables, images, model, padding):
    """Eval-mode logits in float64, from the paper's description."""
    f64 = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables)
    params, stats = f64["params"], f64["batch_stats"]

    def norm(x, p, s):
        return (x - s["mean"]) / np.sqrt(s["var"] + 1e-5) * p["scale"] + p["bias"]

    x = numpy_conv(images.astype(np.float64), params["conv_stem"]["kernel"], 2)
    x = np.maximum(norm(x, params["bn_stem"], stats["bn_stem"]), 0)
    x = numpy_max_pool(x, padding)
    for stage, blocks in enumerate(model.stage_sizes, 1):
        for block in range(1, blocks + 1):
            stride = model.strides[stage - 1] if block == 1 else 1
            p = params[f"stage{stage}_block{block}"]
            s = stats[f"stage{stage}_block{block}"]
            strides = (1, stride, 1) if "conv3" in p else (stride, 1)
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
    ("width", "padding", "kwargs"),
    [
        (46, "SAME", {}),
        (32, "SAME", {"block": models.BasicBlock}),
        (46, PYTORCH_PADDING, {"strides": (2, 1, 1, 2)}),
        (32, "SAME", {"strides": (2, 2, 1, 1), "block": models.BasicBlock}),
    ],
)
def test_logits_match_numpy(width, padding, kwargs):
    model = small(stem=functools.partial(models.stem, padding=padding), **kwargs)
    variables = random_variables(model)
    images = make_images(3, 33, width, 3)
    got = apply(model, variables, images, False)
    want = numpy_resnet(variables, images, model, padding)
    assert np.std(want, axis=0).min() > 1e-2  # else the images would not matter
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("is_gram", [False, True])
def test_max_pool_of_pytorch_in_training(is_gram, folded):
    """A stage whose only block adds nothing returns the stem's output."""
    stem = functools.partial(models.stem, padding=PYTORCH_PADDING)
    model = small(stage_sizes=(1,), block=models.BasicBlock, stem=stem)
    variables = random_variables(model)
    params, images = variables["params"], make_images(2, 22, 32, 3)
    params["stage1_block1"]["bn2"] = {"scale": np.zeros(4), "bias": np.zeros(4)}
    kernel, norm = params["conv_stem"]["kernel"], params["bn_stem"]
    x = numpy_conv(images, kernel, 2)
    x = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5) * norm["scale"] + norm["bias"]
    want = numpy_max_pool(np.maximum(x, 0), PYTORCH_PADDING)

    if is_gram:
        model = architecture.gram(model, PYTORCH_PADDING)
    if folded:
        params["conv_stem"] = {"kernel": space_to_depth.convert_kernel(kernel)}
        model = model.clone(stem=space_to_depth.stem(model.stem))
    settings: Any = {"method": "endpoints", "mutable": ["batch_stats"]}
    endpoints, _ = apply(model, variables, images, True, **settings)
    np.testing.assert_allclose(endpoints["C2"], want, rtol=1e-4, atol=1e-4)
    assert np.abs(want - numpy_max_pool(np.maximum(x, 0), "SAME")).max() > 0.1


# --- BatchNorm.


@pytest.mark.parametrize(
    ("axes", "devices_per_span"), [(None, 1), ("group", 2), (("groups", "group"), 8)]
)
def test_batch_norm_span(axes, devices_per_span):
    mesh = jax.make_mesh((4, 2), ("groups", "group"), axis_types=(AxisType.Auto,) * 2)
    model = small(stage_sizes=(1,), norm=functools.partial(models.BatchNorm, axis_name=axes))
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
    norm = functools.partial(models.BatchNorm, momentum=0.0)
    model = small(stage_sizes=(1,), num_filters=64, norm=norm, dtype=dtype)
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


@pytest.mark.parametrize("is_gram", [False, True])
@pytest.mark.parametrize(("depth", "width"), [(34, 64), (50, 256)])
@pytest.mark.parametrize(
    ("stages", "strides", "sides"),
    [
        (4, (1, 2, 2, 2), [(75, 56), (38, 28), (19, 14), (10, 7)]),
        (3, (1, 2, 1), [(75, 56), (38, 28), (38, 28)]),  # as SSD's backbone
    ],
)
def test_endpoints(stages, strides, sides, depth, width, is_gram):
    sizes, block = models.DEPTHS[depth]
    model = models.ResNet(sizes[:stages], block, strides=strides)
    if is_gram:
        model = architecture.gram(model, "SAME")
    images = jax.ShapeDtypeStruct((2, 300, 222, 3), jnp.float32)
    got, variables = jax.eval_shape(
        lambda x: model.init_with_output(jax.random.key(0), x, True, method="endpoints"), images
    )
    want = {f"C{i + 2}": (2, *side, width * 2**i) for i, side in enumerate(sides)}
    assert {name: leaf.shape for name, leaf in got.items()} == want
    assert {leaf.dtype for leaf in got.values()} == {jnp.dtype(jnp.bfloat16)}
    kernel = variables["params"]["stage3_block1"]["conv_proj"]["kernel"]
    assert kernel.shape == (1, 1, 2 * width, 4 * width)
    assert "head" not in variables["params"]


@pytest.mark.parametrize(
    ("block", "last"), [(models.BottleneckBlock, "bn3"), (models.BasicBlock, "bn2")]
)
def test_blocks_begin_as_their_shortcut(block, last):
    model = small(stage_sizes=(2, 2), block=block)
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
        assert ("stage1_block1/bn_proj" in out) == (last == "bn3")


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
