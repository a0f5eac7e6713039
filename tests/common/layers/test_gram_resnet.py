"""Compares models that `architecture.gram` made with plain models, in float64."""

import collections
import functools
import itertools
import operator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import models
from benchmarks.resnet import architecture
from common.layers import batch_norm, convolutions, gram_resnet, space_to_depth
from engine import sharding
from tests.common.layers.test_gram_norm import QUICK, assert_close, jitted
from tests.conftest import make_programs, make_tiny_config, plan_of


def random_leaves(shapes: Any, seed: int = 1, dtype: Any = np.float64) -> Any:
    """Values for a tree of variables; gammas of either sign, running variances positive."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: Any) -> np.ndarray:
        name = path[-1].key
        if name == "var":
            value = rng.uniform(0.5, 1.5, shape.shape)
        elif name == "scale":
            value = rng.uniform(0.5, 1.5, shape.shape) * rng.choice([-1, 1], shape.shape)
        elif name == "kernel":
            value = rng.normal(size=shape.shape) / np.sqrt(np.prod(shape.shape[:-1]))
        else:
            value = rng.normal(scale=0.3, size=shape.shape)
        return value.astype(dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def variables_of(model: models.ResNet, **kwargs: Any) -> Any:
    images = jnp.zeros((1, 32, 32, 3))
    return jax.eval_shape(lambda: model.init(jax.random.key(0), images, False, **kwargs))


def both(
    depth: int, padding: Any = "SAME", folded: bool = False, **kwargs: Any
) -> tuple[models.ResNet, models.ResNet]:
    """(gram, plain) of one small model; `folded`: with a space-to-depth stem."""
    defaults = {"num_classes": 5, "num_filters": 4, "dtype": jnp.float64}
    stages, block = models.DEPTHS[depth]
    stem = functools.partial(models.stem, padding=padding)
    shape = {"stage_sizes": stages, "block": block, "stem": stem}
    plain = models.ResNet(**{**shape, **defaults, **kwargs})
    gram = architecture.gram(plain, padding)
    if folded:
        gram, plain = (m.clone(stem=space_to_depth.stem(m.stem)) for m in (gram, plain))
    return gram, plain


def trained(model: models.ResNet, variables: Any, images: Any, labels: Any) -> Any:
    """(loss, new running statistics, gradients) of a training step's forward and backward."""

    def loss(params: Any) -> Any:
        given = {"params": params, "batch_stats": variables["batch_stats"]}
        logits, new = model.apply(given, images, True, mutable=["batch_stats"])
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, -1)), new

    (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    return value, new, gradients


def assert_trees_close(actual: Any, expected: Any, rtol: float) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    actual, expected = (flatten_dict(tree, sep="/") for tree in (actual, expected))
    assert_close(actual, expected, rtol)


def agree(pair: Any, images: Any, labels: Any, rtol: float = 1e-8) -> Any:
    """Compares loss, gradients and running statistics of two models; returns the gradients."""
    variables = random_leaves(variables_of(pair[1]))
    actual, expected = (
        jitted(functools.partial(trained, model), variables, images, labels) for model in pair
    )
    assert float(actual[0]) == pytest.approx(float(expected[0]), rel=1e-9)
    assert_trees_close(actual[1], expected[1], 1e-9)
    assert_trees_close(actual[2], expected[2], rtol)
    return expected[2]


def compare(depth: int, images: Any, labels: Any, **kwargs: Any) -> Any:
    with jax.enable_x64(True):
        return agree(both(depth, **kwargs), images, labels, 1e-8 if kwargs else 1e-7)


PYTORCH_PADDING = ((1, 1), (1, 1))


@pytest.mark.parametrize(
    ("depth", "sizes", "kwargs"),
    [
        (18, (33, 46), {}),  # strides meet odd sizes
        pytest.param(50, (32, 32), {}, marks=pytest.mark.slow),
        (18, (16, 16), {"stage_sizes": (1,), "folded": True}),
        # A stage with stride 1 has projections.
        (
            *(18, (16, 16)),
            {"stage_sizes": (1, 1, 1), "strides": (2, 1, 2), "padding": PYTORCH_PADDING},
        ),
        (50, (16, 16), {"stage_sizes": (2, 1), "strides": (2, 1), "folded": True}),
    ],
)
def test_models_agree_in_float64(depth, sizes, kwargs):
    rng = np.random.default_rng(3)
    images, labels = rng.normal(size=(4, *sizes, 3)), np.eye(5)[[0, 3, 1, 3]]
    gradients = jax.tree.leaves(compare(depth, images, labels, **kwargs))
    if not kwargs:
        assert len(gradients) == {18: 62, 50: 161}[depth]
        assert min(np.abs(leaf).max() for leaf in gradients) > 1e-4  # so that each is tested


def on_eight_devices(pair: Any) -> Any:
    """Asserts that `trained` of two models agrees, with gradients added over the devices.

    Statistics are those of pairs of devices, whose images differ in size.
    """
    mesh = jax.make_mesh((4, 2), ("groups", "group"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(3)
    images, labels = rng.normal(size=(16, 16, 16, 3)), np.eye(5)[rng.integers(0, 5, 16)]
    images *= np.repeat(np.arange(1, 9), 2)[:, None, None, None]
    variables, shared = random_leaves(variables_of(pair[1])), P(("groups", "group"))

    def of(model):
        def each(*inputs):
            value, new, gradients = trained(model, *inputs)
            found = value, new, jax.lax.psum(gradients, ("groups", "group"))
            return jax.tree.map(lambda leaf: leaf[None], found)

        specs = {"in_specs": (P(), shared, shared), "out_specs": shared, "check_vma": False}
        return jitted(jax.shard_map(each, mesh=mesh, **specs), variables, images, labels)

    actual, expected = (of(model) for model in pair)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-9)
    assert_trees_close(actual[1], expected[1], 1e-9)
    assert_trees_close(actual[2], expected[2], 1e-8)


def trace_for(kind, monkeypatch):
    """The layers take the forms for a kind of device."""
    for module in (convolutions, batch_norm, gram_resnet):
        monkeypatch.setattr(module, "device_kind", lambda: kind)


@pytest.mark.long
def test_a_model_on_eight_devices(monkeypatch):
    """With the layers that TPUs have."""
    trace_for("TPU v3", monkeypatch)
    norm = functools.partial(models.BatchNorm, axis_name="group")
    with jax.enable_x64(True):
        on_eight_devices(both(50, stage_sizes=(1, 1), norm=norm))


def leaves_in_float64(seeds: int, **kwargs: Any) -> Any:
    """[(inputs, the leaves of `trained`)] of plain models with `kwargs` in float64."""
    with jax.enable_x64(True):
        model, found = both(50, num_filters=8, **kwargs)[1], []
        shapes = variables_of(model)
        compute = jax.jit(functools.partial(trained, model), compiler_options=QUICK)
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            images, labels = rng.normal(size=(8, 32, 32, 3)), np.eye(5)[np.arange(8) % 5]
            inputs = (random_leaves(shapes, seed), images, labels)
            found.append((inputs, jax.tree.leaves(jax.tree.map(np.asarray, compute(*inputs)))))
    return found


def assert_rounded_as_the_plain_one(pair: Any, in_float64: Any, dtype: Any) -> None:
    """Against float64: loss and gradients are about as far off as the plain model's."""
    compute = [jax.jit(functools.partial(trained, m), compiler_options=QUICK) for m in pair]
    errors = []
    for inputs, want in in_float64:
        low = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), inputs)
        for step in compute:
            leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(step(*low))]
            pairs = zip(leaves, want, strict=True)
            errors.append([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])
    ours, plain = (np.sqrt(np.mean(np.square(errors[i::2]))) for i in (0, 1))
    assert ours <= 1.5 * plain
    assert plain < {jnp.float32: 1e-4, jnp.bfloat16: 0.3}[dtype]


ROUNDED: Any = {"stage_sizes": (1, 1)}


@pytest.fixture(scope="module")
def in_float64():
    return leaves_in_float64(6, **ROUNDED)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_models_agree_as_far_as_rounding_allows(dtype, in_float64):
    pair = both(50, dtype=dtype, num_filters=8, **ROUNDED)
    assert_rounded_as_the_plain_one(pair, in_float64, dtype)


def assert_same_variables(model: Any, plain: Any) -> None:
    """Names, shapes, order and initial values: a checkpoint of one is one of the other."""
    images = jnp.zeros((2, 16, 16, 3))

    def init():
        each = (plain, False), (model, True), (model, False)
        return [model.init(jax.random.key(3), images, train) for model, train in each]

    expected, *others = jitted(init)
    for actual in others:
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("depth", [18, 50])
def test_variables_are_the_same(depth):
    assert_same_variables(*both(depth, dtype=jnp.bfloat16, stage_sizes=(2, 1)))


def test_evaluation_is_the_plain_program():
    images = jnp.zeros((2, 32, 32, 3))
    pair = both(50, dtype=jnp.bfloat16)
    texts = [
        jax.jit(lambda v, x, m=model: m.apply(v, x, False)).lower(variables_of(model), images)
        for model in pair
    ]
    assert texts[0].as_text() == texts[1].as_text()


def test_what_cpus_train_in_the_plain_form():
    """Everything; outside of a mesh, as in an export, nothing is known of CPUs."""
    images, labels = jnp.zeros((2, 32, 32, 3)), jnp.eye(5)[:2]
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def programs(depth, dtype, maps):
        pair = both(depth, dtype=dtype, stage_sizes=(1, 1))
        steps = [functools.partial(trained, model) for model in pair]
        return [
            jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=P()) if maps else one)
            .lower(variables_of(pair[1]), images, labels)
            .as_text()
            for one in steps
        ]

    are_equal = {
        (depth, dtype, maps): operator.eq(*programs(depth, dtype, maps))
        for depth in (18, 50)
        for dtype in (jnp.float32, jnp.bfloat16)
        for maps in (True, False)
    }
    assert are_equal == {case: case[2] for case in are_equal}


class Stem(nn.Module):
    """A stem with a 3x3 convolution."""

    stem: Any
    padding: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def conv(features: int, size: Any, stride: int, padding: int, **named: Any) -> Any:
            del size, stride, padding
            return nn.Conv(features, (3, 3), use_bias=False, dtype=jnp.float64, **named)

        norm = functools.partial(nn.BatchNorm, False, momentum=0.9, dtype=jnp.float64)
        return self.stem(x, 6, conv, norm, self.padding)


@pytest.mark.parametrize("padding", ["SAME", PYTORCH_PADDING])
@pytest.mark.parametrize("sizes", [(7, 10), (1, 3)])
def test_the_stem_agrees_in_float64(sizes, padding):
    """Values, statistics and gradients; gammas of either sign."""
    rng = np.random.default_rng(5)
    x = rng.normal(0.5, 2, (4, *sizes, 5))
    weights = rng.normal(size=(4, -(-sizes[0] // 2), -(-sizes[1] // 2), 6))

    def outputs(stem):
        model = Stem(stem, padding)
        variables = random_leaves(jax.eval_shape(model.init, jax.random.key(0), x), seed=2)
        scale = variables["params"]["bn_stem"]["scale"]
        assert (scale < 0).any() and (scale > 0).any()

        def loss(params, x):
            given = {"params": params, "batch_stats": variables["batch_stats"]}
            y, new = model.apply(given, x, mutable=["batch_stats"])
            return jnp.sum(y * weights), (y, new)

        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        return jitted(grad, variables["params"], x)

    with jax.enable_x64(True):
        actual, expected = outputs(gram_resnet.stem), outputs(models.stem)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
        jax.tree.map(close, actual, expected)


def test_convolution_outputs_are_not_saved():
    """The backward pass reads no output of a widening convolution."""
    images = np.random.default_rng(3).normal(size=(2, 64, 64, 3)).astype(np.float32)
    saved = []
    for model in both(50, dtype=jnp.float32, num_filters=8, stage_sizes=(2, 1)):
        shapes = variables_of(model)
        variables = random_leaves(shapes, dtype=np.float32)

        def forward(params, model=model, state=variables["batch_stats"]):
            variables = {"params": params, "batch_stats": state}
            return model.apply(variables, images, True, mutable=["batch_stats"])

        pullback = jitted(lambda *p, forward=forward: jax.vjp(forward, *p)[1], variables["params"])
        leaves = map(np.asarray, jax.tree.leaves(pullback))
        arrays = {(leaf.shape, leaf.tobytes()) for leaf in leaves if leaf.dtype == np.float32}
        counts = collections.Counter(shape for shape, _ in arrays)
        saved.append([counts[2, 16, 16, 32], counts[2, 8, 8, 64]])
    assert saved[0] == [2, 1]  # the outputs of the ReLUs
    assert min(a - b for a, b in zip(saved[1], saved[0], strict=True)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("span", [1, 0])
def test_a_short_run_ends_where_the_plain_one_does(tiny_records, tmp_path, span, monkeypatch):
    """The digits' recipe, 60 steps on 8 devices: losses of single steps, and both ends."""
    trace_for("TPU v4", monkeypatch)

    def losses(batch_norm):
        changes = {"batch_norm": batch_norm, "bn_span": span, "train_steps": "60"}
        sizes = {"resnet_depth": 50, "image_size": 32, "train_batch_size": 32}
        config = make_tiny_config(tiny_records, **changes, **sizes).lock()
        plan = make_programs(config, str(tmp_path))
        planned = plan_of(config, plan.benchmark.open("train"))
        abstract = plan.abstract_state(planned)
        spec = plan.abstract_totals(planned, abstract)
        ((_, lowered),) = plan.lower_train(planned, abstract, spec)
        step = lowered.compile(QUICK)
        state, totals = plan.initial_state(planned), plan.zeros(spec)()
        batches, seed = plan.benchmark.train_batches(32, 0, 1, 0), plan.seed()
        values = []
        for batch in itertools.islice(sharding.Feed(batches, plan.mesh), planned.total_steps):
            state, totals, loss = step(seed, state, totals, batch)
            values.append(float(loss))
        return np.array(values)

    ours, plain = losses("gram"), losses("plain")
    np.testing.assert_allclose(ours[:5], plain[:5], rtol=1e-3)
    ends = ours[-10:].mean(), plain[-10:].mean()
    assert ends[1] < 0.8 * plain[:3].mean()
    assert ends[0] == pytest.approx(ends[1], rel=0.1)
