"""BlurPool against NumPy loops, and in whole models against convolutions of blurred inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.resnet.variants import blur_pool
from tests.benchmarks.resnet.networks import make
from tests.test_models import apply_and_capture, make_images, random_variables

KERNEL = np.outer([1, 2, 1], [1, 2, 1]) / 16


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
    """float64: each channel of [b, h, w, c] convolved with `KERNEL`, with zeros around."""
    channels = x.shape[-1]
    return convolve(x, KERNEL[..., None, None] * np.eye(channels), 1, 1)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 6, 5, 3), (1, 1, 4, 2), (1, 9, 8, 1)])
def test_values(shape, stride):
    x = make_images(*shape)
    y = jax.jit(blur_pool.blur, static_argnums=1)(x, stride)
    np.testing.assert_allclose(y, soften(x)[:, ::stride, ::stride], rtol=0, atol=1e-6)


def test_the_gradient_is_the_transposed_filter():
    x, g = jnp.asarray(make_images(2, 5, 6, 3)), make_images(2, 5, 6, 3, seed=1)
    computed = jax.jit(lambda x, g: jax.vjp(blur_pool.blur, x)[1](g)[0])(x, g)
    np.testing.assert_allclose(computed, soften(g), rtol=0, atol=1e-6)


def test_bfloat16_is_rounded_once():
    x = jnp.asarray(make_images(1, 8, 8, 2), jnp.bfloat16)
    y = blur_pool.blur(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, blur_pool.blur(x.astype(jnp.float32)).astype(jnp.bfloat16))


KINDS = {
    "1.5": {},
    "basic": {"resnet_depth": 18},
    "D": {"deep_stem": True},
    "1": {"resnet_version": "1"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_convolution_with_a_stride_gets_a_blurred_input(kind):
    """The rule of ffcv-imagenet: a stride, and at least 16 input channels."""
    model = make(1, 1, num_filters=16, blur_pool=True, **KINDS[kind])
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


def test_narrow_convolutions_are_left():
    plain, soft = (make(1, 1, num_filters=2, blur_pool=on) for on in (False, True))
    variables = random_variables(plain)
    images = make_images(1, 24, 24, 3)
    programs = [
        jax.jit(m.apply, static_argnums=2).lower(variables, images, False) for m in (plain, soft)
    ]
    assert programs[0].as_text() == programs[1].as_text()


@pytest.mark.parity
def test_pytorch_has_the_same_values_and_gradients():
    torch = pytest.importorskip("torch")
    x = make_images(2, 7, 8, 16)
    kernel: Any = make_images(3, 3, 16, 4, seed=1)
    images = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    filters = torch.tensor(KERNEL, dtype=torch.float32).repeat(16, 1, 1, 1)
    soft = torch.nn.functional.conv2d(images, filters, padding=1, groups=16)
    weight = torch.tensor(kernel.transpose(3, 2, 0, 1))
    y = torch.nn.functional.conv2d(soft, weight, stride=2, padding=1)
    torch.sin(y).sum().backward()

    def ours(x):
        window = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "precision": "highest"}
        y = jax.lax.conv_general_dilated(
            blur_pool.blur(x), kernel, (2, 2), ((1, 1), (1, 1)), **window
        )
        return jnp.sum(jnp.sin(y)), y

    gradient, result = jax.grad(ours, has_aux=True)(jnp.asarray(x))
    np.testing.assert_allclose(result, y.detach().numpy().transpose(0, 2, 3, 1), atol=2e-5)
    grad = images.grad.numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(gradient, grad, rtol=0, atol=2e-5)
