"""BiT's layers: against NumPy in float64, and networks of them against PyTorch.

`data/group_norm_logits.json` has what torch 2.13 computed in float32 with the weights that
`test_variants.seeded` draws, for its `image`: convolutions of kernels standardized by
`torch.var_mean`, and `torch.nn.functional.group_norm`.
"""

import json
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.resnet.variants import bit, v2
from tests.benchmarks.resnet.networks import make
from tests.benchmarks.resnet.variants.test_variants import image, variables_of
from tests.test_models import make_images, numpy_conv

STORED = json.loads(
    (pathlib.Path(__file__).parents[3] / "data" / "group_norm_logits.json").read_text()
)
GROUP: dict[str, Any] = {"classes": 7, "num_filters": 32, "normalization": "group"}


@pytest.mark.parametrize("name", STORED)
def test_logits_are_those_of_pytorch(name):
    version, block = name.split()
    depth = 50 if block == "bottleneck" else 18
    model = make(1, 1, **GROUP, resnet_version=version, resnet_depth=depth, max_pool="torch")
    variables = variables_of(model)
    assert set(variables) == {"params"}
    logits = np.asarray(jax.jit(model.apply, static_argnums=2)(variables, image(), False))[0]
    expected = np.array(STORED[name])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_kernels_are_standardized_for_each_output():
    kernel = np.random.default_rng(0).normal(3, 2, (3, 3, 5, 4))
    images = make_images(2, 9, 8, 5).astype(np.float64)
    expected = np.empty_like(kernel)
    for i in range(4):
        values = kernel[..., i]
        deviation = np.sqrt(np.mean((values - values.mean()) ** 2) + 1e-10)
        expected[..., i] = (values - values.mean()) / deviation
    np.testing.assert_allclose(bit.standardized(kernel), expected, rtol=1e-12, atol=1e-12)
    layer = bit.StandardizedConv(4, (3, 3), 2, padding=1)
    computed: Any = layer.apply({"params": {"kernel": kernel.astype(np.float32)}}, images)
    np.testing.assert_allclose(computed, numpy_conv(images, expected, 2), atol=1e-4)


def test_groups_are_normalised_within_each_image():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            settings: Any = {"use_running_average": False, "dtype": jnp.float32}
            return bit.group_norm(name="bn7", **settings)(x)

    x, draw = 2 + 3 * make_images(2, 5, 4, 96), np.random.default_rng(1)
    scale, bias = draw.normal(size=(2, 96)).astype(np.float32)
    computed: Any = Layer().apply({"params": {"gn7": {"scale": scale, "bias": bias}}}, x)
    expected = np.empty(x.shape)
    for row in range(2):
        for first in range(0, 96, 3):
            part = x[row, :, :, first : first + 3].astype(np.float64)
            normal = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
            expected[row, :, :, first : first + 3] = normal
    np.testing.assert_allclose(computed, expected * scale + bias, rtol=1e-4, atol=1e-4)


def test_zeros_of_the_padding_win_over_negative_values():
    """BiT has no ReLU before its max-pool."""

    def pooled(has_zeros):
        conv = lambda *_, **__: lambda x: x  # noqa: E731
        edge = ((1, 1), (1, 1))
        return np.asarray(v2.stem(images, 3, conv, conv, edge, has_zeros))

    images = jnp.asarray(-1 - np.abs(make_images(2, 7, 8, 3)))
    zeros, plain = pooled(True), pooled(False)
    inside = np.zeros((2, 4, 4, 3), bool)
    inside[:, 1:-1, 1:] = True  # of 7 rows both ends are at the edge, of 8 columns the first
    assert plain.max() < 0 and not zeros[~inside].any()
    np.testing.assert_array_equal(zeros[inside], plain[inside])


def test_images_are_independent_in_training_and_nothing_is_kept():
    model, images = make(1, 1, **GROUP, resnet_depth=18), make_images(3, 24, 24, 3)
    variables = variables_of(model)

    @jax.jit
    def both(images):
        logits, state = model.apply(variables, images, True, mutable=["batch_stats"])
        assert state == {}
        return logits, model.apply(variables, images[1:2], False)

    logits, second = both(images)
    np.testing.assert_allclose(logits[1], second[0], rtol=1e-5, atol=1e-5)
