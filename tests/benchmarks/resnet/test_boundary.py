"""Compares `boundary`, interpreted, with NumPy in float64, and its blocks with plain ones."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import models
from benchmarks.resnet import boundary, variants
from benchmarks.resnet.boundary import Arguments, Results
from common.errors import ConfigError
from tests.common.layers.test_gram_resnet import (
    agree,
    assert_rounded_as_the_plain_one,
    assert_same_variables,
    both,
    leaves_in_float64,
    on_eight_devices,
    trace_for,
    trained,
    variables_of,
)


def draw(shape, channels, dtype, seed=0):
    """`Arguments` of b, h, w and C, E, D, S, with values that `dtype` has, in float64."""
    rng = np.random.default_rng(seed)
    inner2, inner1, outer, projected = channels

    def normal(*sides):
        return rng.normal(size=sides).astype(np.dtype(dtype)).astype(np.float64)

    norms = [rng.normal(size=sides).astype(np.float32) for sides in ((5, inner1), (3, inner2))]
    arrays = (
        *(normal(*shape, inner1), normal(*shape, inner1)),
        *(normal(*shape, outer), np.maximum(normal(*shape, outer), 0)),
        *(normal(*shape, inner2), *norms, normal(outer, inner1), normal(inner2, outer)),
        *((normal(*shape, projected), normal(projected, outer)) if projected else ()),
    )
    return Arguments(*arrays)


def by_hand(arguments):
    """The formulas in float64, one pixel of one image at a time."""
    has_projection = arguments.x is not None
    dz, y1, dout, out, y2, norm1, norm2, w1, w3 = (np.asarray(x, float) for x in arguments[:9])
    dy, product = np.zeros_like(out), np.zeros_like(y2)
    dw1, sum_ady = np.zeros(w1.shape), np.zeros(w3.shape)
    for at in np.ndindex(out.shape[:3]):
        mean, factor, bias, slope, constant = norm1
        is_alive = (y1[at] - mean) * factor + bias > 0
        dy1 = factor * dz[at] * is_alive + slope * (y1[at] - mean) + constant
        dy[at] = (dout[at] + w1 @ dy1) * (out[at] > 0)
        product[at] = w3 @ dy[at]
        dw1 += np.outer(out[at], dy1)
        a = np.maximum((y2[at] - norm2[0]) * norm2[1] + norm2[2], 0)
        sum_ady += np.outer(a, dy[at])
    results = Results(dy, product, dw1, sum_ady, dy.sum((0, 1, 2)))
    if has_projection:
        flat = dy.reshape(-1, dy.shape[-1])
        sum_xdy = arguments.x.reshape(-1, arguments.x.shape[-1]).T @ flat
        results = results._replace(x_product=dy @ arguments.wx.T, sum_xdy=sum_xdy)
    return results


def typed(arguments, dtype):
    """The norms have float32, but for float64."""
    wide = np.promote_types(dtype, np.float32)
    dtypes = [wide if i in (5, 6) else dtype for i in range(len(arguments))]
    pairs = zip(arguments, dtypes, strict=True)
    return Arguments(*(x if x is None else jnp.asarray(x, one) for x, one in pairs))


FORMS = {"kernel": functools.partial(boundary.fused, interpret=True), "plain": boundary.plain}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, 1e-13), (np.float32, 3e-6), (jnp.bfloat16, 1e-2)]
)
@pytest.mark.parametrize(
    ("shape", "channels", "stride"),
    [
        # Full and ragged windows; the channels of stage 1 and 2 lie in other registers.
        ((128, 2, 3), (8, 16, 24, 0), 1),
        ((130, 1, 2), (8, 16, 128, 8), 1),
        ((5, 1, 7), (128, 128, 256, 0), 1),
        ((140, 1, 1), (128, 8, 128, 128), 1),
        ((3, 6, 6), (8, 128, 8, 8), 1),
        # A step has a part of a row, one row, or two pixels; rows in one half, or in two.
        ((2, 4, 40), (8, 16, 24, 0), 2),
        ((130, 2, 2), (8, 16, 128, 8), 2),
        ((3, 6, 34), (8, 8, 8, 0), 2),
        ((3, 9, 6), (8, 128, 8, 8), 3),
    ],
)
def test_sums_and_gradients(shape, channels, stride, dtype, tolerance, form):
    arguments = draw(shape, channels, dtype)
    sparse = np.zeros_like(arguments.dout)
    sparse[:, ::stride, ::stride] = arguments.dout[:, ::stride, ::stride]
    expected = by_hand(arguments._replace(dout=sparse))
    arguments = arguments._replace(dout=arguments.dout[:, ::stride, ::stride])
    with jax.enable_x64(True):
        actual = jax.jit(FORMS[form])(typed(arguments, dtype))
        wide = np.promote_types(dtype, np.float32)
        dtypes = Results(dtype, dtype, wide, wide, wide, dtype, wide)
    for name, want in expected._asdict().items():
        if want is None:
            assert getattr(actual, name) is None
            continue
        assert getattr(actual, name).dtype == getattr(dtypes, name)
        got = np.asarray(getattr(actual, name), np.float64)
        assert got.shape == want.shape, name
        assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want), name


@pytest.mark.parametrize(("channels", "order"), [(64, "0, 3, 2, 1"), (128, "3, 0, 2, 1")])
def test_arrays_have_the_kernels_layout_on_tpus(channels, order):
    x = jax.ShapeDtypeStruct((112, 4, 4, channels), jnp.bfloat16)
    traced = jax.jit(boundary.laid_out).trace(x)
    on_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "@LayoutConstraint" in on_tpu and f"dense<[{order}]>" in on_tpu
    few = jax.jit(boundary.laid_out).trace(jax.ShapeDtypeStruct((32, 4, 4, channels), jnp.bfloat16))
    assert "@LayoutConstraint" not in few.lower(lowering_platforms=("tpu",)).as_text()


def test_the_kernel_rounds_as_the_plain_form():
    """Only the order of sums differs, so few gradients get another bfloat16."""
    arguments = typed(draw((130, 3, 4), (8, 16, 24, 8), jnp.bfloat16, seed=2), jnp.bfloat16)
    kernel, plain = (jax.jit(form)(arguments) for form in FORMS.values())
    for name in ("dy", "product", "x_product"):
        ours, theirs = getattr(kernel, name), getattr(plain, name)
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.mean(ours != theirs) < 0.01
        assert np.abs(ours - theirs).max() <= 2**-7 * np.abs(theirs).max()
    for name in ("dw1", "sum_ady", "sum_dy", "sum_xdy"):
        ours, theirs = getattr(kernel, name), getattr(plain, name)
        assert np.linalg.norm(ours - theirs) <= 1e-3 * np.linalg.norm(theirs)


# Images, side and inner channels: the first two stages of ResNet-50, and a batch that does not fill
# the kernel's windows. Elsewhere than on TPUs, small ones go through Pallas's interpreter.
LARGE, SMALL = ((128, 56, 64), (128, 28, 128), (100, 28, 128)), ((3, 4, 64), (130, 2, 128))


@pytest.mark.device
def test_the_kernel_computes_what_the_plain_form_does(answer):
    """And how long both take on a TPU."""
    on_tpu, figures = jax.default_backend() == "tpu", {}
    fused = functools.partial(boundary.fused, interpret=not on_tpu)
    shapes = LARGE if on_tpu else SMALL
    for images, side, inner in shapes:
        name = f"block boundary, {images} x {side} x {side} x {4 * inner}"
        channels = (inner, inner, 4 * inner, 0)
        arguments = typed(draw((images, side, side), channels, jnp.bfloat16), jnp.bfloat16)
        results = []
        for form, function in ((name, fused), (f"{name} plain", boundary.plain)):
            compiled, seconds = jax.jit(function), []
            results.append(jax.block_until_ready(compiled(arguments)))
            for _ in range(10 if on_tpu else 0):
                started = time.monotonic()
                jax.block_until_ready(compiled(arguments))
                seconds.append(time.monotonic() - started)
            figures |= {f"{form} ms": 1e3 * statistics.median(seconds)} if on_tpu else {}
        others = [("its plain form", results[1], 5e-3)]
        others += [] if on_tpu else [("the formulas in float64", by_hand(arguments), 1e-2)]
        for what, other, tolerance in others:
            for ours, theirs in zip(*map(jax.tree.leaves, (results[0], other)), strict=True):
                ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
                error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
                assert error <= tolerance, f"{name} differs from {what} by {error:.2g}"
    text = f"{len(shapes)} kernels compute what their plain forms do"
    answer(text + ("" if on_tpu else ", in an interpreter"), figures)


# --- Models.


def with_kernels(monkeypatch, **kwargs):
    """(with interpreted kernels, plain), and how many kernels were traced."""
    calls = []

    def interpreted(arguments):
        calls.append(arguments.out.shape)
        return boundary.fused(arguments, interpret=True)

    monkeypatch.setattr(boundary, "backward", interpreted)
    plain = both(50, **kwargs)[1]
    return variants.compose_pallas(plain, "SAME"), plain, calls


@pytest.mark.long
def test_a_model_agrees_in_float64(monkeypatch):
    rng = np.random.default_rng(3)
    images, labels = rng.normal(size=(4, 24, 16, 3)), np.eye(5)[[0, 3, 1, 3]]
    with jax.enable_x64(True):
        *pair, calls = with_kernels(monkeypatch, stage_sizes=(3, 2, 1), strides=(1, 2, 2))
        agree(pair, images, labels)
    # The last boundary comes first. What is traced twice is compiled once.
    assert calls == [(4, 3, 2, 32)] * 2 + [(4, 6, 4, 16)] * 3


@pytest.mark.long
def test_a_model_on_eight_devices(monkeypatch):
    """Statistics of pairs of devices, and gradients added over all."""
    trace_for("TPU v4", monkeypatch)
    norm = functools.partial(models.BatchNorm, axis_name="group")
    with jax.enable_x64(True):
        *pair, calls = with_kernels(monkeypatch, stage_sizes=(2, 1), norm=norm)
        on_eight_devices(pair)
    assert len(calls) == 2


@pytest.fixture(scope="module")
def in_float64():
    return leaves_in_float64(3, stage_sizes=(3,))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_rounds_as_far_as_the_plain_one(dtype, in_float64, monkeypatch):
    shape = {"stage_sizes": (3,), "num_filters": 8}
    *pair, _ = with_kernels(monkeypatch, dtype=dtype, **shape)
    assert_rounded_as_the_plain_one(pair, in_float64, dtype)


def test_variables_are_the_same():
    plain = both(50, stage_sizes=(2, 1), dtype=jnp.bfloat16)[1]
    assert_same_variables(variants.compose_pallas(plain, "SAME"), plain)


def test_only_programs_for_tpus_have_kernels():
    """One at each end of a block in the first two stages; evaluation has none."""
    plain = both(50, stage_sizes=(2, 3, 2), strides=(1, 2, 2), dtype=jnp.bfloat16)[1]
    model, images = variants.compose_pallas(plain, "SAME"), jnp.zeros((64, 32, 32, 3))
    variables, labels = variables_of(plain), jnp.zeros((64, 5))
    step = jax.jit(functools.partial(trained, model)).trace(variables, images, labels)
    texts = [step.lower(lowering_platforms=(one,)).as_text() for one in ("tpu", "cpu")]
    assert [text.count("tpu_custom_call") for text in texts] == [5, 0]
    assert [text.count("@LayoutConstraint") for text in texts] == [10, 0]  # of `out` and of `y1`
    texts = [
        jax.jit(lambda v, x, m=m: m.apply(v, x, False)).lower(variables, images).as_text()
        for m in (model, plain)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["TPU v2", "TPU v5 lite"])
def test_old_chips_are_refused(kind):
    device = AbstractDevice(kind, None, "tpu")
    mesh = AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=device)
    plain = both(50, stage_sizes=(1,), dtype=jnp.bfloat16)[1]
    step = functools.partial(trained, variants.compose_pallas(plain, "SAME"))
    arguments = variables_of(plain), jnp.zeros((2, 32, 32, 3)), jnp.zeros((2, 5))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    if kind == "TPU v2":
        with pytest.raises(ConfigError, match="^config.kernels='pallas': TPU v2 cannot multiply"):
            jax.eval_shape(mapped, *arguments)
    else:
        jax.eval_shape(mapped, *arguments)
