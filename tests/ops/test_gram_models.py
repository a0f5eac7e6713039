"""Whole models and modules with `batch_norm="gram"` against the plain ones, in float64."""

import collections
import functools
import itertools
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
from engine import mesh as meshes
from engine import step as steps
from ops.layers import gram_layers
from tests.conftest import make_programs, make_recipe, make_tiny_config
from tests.ops.test_gram_norm import EPSILON, QUICK, assert_close, jitted


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


def both(depth: int, **kwargs: Any) -> tuple[models.ResNet, models.ResNet]:
    """The two formulations of one small model."""
    defaults = {"num_classes": 5, "num_filters": 4, "dtype": jnp.float64}
    stages, bottleneck = models.DEPTHS[depth]
    shape = {"stage_sizes": stages, "bottleneck": bottleneck}
    make = functools.partial(models.ResNet, **{**shape, **defaults, **kwargs})
    return make(batch_norm="gram"), make(batch_norm="plain")


def trained(model: models.ResNet, variables: Any, images: Any, labels: Any) -> Any:
    """(loss, new running statistics, gradients) of a training step's forward and backward."""

    def loss(params: Any) -> Any:
        state = {"batch_stats": variables["batch_stats"]}
        logits, new = model.apply(
            {"params": params, **state}, images, True, mutable=["batch_stats"]
        )
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, -1)), new

    (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    return value, new, gradients


def assert_trees_close(found: Any, wanted: Any, rtol: float) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    found, wanted = (flatten_dict(tree, sep="/") for tree in (found, wanted))
    assert_close(found, wanted, rtol)


@pytest.mark.parametrize(
    ("depth", "sizes"),
    [(18, (33, 46)), pytest.param(50, (32, 32), marks=pytest.mark.slow)],
)
def test_whole_models_agree_in_float64(depth, sizes):
    """Loss, every gradient and all running statistics; 33 x 46: strides meet odd sizes."""
    rng = np.random.default_rng(3)
    images, labels = rng.normal(size=(4, *sizes, 3)), np.eye(5)[[0, 3, 1, 3]]
    with jax.enable_x64(True):
        models_ = both(depth)
        variables = random_leaves(variables_of(models_[1]))
        found, wanted = (
            jitted(functools.partial(trained, model), variables, images, labels)
            for model in models_
        )
        assert len(jax.tree.leaves(wanted[2])) == {18: 62, 50: 161}[depth]
        assert float(found[0]) == pytest.approx(float(wanted[0]), rel=1e-9)
        assert_trees_close(found[1], wanted[1], 1e-9)
        assert_trees_close(found[2], wanted[2], 1e-7)
        smallest = min(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted[2]))
        assert smallest > 1e-4  # each gradient was put to the test


def test_the_space_to_depth_stem():
    rng = np.random.default_rng(3)
    images, labels = rng.normal(size=(4, 16, 16, 3)), np.eye(5)[[0, 3, 1, 3]]
    with jax.enable_x64(True):
        models_ = both(18, stage_sizes=(1,), space_to_depth=True)
        variables = random_leaves(variables_of(models_[1]))
        assert variables["params"]["conv_stem"]["kernel"].shape == (4, 4, 12, 4)
        found, wanted = (
            jitted(functools.partial(trained, model), variables, images, labels)
            for model in models_
        )
        assert_trees_close(found[1], wanted[1], 1e-9)
        assert_trees_close(found[2], wanted[2], 1e-8)


@pytest.mark.parametrize("span", [1, 2, 8])
def test_a_model_on_eight_devices(span):
    """Gradients added over the devices, as the train step does."""
    mesh = jax.make_mesh((8 // span, span), ("groups", "group"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(3)
    axes = () if span == 1 else ("group",)
    images, labels = rng.normal(size=(16, 16, 16, 3)), np.eye(5)[rng.integers(0, 5, 16)]
    images *= np.repeat(np.arange(1, 9), 2)[:, None, None, None]

    def each(model, *inputs):
        value, new, gradients = trained(model, *inputs)
        return value, new, jax.lax.psum(gradients, ("groups", "group"))

    def on_devices(model):
        shared = P(("groups", "group"))
        mapped = jax.shard_map(
            lambda *inputs: jax.tree.map(lambda leaf: leaf[None], each(model, *inputs)),
            mesh=mesh,
            in_specs=(P(), shared, shared),
            out_specs=shared,
            check_vma=False,
        )
        return jitted(mapped, variables, images, labels)

    with jax.enable_x64(True):
        pair = both(50, stage_sizes=(1, 1), bn_axes=axes)
        variables = random_leaves(variables_of(pair[1]))
        found, wanted = (on_devices(model) for model in pair)
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-9)
        assert_trees_close(found[1], wanted[1], 1e-9)
        assert_trees_close(found[2], wanted[2], 1e-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_models_agree_as_far_as_rounding_allows(dtype):
    """Against float64: loss and gradients are about as far off as the plain model's."""
    settings = {"stage_sizes": (1, 1), "num_filters": 8}
    with jax.enable_x64(True):
        exact = both(50, **settings)[1]
        shapes = variables_of(exact)
    compute = [
        jax.jit(functools.partial(trained, model), compiler_options=QUICK)
        for model in (*both(50, dtype=dtype, **settings), exact)
    ]
    errors = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        images, labels = rng.normal(size=(8, 32, 32, 3)), np.eye(5)[np.arange(8) % 5]
        inputs = (random_leaves(shapes, seed), images, labels)
        with jax.enable_x64(True):
            want = jax.tree.leaves(jax.tree.map(np.asarray, compute[2](*inputs)))
        low = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), inputs)
        for step in compute[:2]:
            found = [np.asarray(leaf, float) for leaf in jax.tree.leaves(step(*low))]
            pairs = zip(found, want, strict=True)
            errors.append([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])
    ours, plain = (np.sqrt(np.mean(np.square(errors[i::2]))) for i in (0, 1))
    assert ours <= 1.5 * plain
    assert plain < {jnp.float32: 1e-4, jnp.bfloat16: 0.3}[dtype]


@pytest.mark.parametrize("depth", [18, 50])
def test_variables_are_the_same(depth):
    """Names, shapes, order and initial values: a checkpoint of one is one of the other."""
    images = jnp.zeros((2, 16, 16, 3))
    pair = both(depth, dtype=jnp.bfloat16, stage_sizes=(2, 1))

    def init(model, train):
        return jitted(lambda: model.init(jax.random.key(3), images, train))

    wanted = init(pair[1], False)
    for found in (init(pair[0], True), init(pair[0], False)):
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}


def test_parameter_count_is_the_published_one():
    model = models.resnet(50, batch_norm="gram")
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, True), images)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 25_557_032


def test_evaluation_is_the_plain_program():
    images = jnp.zeros((2, 32, 32, 3))
    pair = both(50, dtype=jnp.bfloat16)
    texts = [
        jax.jit(lambda v, x, m=model: m.apply(v, x, False)).lower(variables_of(model), images)
        for model in pair
    ]
    assert texts[0].as_text() == texts[1].as_text()


def test_another_batch_norm_is_refused():
    model = models.resnet(18, batch_norm="Gram")
    with pytest.raises(ValueError, match="^batch_norm='Gram': use 'gram' or 'plain'"):
        model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)), True)


@pytest.mark.parametrize("sizes", [(8, 8), (7, 10), (1, 3)])
def test_pooling_before_the_norm(sizes):
    """Convolution, BatchNorm, ReLU, pooling: values, statistics, gradients; gammas of any sign."""
    rng = np.random.default_rng(5)
    x, kernel = rng.normal(0.5, 2, (4, *sizes, 5)), rng.normal(size=(3, 3, 5, 6))
    scale, bias = rng.normal(size=6), rng.normal(size=6)
    assert (scale < 0).any() and (scale > 0).any()
    settings: Any = {"momentum": 0.9, "epsilon": EPSILON}

    def conv(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)

    def plain(variables, x, kernel):
        norm = nn.BatchNorm(False, dtype=jnp.float64, **settings)
        y, new = norm.apply(variables, conv(x, kernel), mutable=["batch_stats"])
        return nn.max_pool(nn.relu(y), (3, 3), strides=(2, 2), padding="SAME"), new

    def pooled(variables, x, kernel):
        norm = gram_layers.PooledNorm(axis_name=None, **settings)
        return norm.apply(variables, conv, x, kernel, mutable=["batch_stats"])

    with jax.enable_x64(True):
        params = {"scale": scale, "bias": bias}
        variables = {"params": params, "batch_stats": {"mean": 0 * bias, "var": 0 * bias + 1}}
        weights = rng.normal(size=(4, -(-sizes[0] // 2), -(-sizes[1] // 2), 6))

        def gradients(layer):
            def loss(params, x, kernel):
                y, new = layer({**variables, "params": params}, x, kernel)
                return jnp.sum(y * weights), (y, new)

            return jitted(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), params, x, kernel)

        found, wanted = gradients(pooled), gradients(plain)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
        jax.tree.map(close, found, wanted)


def test_what_the_backward_pass_keeps():
    """Neither the stem's convolution nor an output of the widening ones is among it."""
    images = np.random.default_rng(3).normal(size=(2, 64, 64, 3)).astype(np.float32)
    kept = []
    for model in both(50, dtype=jnp.float32, num_filters=8, stage_sizes=(2, 1)):
        shapes = variables_of(model)
        variables = random_leaves(shapes, dtype=np.float32)

        def forward(params, model=model, state=variables["batch_stats"]):
            variables = {"params": params, "batch_stats": state}
            return model.apply(variables, images, True, mutable=["batch_stats"])

        pullback = jax.vjp(forward, variables["params"])[1]
        leaves = map(np.asarray, jax.tree.leaves(pullback))
        arrays = {(leaf.shape, leaf.tobytes()) for leaf in leaves if leaf.dtype == np.float32}
        found = collections.Counter(shape for shape, _ in arrays)
        kept.append([found[2, 32, 32, 8], found[2, 16, 16, 32], found[2, 8, 8, 64]])
    assert kept[0] == [0, 2, 1]  # what follows each ReLU
    assert min(a - b for a, b in zip(kept[1], kept[0], strict=True)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("span", [1, 0])
def test_a_short_training_run_ends_where_the_plain_one_does(tiny_records, tmp_path, span):
    """The digits' recipe, 60 steps on 8 devices: losses of single steps, and both ends."""

    def losses(batch_norm):
        changes = {"batch_norm": batch_norm, "bn_span": span, "train_steps": "60"}
        sizes = {"resnet_depth": 50, "image_size": 32, "train_batch_size": 32}
        config = make_tiny_config(tiny_records, **changes, **sizes).lock()
        plan = make_programs(config, str(tmp_path))
        recipe = make_recipe(config, plan.benchmark.num_train_examples)
        abstract = plan.state(recipe)
        ((_, lowered),) = plan.lower_train(recipe, abstract)
        step = lowered.compile(QUICK)
        everywhere = meshes.replicated(plan.mesh)
        init = functools.partial(steps.init_state, plan.benchmark.init, recipe)
        state = jax.jit(init, out_shardings=everywhere, compiler_options=QUICK)()
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plan.totals(abstract))
        totals = jax.device_put(zeros, everywhere)
        batches = plan.benchmark.train_batches(32, 0, 1, 0)
        found = []
        for batch in itertools.islice(meshes.Feed(batches, plan.mesh), recipe.total_steps):
            state, totals, loss = step(state, totals, batch)
            found.append(float(loss))
        return np.array(found)

    ours, plain = losses("gram"), losses("plain")
    np.testing.assert_allclose(ours[:5], plain[:5], rtol=1e-3)
    ends = ours[-10:].mean(), plain[-10:].mean()
    assert ends[1] < 0.8 * plain[:3].mean()
    assert ends[0] == pytest.approx(ends[1], rel=0.1)
