"""FLOPs from jaxprs."""

import jax
import jax.numpy as jnp
import pytest

import benchmarks
from configs import resnet50
from engine.forecast.flops import count_flops


def shaped(*sides):
    return jax.ShapeDtypeStruct(sides, jnp.float32)


def test_flops_of_matrix_products_and_loops():
    assert count_flops(jnp.matmul, shaped(3, 4), shaped(4, 5)) == 2 * 3 * 4 * 5
    assert count_flops(jax.jit(jnp.matmul), shaped(2, 3, 4), shaped(2, 4, 5)) == 2 * 2 * 3 * 4 * 5

    def powers(x):
        return jax.lax.scan(lambda y, _: (y @ x, None), x, None, length=6)[0]

    assert count_flops(powers, shaped(4, 4)) == 6 * 2 * 4**3

    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: x @ x)

    assert count_flops(either, shaped(4, 4)) == 2 * 4**3

    def by_platform(x):  # a form for some hardware is not the definition
        return jax.lax.platform_dependent(x, tpu=lambda x: x @ x @ x, default=lambda x: x @ x)

    assert count_flops(by_platform, shaped(4, 4)) == 2 * 4**3

    def endless(x):
        return jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ x, x)

    assert count_flops(endless, shaped(4, 4)) is None


def test_flops_of_convolutions():
    def convolve(x, kernel, groups=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    expected = 2 * (2 * 4 * 4 * 6) * (3 * 3 * 4)
    assert count_flops(convolve, shaped(2, 8, 8, 4), shaped(3, 3, 4, 6)) == expected
    grouped = count_flops(lambda x, k: convolve(x, k, 2), shaped(2, 8, 8, 4), shaped(3, 3, 2, 6))
    assert grouped == expected // 2


def test_flops_of_resnet_50(tmp_path):
    """4.09 billion multiplications and additions for one image of 224 x 224, as published."""
    benchmark = benchmarks.load(resnet50.get_config().lock(), str(tmp_path))
    weights = jax.eval_shape(benchmark.init, jax.random.key(0))
    count = count_flops(benchmark.predict, *weights, *benchmark.batch_spec("eval", 1))
    assert count == pytest.approx(2 * 4.09e9, rel=0.001)
